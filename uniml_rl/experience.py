"""What flows from a rollout to the loss: [B, T] tensors aligned with each segment of a trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modalities.base import Cut, Trajectory


@dataclass
class SegmentExperience:
    """One segment's decisions as a loss sees them. All [B, T] float32 unless said otherwise."""

    mask: Tensor  # [B, T] bool: trained decisions of samples whose reward is valid
    groups: Tensor  # [B] int64
    rollout_log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    correction: Tensor | None = None  # weight of each decision against a sampler with other numerics
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None


@dataclass
class Experience:
    """A trajectory with its advantages."""

    trajectory: Trajectory
    segments: list[SegmentExperience]


@dataclass
class Minibatch:
    """The part of an experience that one optimizer step uses."""

    experience: Experience
    roots: Tensor  # [b] int64 rows of the first segment
    weights: list[Tensor]  # per segment [B, T] float32: each decision's weight, 0 outside of the minibatch
    denominators: list[Tensor]  # per segment, 0-dim float64, over all ranks
    trained_decisions: int  # of all segments and ranks


def to_segment(trajectory: Trajectory, values: Tensor, valid: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """The mean of the valid leaves' `values` [B_last] over each row of a segment, and whether there is one.

    Returns ([B_s] float32, [B_s] bool); rows without a valid leaf get 0 and False.
    """
    ancestors = torch.arange(values.shape[0])
    for index in range(len(trajectory.segments) - 1, segment, -1):
        parent = trajectory.segments[index].parent
        if parent is not None:
            ancestors = parent[ancestors]
    rows = trajectory.segments[segment].num_rows
    known = torch.where(valid, values.double(), 0.0)
    total = torch.zeros(rows, dtype=torch.float64).index_add_(0, ancestors, known)
    count = torch.zeros(rows, dtype=torch.float64).index_add_(0, ancestors, valid.double())
    return (total / count.clamp_min(1)).float(), count > 0


def put(values: Tensor, cut: Cut, part: Tensor) -> None:
    """Writes a cut's part [b, t] into a tensor [B, T] on the CPU."""
    columns = torch.arange(values.shape[1])[cut.steps]
    values[cut.rows.unsqueeze(1), columns.unsqueeze(0)] = part.detach().float().cpu()
