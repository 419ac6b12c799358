"""Reinforcement on the forward process: DiffusionNFT and AWM learn from noised samples, however they were sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, ForwardSegment, Need, Policy, Trajectory
from rewards.combine import RewardResult
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.forward_process_settings import ForwardProcessAlgorithmSettings
from uniml_rl.algorithms.kl import prediction_mse
from uniml_rl.algorithms.matching import MatchingInputs
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch, SegmentExperience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.credit import CreditAssignment
from uniml_rl.objectives.divergence import Divergence, log_probs_under
from uniml_rl.objectives.likelihood import LikelihoodObjective

_NEEDS: frozenset[Need] = frozenset({"prediction", "target", "log_prob"})


class ForwardProcessObjective(LikelihoodObjective):
    """A mean over samples and draws of the loss that the settings choose, plus pulls to the reference and to "old".

    The weight set "old" is made at the stage's start and follows the trained weights after each iteration.
    """

    def __init__(self, settings: ForwardProcessAlgorithmSettings) -> None:
        super().__init__(settings.forward)
        self.settings = settings
        self.credit = CreditAssignment(settings.advantage)
        self.divergence = Divergence(settings.kl) if settings.kl else None
        self.needs_reference = settings.kl is not None
        self.keeps_old_policy = settings.old is not None
        self.rollout_weights = "old" if settings.loss.needs_old_policy else "current"

    def start(self, policy: Policy) -> None:
        super().start(policy)
        if self.keeps_old_policy:
            policy.keep("old")

    def prepare(
        self,
        policy: Policy,
        trajectory: Trajectory,
        result: RewardResult,
        cuts: list[Cut],
        engine: Engine,
        metrics: Metrics,
    ) -> Experience:
        segment = trajectory.segments[0]
        mask, nothing = segment.trained_mask & result.valid.unsqueeze(1), torch.zeros(segment.trained_mask.shape)
        part = SegmentExperience(mask, segment.group, nothing, nothing)
        if self.settings.loss.needs_old_log_prob:
            part.old_log_probs = log_probs_under(policy, "current", trajectory, 0, cuts)
        self.credit.assign(part, trajectory, 0, result.total, result.valid, nothing, engine, metrics)
        return Experience(trajectory, [part])

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        return self.minibatch_of_samples(experience, roots, torch.ones(len(experience.segments[0].mask)), engine)

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        settings, trajectory = self.settings, minibatch.experience.trajectory
        segment, experience = trajectory.segments[0], minibatch.experience.segments[0]
        assert isinstance(segment, ForwardSegment)
        replay = policy.replay(trajectory, cut, _NEEDS)
        prediction = replay.of("prediction")

        def taken(values: Tensor) -> Tensor:
            return cut.take(values).to(prediction.device)

        old_prediction = self._old_prediction(policy, trajectory, cut)
        mask, weights, denominator = taken(experience.mask), taken(minibatch.weights[0]), minibatch.denominators[0]
        terms = settings.loss.terms(
            MatchingInputs(
                prediction,
                replay.of("target"),
                replay.of("log_prob"),
                taken(segment.weights),
                taken(experience.advantages),
                old_prediction,
                taken(experience.old_log_probs) if settings.loss.needs_old_log_prob else None,
            )
        )
        losses = [aggregate(terms.loss, weights, denominator)]
        metrics.sum("loss/policy", losses[0].detach())
        metrics.mean("forward/log_prob", replay.of("log_prob").detach(), mask=mask)
        if settings.loss.needs_old_log_prob:
            metrics.share("policy/clip_share", terms.clipped, mask=mask)
            metrics.mean("policy/ratio_mean", terms.ratio, mask=mask)
            metrics.maximum("policy/ratio_max_deviation", (terms.ratio - 1).abs(), mask=mask)
        if old_prediction is not None and settings.old is not None:
            distance = prediction_mse(prediction, old_prediction)
            metrics.mean("kl/old", distance.detach(), mask=mask)
            if settings.old.pull:
                losses.append(settings.old.pull * aggregate(distance, weights, denominator))
        if self.divergence is not None:
            losses += self.divergence.loss(
                policy, trajectory, experience, cut, replay, mask, weights, denominator, metrics
            )
        total = torch.stack(losses).sum()
        metrics.sum("loss/total", total.detach())
        return total

    def _old_prediction(self, policy: Policy, trajectory: Trajectory, cut: Cut) -> Tensor | None:
        """[b, t, ...] of the weight set "old", where there is one."""
        if self.settings.old is None:
            return None
        with torch.no_grad(), policy.using("old"):
            return policy.replay(trajectory, cut, frozenset({"prediction"})).of("prediction")

    def finish_iteration(
        self, policy: Policy, experience: Experience, iteration: int, engine: Engine, metrics: Metrics
    ) -> None:
        settings = self.settings
        if settings.old is not None:
            decay = settings.old.decay((iteration + 1) * settings.epochs * settings.minibatches)
            policy.average("old", decay)
            metrics.last("policy/old_decay", decay)
        if self.divergence is not None:
            self.divergence.finish_iteration(experience, engine, metrics)
            self.divergence.move_reference(policy, iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"running_statistics": self.credit.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.credit.load_state_dict(state["running_statistics"])
