"""Advantage estimators. Rewards and returns come in, float32 advantages go out; nothing here has a gradient.

Means and standard deviations are taken in float64, in two passes and with ddof 0. Rewards are float32, so the float64
mean of equal rewards is that reward exactly (n * r is exact below n = 2**29), and a tied group gets exactly 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from uniml_rl.algorithms.aggregation import Reduce

AdvantageScale = Literal["group_std", "batch_std", "none"]
Gather = Callable[[Tensor], Tensor]
"""Concatenates a tensor along its first dimension over all ranks, in the same order on every rank."""


@dataclass(frozen=True)
class GroupReport:
    """How many groups there were and how many taught nothing; those without a valid sample do not count."""

    without_signal: int
    """Groups in which every advantage is 0: tied, or of one valid sample."""
    groups: int
    """Groups of this rank's batch."""
    singletons: int
    """Groups with exactly one valid sample."""


def group_advantages(
    rewards: Tensor,
    valid: Tensor,
    groups: Tensor,
    *,
    scale: AdvantageScale,
    epsilon: float,
    reduce: Reduce | None = None,
) -> tuple[Tensor, GroupReport]:
    """GRPO (Shao et al. 2024, eq. 3 ff.): (r - mean of its group) / (std + epsilon).

    `group_std` divides by the group's own standard deviation, `batch_std` by that of all valid rewards of the batch
    (Flow-GRPO's global std; over all ranks with `reduce`), `none` by nothing (Dr. GRPO). A sample whose reward failed
    leaves mean and std and gets 0. A group of one, and a group of equal rewards, get exactly 0.

    Args:
        rewards: [B], any real dtype; may be NaN where not valid.
        valid: [B] bool.
        groups: [B] int64; a group's rows are all here, on this rank.

    Returns:
        [B] float32 and the report.
    """
    rewards = _clean(rewards, valid)
    row_group, counts = _group_counts(valid, groups)
    deviation = _deviation_from_group(rewards, valid, row_group, counts)
    if scale == "group_std":
        variance = _per_group(deviation.square(), row_group, counts) / counts
        advantages = _scaled(deviation, variance.sqrt()[row_group] + epsilon)
    elif scale == "batch_std":
        advantages = _scaled(deviation, _moments(rewards, valid, reduce)[1] + epsilon)
    else:
        advantages = deviation
    return advantages.float(), _report(advantages, row_group, counts)


def leave_one_out(rewards: Tensor, valid: Tensor, groups: Tensor) -> tuple[Tensor, GroupReport]:
    """RLOO (Ahmadian et al. 2024): r_i - mean of the other valid rewards of its group; no division by a std.

    Computed as (r_i - group mean) * n / (n - 1), the same number. Shapes and the treatment of failed samples, groups of
    one and ties as in `group_advantages`.
    """
    rewards = _clean(rewards, valid)
    row_group, counts = _group_counts(valid, groups)
    deviation = _deviation_from_group(rewards, valid, row_group, counts)
    advantages = deviation * (counts / (counts - 1).clamp(min=1))[row_group]
    return advantages.float(), _report(advantages, row_group, counts)


def batch_advantages(
    values: Tensor, mask: Tensor, *, epsilon: float, scale: bool = True, reduce: Reduce | None = None
) -> Tensor:
    """Whitening: (x - mean) / (std + epsilon) over all entries under the mask, over all ranks with `reduce`.

    Serves rewards [B] (one entry per sample) and advantages [B, T] (one per decision) alike; `scale=False` only
    centres. A single entry, and equal ones, get exactly 0. float32, 0 outside of the mask.
    """
    values = _clean(values, mask)
    mean, std = _moments(values, mask, reduce)
    centred = values - mean
    return torch.where(mask, _scaled(centred, std + epsilon) if scale else centred, 0.0).float()


