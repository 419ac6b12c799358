"""The critic's loss, per decision, in float32."""

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
