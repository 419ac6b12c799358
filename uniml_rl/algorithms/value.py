"""The critic's loss, and how much of the returns it explains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ValueTerms:
    """A value loss per decision and where its clip holds."""

    loss: Tensor  # [b, t] float32
    clipped: Tensor  # [b, t] bool: the clip is active, so this decision's gradient is 0


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueTerms:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2 per decision (PPO's reference implementation).

    Without `clip` it is (V - R)^2 / 2. All arguments [b, t]; gradient goes to `values` alone.
    """
    values, old_values, returns = values.float(), old_values.detach().float(), returns.detach().float()
    free = (values - returns).square() / 2
    if clip is None:
        return ValueTerms(free, torch.zeros_like(free, dtype=torch.bool))
    bounded = (values.clamp(old_values - clip, old_values + clip) - returns).square() / 2
    return ValueTerms(torch.maximum(free, bounded), bounded > free)


def explained_variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """[5] float64: count, sum R, sum R^2, sum (R - V), sum (R - V)^2 under the mask; sums of parts and ranks add up."""
    returns = returns[mask].detach().double()
    residual = returns - values[mask].detach().double()
    count = torch.tensor(float(len(returns)), dtype=torch.float64, device=returns.device)
    return torch.stack([count, returns.sum(), returns.square().sum(), residual.sum(), residual.square().sum()])


def explained_variance(sums: Tensor) -> float:
    """1 - Var(R - V) / Var(R) from `explained_variance_sums`; NaN without returns or where they are all equal."""
    count, total, squares, residual, residual_squares = sums.tolist()
    if count == 0:
        return float("nan")
    variance = squares / count - (total / count) ** 2
    # What float64 cannot tell from 0 is 0: the quotient would be rounding noise.
    if variance <= 1e-13 * squares / count:
        return float("nan")
    return 1 - (residual_squares / count - (residual / count) ** 2) / variance
