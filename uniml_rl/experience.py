"""What flows from a rollout to the loss: [B, T] tensors aligned with each segment of a trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modalities.base import Cut, Need, Trajectory
from modalities.samples import Sample
from modalities.trajectories import concatenate
from rewards.combine import RewardResult


@dataclass
class Rollout:
    """Samples with their trajectory and their rewards: the policy's own, or given ones with their labels."""

    trajectory: Trajectory
    samples: list[Sample]  # a row of the last segment each
    result: RewardResult

    def and_then(self, more: Rollout) -> Rollout:
        """Both rollouts' rows, of the same policy and rewards."""
        trajectory = concatenate([self.trajectory, more.trajectory])
        return Rollout(trajectory, self.samples + more.samples, concatenate_results([self.result, more.result]))


@dataclass
class SegmentExperience:
    """One segment's decisions as a loss sees them. All [B, T] float32 unless said otherwise."""

    mask: Tensor  # [B, T] bool: trained decisions of samples whose reward is valid
    groups: Tensor  # [B] int64
    old_log_probs: Tensor
    advantages: Tensor
    old: dict[Need, Tensor] = field(default_factory=dict)
    """What a surrogate reads of the old policy besides log-probs, [B, T, ...]."""
    correction: Tensor | None = None  # weight of each decision against a sampler with other numerics
    reference_log_probs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    drift: Tensor | None = None  # 0-dim: KTO's estimate of the KL to the reference


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


def ancestors(trajectory: Trajectory, segment: int) -> Tensor:
    """[B_last] int64: for each row of the last segment the row of `segment` that it descends from."""
    rows = torch.arange(trajectory.segments[-1].num_rows)
    for index in range(len(trajectory.segments) - 1, segment, -1):
        parent = trajectory.segments[index].parent
        if parent is not None:
            rows = parent[rows]
    return rows


def to_segment(trajectory: Trajectory, values: Tensor, valid: Tensor, segment: int) -> tuple[Tensor, Tensor]:
    """The mean of the valid leaves' `values` [B_last] over each row of a segment, and whether there is one.

    Returns ([B_s] float32, [B_s] bool); rows without a valid leaf get 0 and False.
    """
    rows = ancestors(trajectory, segment)
    total, count = torch.zeros(2, trajectory.segments[segment].num_rows, dtype=torch.float64)
    total.index_add_(0, rows, torch.where(valid, values.double(), 0.0))
    count.index_add_(0, rows, valid.double())
    return (total / count.clamp_min(1)).float(), count > 0


def leaves(trajectory: Trajectory, roots: Tensor) -> Tensor:
    """int64: the rows of the last segment that descend from the first segment's rows `roots`, one root after the
    other, as `modalities.trajectories.select` keeps them."""
    root_of_leaf = trajectory.roots(len(trajectory.segments) - 1)
    found = [(root_of_leaf == root).nonzero().flatten() for root in roots.tolist()]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.long)


def select_results(result: RewardResult, rows: Tensor) -> RewardResult:
    """The scores of some samples; failures are still counted over all of them."""
    return RewardResult(
        result.total[rows],
        result.valid[rows],
        {name: values[rows] for name, values in result.raw.items()},
        {name: values[rows] for name, values in result.weighted.items()},
        result.weights,
        result.failures,
    )


def concatenate_results(results: Sequence[RewardResult]) -> RewardResult:
    """The scores of several batches by the same rewards."""
    first = results[0]
    return RewardResult(
        torch.cat([result.total for result in results]),
        torch.cat([result.valid for result in results]),
        {name: torch.cat([result.raw[name] for result in results]) for name in first.raw},
        {name: torch.cat([result.weighted[name] for result in results]) for name in first.weighted},
        first.weights,
        {name: sum((result.failures[name] for result in results), Counter()) for name in first.failures},
    )


def put(values: Tensor, cut: Cut, part: Tensor) -> None:
    """Writes a cut's part [b, t, ...] into a tensor [B, T, ...] on the CPU."""
    columns = torch.arange(values.shape[1])[cut.steps]
    values[cut.rows.unsqueeze(1), columns.unsqueeze(0)] = part.detach().float().cpu()
