"""From the rewards of samples to the advantage of each decision, by the estimator that the settings choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modalities.base import Trajectory
from uniml_rl.algorithms import advantages as estimators
from uniml_rl.algorithms.advantage_settings import (
    AdvantageSettings,
    BatchAdvantage,
    GAEAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    ReturnsAdvantage,
    RunningPromptAdvantage,
)
from uniml_rl.engines.base import Engine
from uniml_rl.experience import SegmentExperience
from uniml_rl.monitor.metrics import Metrics

_WHITENING_EPSILON = 1e-8


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards, for the rows of a segment."""

    weight: float
    values: Tensor  # [B]
    valid: Tensor  # [B] bool


class CreditAssignment:
    """An advantage estimator with what it remembers from iteration to iteration."""

    def __init__(self, settings: AdvantageSettings) -> None:
        self.settings = settings
        # By segment: the segments of a chain share the reward, which must not be remembered once for each.
        self.running_statistics: dict[int, estimators.RunningPromptStatistics] = {}

    def assign(
        self,
        experience: SegmentExperience,
        trajectory: Trajectory,
        index: int,
        rewards: Tensor,
        valid: Tensor,
        penalty: Tensor,
        engine: Engine,
        metrics: Metrics,
        parts: Sequence[RewardPart] | None = None,
    ) -> None:
        """Fills in the segment's advantages [B, T], and its returns if there is a critic.

        `rewards` and `valid` are [B]; `penalty` [B, T] is what each decision is charged with. `parts` are the single
        rewards, read where each of them is normalised by itself.
        """
        settings, mask = self.settings, experience.mask
        if isinstance(settings, GAEAdvantage):
            assert experience.values is not None
            per_decision = estimators.place_terminal_reward(rewards, mask) - penalty
            result, experience.returns = estimators.gae(
                per_decision, experience.values, mask, settings.gamma, settings.lambda_
            )
            metrics.explained_variance("value/explained_variance", experience.values, experience.returns, mask=mask)
        elif isinstance(settings, ReturnsAdvantage):
            if settings.baseline == "group":
                rewards = self._compared(rewards, valid, experience.groups, "none", 0.0, engine, metrics)
            per_decision = estimators.place_terminal_reward(rewards, mask) - penalty
            result = estimators.discounted_returns(per_decision, mask, settings.gamma)
        else:
            per_row = self._per_row(
                rewards - penalty.sum(1), valid, experience.groups, trajectory, index, engine, metrics, parts
            )
            result = estimators.broadcast_to_decisions(per_row, mask)
        if isinstance(settings, GAEAdvantage | ReturnsAdvantage) and settings.whiten:
            result = estimators.batch_advantages(result, mask, epsilon=settings.epsilon, reduce=engine.sum_over_ranks)
        experience.advantages = estimators.clip_advantages(result, settings.clip)

    def _per_row(
        self,
        rewards: Tensor,
        valid: Tensor,
        groups: Tensor,
        trajectory: Trajectory,
        index: int,
        engine: Engine,
        metrics: Metrics,
        parts: Sequence[RewardPart] | None,
    ) -> Tensor:
        """[B] by the chosen critic-free estimator."""
        settings, reduce = self.settings, engine.sum_over_ranks
        if isinstance(settings, BatchAdvantage):
            scale = settings.scale == "batch_std"
            return estimators.batch_advantages(rewards, valid, epsilon=settings.epsilon, scale=scale, reduce=reduce)
        if isinstance(settings, GroupAdvantage):
            if settings.normalisation == "total":
                parts = [RewardPart(1.0, rewards, valid)]
            if parts is None:
                raise ValueError("advantage.normalisation: per_reward needs the single rewards.")
            result = torch.zeros(rewards.shape)
            for part in parts:
                result += part.weight * self._compared(
                    part.values, part.valid, groups, settings.scale, settings.epsilon, engine, metrics
                )
        elif isinstance(settings, LeaveOneOutAdvantage):
            result, report = estimators.leave_one_out(rewards, valid, groups)
            _log_signal(metrics, report)
        else:
            assert isinstance(settings, RunningPromptAdvantage)
            requests = [trajectory.requests[row] for row in trajectory.roots(index).tolist()]
            prompts = torch.tensor([request.prompt.index for request in requests], dtype=torch.long)
            result, report = self._statistics_of(index).update(rewards, valid, prompts, gather=engine.gather_rows)
            _log_signal(metrics, report)
        if settings.whiten:
            result = estimators.batch_advantages(result, valid, epsilon=_WHITENING_EPSILON, reduce=reduce)
        return result

    def _compared(
        self,
        rewards: Tensor,
        valid: Tensor,
        groups: Tensor,
        scale: estimators.AdvantageScale,
        epsilon: float,
        engine: Engine,
        metrics: Metrics,
    ) -> Tensor:
        """[B] within groups."""
        result, report = estimators.group_advantages(
            rewards, valid, groups, scale=scale, epsilon=epsilon, reduce=engine.sum_over_ranks
        )
        _log_signal(metrics, report)
        return result

    def _statistics_of(self, segment: int) -> estimators.RunningPromptStatistics:
        settings = self.settings
        assert isinstance(settings, RunningPromptAdvantage)
        return self.running_statistics.setdefault(
            segment, estimators.RunningPromptStatistics(settings.buffer_size, settings.min_count, settings.epsilon)
        )

    def state_dict(self) -> dict[str, Any]:
        """The running statistics, by segment."""
        return {str(segment): statistics.state_dict() for segment, statistics in self.running_statistics.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        for segment, statistics in state.items():
            self._statistics_of(int(segment)).load_state_dict(statistics)


def _log_signal(metrics: Metrics, report: estimators.GroupReport) -> None:
    metrics.share("group/without_signal_share", torch.arange(report.groups) < report.without_signal)
