"""From the rewards of samples to the advantage of each decision, by the estimator that the settings choose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modalities.base import Trajectory
from uniml_rl.algorithms import advantages as estimators
from uniml_rl.algorithms.parts import (
    AdvantageSettings,
    BatchAdvantage,
    GAEAdvantage,
    GroupAdvantage,
    RunningPromptAdvantage,
)
from uniml_rl.engines.base import Engine
from uniml_rl.experience import SegmentExperience
from uniml_rl.monitor.metrics import Metrics


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
    ) -> None:
        """Fills in the segment's advantages [B, T], and its returns if there is a critic.

        `rewards` and `valid` are [B]; `penalty` [B, T] is what each decision is charged with.
        """
        settings, mask = self.settings, experience.mask
        if isinstance(settings, GAEAdvantage):
            assert experience.values is not None
            per_decision = estimators.place_terminal_reward(rewards, mask) - penalty
            result, experience.returns = estimators.gae(
                per_decision, experience.values, mask, settings.gamma, settings.lambda_
            )
            metrics.explained_variance("value/explained_variance", experience.values, experience.returns, mask=mask)
            if settings.whiten:
                result = estimators.batch_advantages(
                    result, mask, epsilon=settings.epsilon, reduce=engine.sum_over_ranks
                )
        else:
            per_row = self._per_row(
                rewards - penalty.sum(1), valid, experience.groups, trajectory, index, engine, metrics
            )
            result = estimators.broadcast_to_decisions(per_row, mask)
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
    ) -> Tensor:
        """[B] by the chosen critic-free estimator."""
        settings, reduce = self.settings, engine.sum_over_ranks
        if isinstance(settings, BatchAdvantage):
            scale = settings.scale == "batch_std"
            return estimators.batch_advantages(rewards, valid, epsilon=settings.epsilon, scale=scale, reduce=reduce)
        if isinstance(settings, GroupAdvantage):
            result, report = estimators.group_advantages(
                rewards, valid, groups, scale=settings.scale, epsilon=settings.epsilon, reduce=reduce
            )
        elif settings.type == "leave_one_out":
            result, report = estimators.leave_one_out(rewards, valid, groups)
        else:
            prompts = torch.tensor([trajectory.requests[row].prompt.index for row in trajectory.roots(index).tolist()])
            result, report = self._statistics_of(index).update(rewards, valid, prompts, gather=engine.gather_rows)
        metrics.share("group/without_signal_share", torch.arange(report.groups) < report.without_signal)
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