class RunningPromptStatistics:
    """DDPO (Black et al. 2023, section 4.3): rewards are normalised per prompt over its last `buffer_size` rewards.

    A prompt with fewer than `min_count` remembered rewards is normalised by the batch's mean and std instead. Prompts
    are integer ids, so two prompts of equal text stay apart.
    """

    def __init__(self, buffer_size: int, min_count: int, epsilon: float) -> None:
        self.buffer_size, self.min_count, self.epsilon = buffer_size, min_count, epsilon
        self._rewards: dict[int, deque[float]] = {}

    def update(
        self, rewards: Tensor, valid: Tensor, prompts: Tensor, *, gather: Gather | None = None
    ) -> tuple[Tensor, GroupReport]:
        """Remembers the rewards, then normalises them: (r - mean) / (std + epsilon), [B] float32.

        Args:
            rewards, valid, prompts: [B]; as in `group_advantages`, prompts taking the place of groups.
            gather: collects the other ranks' rewards, so that every rank holds the same statistics.
        """
        row_group, counts = _group_counts(valid, prompts)
        rewards = _clean(rewards, valid)
        seen_rewards, seen_valid, seen_prompts = (gather(x) if gather else x for x in (rewards, valid, prompts))
        for prompt, reward in zip(seen_prompts[seen_valid].tolist(), seen_rewards[seen_valid].tolist(), strict=True):
            self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        batch_mean, batch_std = _moments(seen_rewards, seen_valid, None)
        mean, std = torch.empty_like(rewards), torch.empty_like(rewards)
        for row, prompt in enumerate(prompts.tolist()):
            history = self._rewards.get(prompt, ())
            if len(history) < self.min_count or not history:
                mean[row], std[row] = batch_mean, batch_std
            else:
                remembered = torch.tensor(list(history), dtype=torch.float64)
                mean[row], std[row] = remembered.mean(), remembered.std(correction=0)
        advantages = torch.where(valid, _scaled(rewards - mean, std + self.epsilon), 0.0)
        return advantages.float(), _report(advantages, row_group, counts)

    def state_dict(self) -> dict[str, Tensor]:
        """The remembered rewards as tensors: prompt ids [P], how many each has [P], and all of them in that order."""
        return {
            "prompts": torch.tensor(list(self._rewards), dtype=torch.long),
            "counts": torch.tensor([len(history) for history in self._rewards.values()], dtype=torch.long),
            "rewards": torch.tensor([r for history in self._rewards.values() for r in history], dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores `state_dict`; a smaller buffer keeps the latest rewards."""
        parts = state["rewards"].split(state["counts"].tolist())
        self._rewards = {
            prompt: deque(part.tolist(), maxlen=self.buffer_size)
            for prompt, part in zip(state["prompts"].tolist(), parts, strict=True)
        }


def place_terminal_reward(rewards: Tensor, mask: Tensor) -> Tensor:
    """[B] rewards onto the last trained decision of each row: [B, T] float32. A row without one receives none."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, columns, -1).amax(1, keepdim=True) if mask.shape[1] else mask.new_zeros(len(mask), 1)
    return torch.where(mask & (columns == last), rewards.float().unsqueeze(1), 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lambda_: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015) over the trained decisions of each row.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lambda A_{t+1};  R_t = A_t + V_t

    Here t + 1 is the next decision under the mask: what lies between (tool output, padding) neither discounts nor
    counts. After the last one the value is 0, for complete and for cut-off rows alike.

    Args:
        rewards, values: [B, T]; entries outside of the mask are not read.
        mask: [B, T] bool.

    Returns:
        Advantages and returns, [B, T] float32, 0 outside of the mask.
    """
    rewards, values = (torch.where(mask, x.detach().float(), 0.0) for x in (rewards, values))
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        now = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lambda_ * next_advantage
        advantages[:, t] = torch.where(now, advantage, 0.0)
        next_advantage = torch.where(now, advantage, next_advantage)
        next_value = torch.where(now, values[:, t], next_value)
    return advantages, advantages + values


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R_t = r_t + gamma R_{t+1} over the decisions under the mask: [B, T] float32, 0 outside of it."""
    return gae(rewards, torch.zeros_like(rewards, dtype=torch.float32), mask, gamma, 1.0)[1]


def overlong_penalty(lengths: Tensor, maximum: int, buffer: int, factor: float) -> Tensor:
    """DAPO (Yu et al. 2025, eq. 13), as a positive number: factor x min(length - (maximum - buffer), buffer) / buffer.

    0 up to maximum - buffer, `factor` from maximum on. lengths [B] -> [B] float32.
    """
    excess = (lengths - (maximum - buffer)).clamp(0, buffer)
    return factor * excess.float() / buffer


def groups_with_signal(rewards: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """The ids of groups of at least two valid rewards that are not all equal: [G] int64. Arguments [B]."""
    deviation = _deviation_from_group(_clean(rewards, valid), valid, *_group_counts(valid, groups))
    return groups[deviation != 0].unique()


def broadcast_to_decisions(advantages: Tensor, mask: Tensor) -> Tensor:
    """One advantage per row [B] given to each of its trained decisions: [B, T] float32, 0 outside of the mask."""
    return torch.where(mask, advantages.float().unsqueeze(1), 0.0)


def clip_advantages(advantages: Tensor, clip: float | None) -> Tensor:
    """Advantages clamped to [-clip, clip]; unchanged with None."""
    return advantages if clip is None else advantages.clamp(-clip, clip)


def _clean(rewards: Tensor, valid: Tensor) -> Tensor:
    """float64 of the float32 rewards, with 0 where not valid so that a NaN there cannot spread through a sum."""
    return torch.where(valid, rewards.detach().float(), 0.0).double()


def _group_counts(valid: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """([B] index of each row's group, [G] valid rows of each group)."""
    ids, row_group = groups.unique(return_inverse=True)
    counts = torch.zeros(len(ids), dtype=torch.long, device=groups.device)
    return row_group, counts.index_add_(0, row_group, valid.long())


def _per_group(values: Tensor, row_group: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add_(0, row_group, values)


def _deviation_from_group(rewards: Tensor, valid: Tensor, row_group: Tensor, counts: Tensor) -> Tensor:
    mean = _per_group(rewards, row_group, counts) / counts  # NaN without a valid row, which nobody reads
    return torch.where(valid, rewards - mean[row_group], 0.0)


def _scaled(deviation: Tensor, divisor: Tensor) -> Tensor:
    """deviation / divisor, and 0 for a deviation of 0 even where epsilon and the spread are 0."""
    return torch.where(deviation == 0, 0.0, deviation / divisor)


def _moments(values: Tensor, mask: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Mean and population std under the mask, in two passes, over all ranks with `reduce`. NaN of nothing."""
    count_and_sum = torch.stack([mask.sum().double(), values.sum()])
    count, total = reduce(count_and_sum) if reduce else count_and_sum
    mean = total / count
    squares = torch.where(mask, values - mean, 0.0).square().sum()
    return mean, ((reduce(squares) if reduce else squares) / count).sqrt()


def _report(advantages: Tensor, row_group: Tensor, counts: Tensor) -> GroupReport:
    signal = _per_group(advantages.abs(), row_group, counts)
    return GroupReport(int((signal[counts > 0] == 0).sum()), int((counts > 0).sum()), int((counts == 1).sum()))
