"""The pull back to the reference policy: its log-probs, the KL in the reward or in the loss, its coefficient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, Need, Policy, Replay, Trajectory
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.kl import gaussian_kl, kl_estimate, prediction_mse
from uniml_rl.algorithms.parts import KLSettings
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, SegmentExperience, ancestors, put
from uniml_rl.monitor.metrics import Metrics


@torch.no_grad()
def log_probs_under(policy: Policy, weights: str, trajectory: Trajectory, index: int, cuts: list[Cut]) -> Tensor:
    """[B, T] of one segment under the named weight set; 0 where no cut lies."""
    found = torch.zeros_like(trajectory.segments[index].rollout_log_probs)
    with policy.using(weights):
        for cut in cuts:
            if cut.segment == index:
                put(found, cut, policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob"))
    return found


class Divergence:
    """A KL term with its controller."""

    def __init__(self, settings: KLSettings) -> None:
        self.settings = settings
        self.controller = settings.controller()

    @property
    def needs(self) -> frozenset[Need]:
        """What the loss term reads of a replay besides log-probs."""
        return self.settings.needs

    @property
    def from_log_probs(self) -> bool:
        """Whether the reference's log-probs are all that it needs; they are computed once per rollout."""
        return not self.needs

    def reward_penalty(self, experience: SegmentExperience) -> Tensor:
        """[B, T] coefficient x KL estimate, subtracted from the reward; 0 where the KL is in the loss."""
        if self.settings.placement != "reward" or experience.reference_log_probs is None:
            return torch.zeros_like(experience.old_log_probs)
        estimate = kl_estimate(
            self.settings.estimator,  # type: ignore[arg-type]
            experience.old_log_probs,
            experience.reference_log_probs,
            mask=experience.mask,
        )
        return self.controller.coefficient * estimate

    def loss(
        self,
        policy: Policy,
        trajectory: Trajectory,
        experience: SegmentExperience,
        cut: Cut,
        replay: Replay,
        mask: Tensor,
        weights: Tensor,
        denominator: Tensor,
        metrics: Metrics,
    ) -> list[Tensor]:
        """The term with its coefficient, if it belongs to the loss; logs the distance to the reference."""
        estimator = self.settings.estimator
        if experience.reference_log_probs is not None:
            reference = cut.take(experience.reference_log_probs).to(mask.device)
            log_probs = replay.of("log_prob")
            metrics.mean("kl/reference", kl_estimate("k3", log_probs.detach(), reference, mask=mask), mask=mask)
            if self.settings.placement == "reward":
                return []
            divergence = kl_estimate(estimator, log_probs, reference, mask=mask)  # type: ignore[arg-type]
        else:
            with torch.no_grad(), policy.using("reference"):
                reference_replay = policy.replay(trajectory, cut, self.needs)
            if estimator == "gaussian":
                divergence = gaussian_kl(replay.of("mean"), reference_replay.of("mean"), replay.of("std"))
            else:
                divergence = prediction_mse(replay.of("prediction"), reference_replay.of("prediction"))
            metrics.mean("kl/reference", divergence.detach(), mask=mask)
        term = aggregate(divergence, weights, denominator)
        metrics.sum("loss/kl", term.detach())
        return [self.controller.coefficient * term]

    def finish_iteration(self, experience: Experience, engine: Engine, metrics: Metrics) -> None:
        """Logs the coefficient, and steers it by the KL per sample: the sum over all decisions that made the sample."""
        metrics.last("kl/coefficient", self.controller.coefficient)
        if self.settings.adaptive is None:
            return
        trajectory = experience.trajectory
        per_sample = torch.zeros(trajectory.segments[-1].num_rows, dtype=torch.float64)
        trained = torch.zeros(len(per_sample), dtype=torch.bool)
        for index, segment in enumerate(experience.segments):
            if segment.reference_log_probs is not None:
                rows = ancestors(trajectory, index)
                estimate = kl_estimate("k1", segment.old_log_probs, segment.reference_log_probs, mask=segment.mask)
                per_sample += estimate.double().sum(1)[rows]
                trained |= segment.mask.any(1)[rows]
        count_and_sum = torch.stack([trained.sum().double(), per_sample[trained].sum()])
        samples, total = engine.sum_over_ranks(count_and_sum).tolist()
        if samples:  # else nothing was trained on that could say how far the policy has moved
            self.controller.update(total / samples, int(samples))

    def move_reference(self, policy: Policy, iteration: int) -> None:
        """Lets the reference follow the policy after iteration `iteration` of the stage, as the settings say."""
        self.settings.reference.follow(policy, iteration + 1)

    def state_dict(self) -> dict[str, Any]:
        """The controller's."""
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.controller.load_state_dict(state)
