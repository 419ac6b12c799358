"""Probability ratios and the surrogate losses built on them, per decision, in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from modalities.base import LogProbUnit, Need


@dataclass(frozen=True)
class SurrogateInputs:
    """What a surrogate loss may read of b rows and t decisions; `log_ratio`, `log_probs` and `now` have a gradient."""

    log_ratio: Tensor  # [b, t] float32, log pi - log pi_old, of the decision or of its whole sequence
    advantages: Tensor  # [b, t] float32
    log_probs: Tensor  # [b, t] float32, log pi
    mask: Tensor  # [b, t] bool
    unit: LogProbUnit
    iteration: int
    now: dict[Need, Tensor] = field(default_factory=dict)
    """What the surrogate's `needs` name, under the current weights."""
    old: dict[Need, Tensor] = field(default_factory=dict)
    """The same under the weights that the iteration began with, and "log_prob"."""


@dataclass(frozen=True)
class SurrogateTerms:
    """A surrogate loss per decision and what happened to it."""

    loss: Tensor  # [b, t] float32, to be minimised
    clipped: Tensor  # [b, t] bool: a bound is active; except for CISPO's, this decision's gradient is 0
    ratio: Tensor  # [b, t] float32, detached


def log_ratio(new: Tensor, old: Tensor, clamp: float = 20.0, *, mask: Tensor | None = None) -> Tensor:
    """log pi_new - log pi_old per decision [b, t], clamped to +-`clamp` so that its exponential stays finite.

    Gradient flows to `new` alone, and none beyond the clamp. Outside of `mask` the result is 0 and has no gradient.
    """
    difference = new.float() - old.detach().float()
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    return difference.clamp(-clamp, clamp)


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """GSPO (Zheng et al. 2025, eq. 7): the mean log-ratio over a row's trained decisions, given to each of them.

    Rows are whole. [b, t] float32, 0 outside of the mask and for a row without a trained decision.
    """
    mean = torch.where(mask, log_ratio, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    return torch.where(mask, mean, 0.0)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> SurrogateTerms:
    """PPO (Schulman et al. 2017, eq. 7) as a loss: max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(log_ratio).

    With `dual` = c > 1 (Ye et al. 2020, eq. 3) a decision with A < 0 loses at most -c A, so that a huge ratio has no
    gradient either. `clipped` marks the decisions whose gradient is 0 through either bound.

    Args:
        log_ratio, advantages: [b, t] float32; no gradient goes to the advantages.
    """
    advantages = advantages.detach()
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if dual is not None:
        ceiling = -dual * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(beyond, ceiling, loss), clipped | beyond
    return SurrogateTerms(loss, clipped, ratio.detach())


def score_function_surrogate(log_probs: Tensor, advantages: Tensor, log_ratio: Tensor, mask: Tensor) -> SurrogateTerms:
    """REINFORCE (Williams 1992): -A log pi, whose gradient is the policy gradient of decisions drawn from pi itself.

    All [b, t]; the log-ratio is reported and not used. Outside of the mask the loss is 0 and has no gradient.
    """
    loss = -advantages.detach() * torch.where(mask, log_probs.float(), 0.0)
    return SurrogateTerms(loss, torch.zeros_like(mask), log_ratio.detach().exp())


def capped_weight_surrogate(
    log_probs: Tensor, advantages: Tensor, log_ratio: Tensor, low: float, high: float, mask: Tensor
) -> SurrogateTerms:
    """CISPO (MiniMax 2025, eq. 4 and 5): -stopgrad(clip(r, low, high)) A log pi. `high` is the weight's bound itself.

    All [b, t]. `clipped` marks the decisions whose weight is a bound; they keep a gradient. Outside of the mask the
    loss is 0 and has no gradient.
    """
    ratio = log_ratio.detach().exp()
    weights = ratio.clamp(low, high)
    loss = -weights * advantages.detach() * torch.where(mask, log_probs.float(), 0.0)
    return SurrogateTerms(loss, weights != ratio, ratio)


def penalised_surrogate(
    log_ratio: Tensor, advantages: Tensor, epsilon: float, weights: Tensor | float
) -> SurrogateTerms:
    """DRPO (2026): -A r + |A| w (r - 1)^2 / (2 epsilon), r = exp(log_ratio).

    Smallest at r = 1 + sign(A) epsilon / w; beyond that its gradient pulls the ratio back, where a clip has none.

    Args:
        log_ratio, advantages: [b, t] float32; no gradient goes to the advantages.
        weights: w, [b, t] or one number; no gradient.
    """
    advantages, ratio = advantages.detach(), log_ratio.exp()
    loss = -advantages * ratio + advantages.abs() * weights * (ratio - 1).square() / (2 * epsilon)
    return SurrogateTerms(loss, torch.zeros_like(ratio, dtype=torch.bool), ratio.detach())
