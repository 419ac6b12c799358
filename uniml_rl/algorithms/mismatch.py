"""Correction for a sampler whose numerics are not the trainer's: rho = exp(old - rollout), per decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Correction:
    """What multiplies the policy loss, and which decisions are left."""

    weights: Tensor  # [B, T] float32, detached; 0 where not kept
    kept: Tensor  # [B, T] bool: subset of the trained decisions; the others leave numerator and denominator


def truncate_mismatch(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float) -> Correction:
    """Truncated importance sampling (Yao et al. 2025): weight min(rho, cap) on each decision.

    All [B, T]. A decision whose rollout log-prob is not finite leaves numerator and denominator.
    """
    difference, kept = _difference(old_log_probs, rollout_log_probs, mask)
    return Correction(torch.where(kept, difference.exp().clamp(max=cap), 0.0), kept)


def mask_mismatch(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    level: Literal["decision", "sequence"],
) -> Correction:
    """Decisions with rho outside of [low, high] leave numerator and denominator; the others keep weight 1.

    At level "sequence" a whole row leaves when the geometric mean of rho over its finite trained decisions is outside.
    """
    difference, kept = _difference(old_log_probs, rollout_log_probs, mask)
    if level == "sequence":
        difference = difference.sum(1, keepdim=True) / kept.sum(1, keepdim=True)
    rho = difference.exp()
    kept = kept & (rho >= low) & (rho <= high)
    return Correction(kept.float(), kept)


def _difference(old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(old - rollout where both are finite and trained, else 0; where that is)."""
    difference = old_log_probs.detach().float() - rollout_log_probs.detach().float()
    kept = mask & difference.isfinite()
    return torch.where(kept, difference, 0.0), kept
