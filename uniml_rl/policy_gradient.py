"""The policy-gradient objective: an algorithm's parts put together, from a scored trajectory to a loss."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, LogProbUnit, Need, Policy, Replay, Trajectory
from modalities.critic import Critic
from modalities.errors import UserError
from rewards.combine import RewardResult
from uniml_rl.algorithms import advantages as estimators
from uniml_rl.algorithms.aggregation import aggregate, decision_weights, global_denominator
from uniml_rl.algorithms.kl import gaussian_kl, kl_estimate, prediction_mse
from uniml_rl.algorithms.settings import (
    AlgorithmSettings,
    BatchAdvantage,
    GAEAdvantage,
    GroupAdvantage,
    RunningPromptAdvantage,
    replay_tolerance,
)
from uniml_rl.algorithms.surrogate import log_ratio, sequence_log_ratio
from uniml_rl.algorithms.value import clipped_value_loss
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch, SegmentExperience, put, to_segment
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objective import Objective

_log = logging.getLogger(__name__)
_FROM_LOG_PROBS = ("k1", "k2", "k3")


class PolicyGradientObjective(Objective):
    """advantage x ratio x surrogate x KL x aggregation, over every segment of a trajectory.

    The loss is the sum over segments; each is normalised by its own denominator, so a segment of few decisions weighs
    as much as one of many.
    """

    def __init__(self, settings: AlgorithmSettings, critic: Critic | None) -> None:
        self.settings = settings
        self.critic = critic
        self.kl_controller = settings.kl.controller() if settings.kl else None
        # By segment: the segments of a chain share the reward, which must not be remembered once for each.
        self.running_statistics: dict[int, estimators.RunningPromptStatistics] = {}
        self.needs_reference = settings.kl is not None

    def check_policy(self, policy: Policy) -> None:
        wanted = self._loss_needs(policy) | ({"entropy"} if self.settings.entropy_coefficient else set())
        missing = wanted - policy.offers
        if missing:
            raise UserError(
                f"algorithm {self.settings.name!r} needs {', '.join(sorted(missing))} of every decision, but policy "
                f"{policy.name!r} ({type(policy).__name__}) offers {', '.join(sorted(policy.offers))}. Leave out the "
                "part that needs it: `value` (features), `entropy_coefficient`, `kl.estimator` (mean, std, prediction)."
            )

    # -- once per rollout ------------------------------------------------------------------------------------------

    def check_replay(self, policy: Policy, trajectory: Trajectory, cut: Cut, precision: str) -> None:
        if self.settings.replay_check == "off":
            return
        segment = trajectory.segments[cut.segment]
        with torch.no_grad():
            replayed = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").cpu()
        mask = cut.take(segment.trained_mask)
        found = float((replayed - cut.take(segment.rollout_log_probs)).abs()[mask].mean())
        dtype = torch.bfloat16 if precision == "bf16" else policy.dtype
        allowed = replay_tolerance(self.settings, dtype, segment.log_prob_unit)
        if found <= allowed:
            return
        message = (
            f"policy {segment.agent!r}: replaying the first rollout gives log-probs that differ from the sampler's by "
            f"{found:.3g} on average, more than {allowed:.3g} ({precision}, unit {segment.log_prob_unit}). Training "
            "would optimise the wrong ratio. Causes: a sampling setting that replay does not know, other numerics, "
            "dropout. `algorithm.replay_check: warn` goes on, `algorithm.replay_tolerance` moves the limit."
        )
        if self.settings.replay_check == "error":
            raise UserError(message)
        _log.warning(message)

    @torch.no_grad()
    def prepare(
        self,
        policy: Policy,
        trajectory: Trajectory,
        result: RewardResult,
        cuts: list[Cut],
        engine: Engine,
        metrics: Metrics,
    ) -> Experience:
        segments = []
        replays = self._replay_all(policy, trajectory, cuts, engine)
        for index, segment in enumerate(trajectory.segments):
            rewards, valid = to_segment(trajectory, result.total.detach(), result.valid, index)
            mask = segment.trained_mask & valid.unsqueeze(1)
            old, values = replays[index]
            experience = SegmentExperience(mask, segment.group, segment.rollout_log_probs, old, torch.zeros(()))
            experience.values = values
            if self.settings.mismatch is not None:
                correction = self.settings.mismatch.correct(old, segment.rollout_log_probs, mask)
                experience.mask, experience.correction = correction.kept, correction.weights
            if self.settings.kl is not None and self.settings.kl.estimator in _FROM_LOG_PROBS:
                experience.reference_log_probs = self._reference_log_probs(policy, trajectory, index, cuts)
            self._set_advantages(experience, trajectory, index, rewards, valid, engine, metrics)
            metrics.mean("rollout/mismatch", (old - segment.rollout_log_probs).abs(), mask=mask)
            segments.append(experience)
        return Experience(trajectory, segments)

    def _replay_all(
        self, policy: Policy, trajectory: Trajectory, cuts: list[Cut], engine: Engine
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Per segment the old log-probs [B, T] and the critic's values, or None without a critic.

        In float32 the sampler's log-probs are training's own, if `check_replay` guarantees it. In lower precision the
        micro-batch's shape changes the rounding, so they are scored again with the cuts that training uses; and so they
        are where a mismatch is allowed, or corrected.
        """
        exact = engine.precision == "fp32" and policy.dtype == torch.float32
        score_again = not exact or self.settings.replay_check != "error" or self.settings.mismatch is not None
        needs: set[Need] = set(self.critic.needs()) if self.critic else set()
        needs |= {"log_prob"} if score_again else set()
        old = [segment.rollout_log_probs.clone() for segment in trajectory.segments]
        values = [torch.zeros_like(log_probs) for log_probs in old]
        for cut in cuts if needs or self.critic else []:
            replay = policy.replay(trajectory, cut, frozenset(needs)) if needs else Replay()
            if score_again:
                put(old[cut.segment], cut, replay.of("log_prob"))
            if self.critic is not None:
                put(values[cut.segment], cut, self.critic.values(trajectory, cut, replay.features))
        return [(o, v if self.critic else None) for o, v in zip(old, values, strict=True)]

    def _reference_log_probs(self, policy: Policy, trajectory: Trajectory, index: int, cuts: list[Cut]) -> Tensor:
        reference = torch.zeros_like(trajectory.segments[index].rollout_log_probs)
        with policy.using("reference"):
            for cut in cuts:
                if cut.segment == index:
                    put(reference, cut, policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob"))
        return reference

    def _set_advantages(
        self,
        experience: SegmentExperience,
        trajectory: Trajectory,
        index: int,
        rewards: Tensor,
        valid: Tensor,
        engine: Engine,
        metrics: Metrics,
    ) -> None:
        """Fills in advantages, and returns if there is a critic."""
        settings, mask = self.settings.advantage, experience.mask
        penalty = self._reward_penalty(experience)
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
            per_row = self._row_advantages(
                rewards - penalty.sum(1), valid, experience, trajectory, index, engine, metrics
            )
            result = estimators.broadcast_to_decisions(per_row, mask)
        experience.advantages = estimators.clip_advantages(result, settings.clip)

    def _reward_penalty(self, experience: SegmentExperience) -> Tensor:
        """[B, T] coefficient x KL estimate, subtracted from the reward; 0 where the KL is in the loss."""
        kl = self.settings.kl
        if kl is None or kl.placement != "reward" or experience.reference_log_probs is None:
            return torch.zeros_like(experience.old_log_probs)
        assert self.kl_controller is not None and kl.estimator in _FROM_LOG_PROBS
        estimate = kl_estimate(
            kl.estimator,  # type: ignore[arg-type]
            experience.old_log_probs,
            experience.reference_log_probs,
            mask=experience.mask,
        )
        return self.kl_controller.coefficient * estimate

    def _row_advantages(
        self,
        rewards: Tensor,
        valid: Tensor,
        experience: SegmentExperience,
        trajectory: Trajectory,
        index: int,
        engine: Engine,
        metrics: Metrics,
    ) -> Tensor:
        """[B] by the chosen critic-free estimator."""
        settings, groups, reduce = self.settings.advantage, experience.groups, engine.sum_over_ranks
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
        settings = self.settings.advantage
        assert isinstance(settings, RunningPromptAdvantage)
        return self.running_statistics.setdefault(
            segment, estimators.RunningPromptStatistics(settings.buffer_size, settings.min_count, settings.epsilon)
        )

    # -- once per optimizer step -----------------------------------------------------------------------------------

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        mode, constant = self.settings.aggregation.mode, self.settings.aggregation.constant
        weights, denominators, decisions = [], [], torch.zeros((), dtype=torch.long)
        for index, segment in enumerate(experience.segments):
            chosen = torch.isin(experience.trajectory.roots(index), roots)
            mask = segment.mask & chosen.unsqueeze(1)
            decisions += mask.sum()
            weights.append(decision_weights(mask, mode, groups=segment.groups))
            denominators.append(
                global_denominator(mask, mode, groups=segment.groups, constant=constant, reduce=engine.sum_over_ranks)
            )
        return Minibatch(experience, roots, weights, denominators, int(engine.sum_over_ranks(decisions)))

    # -- once per micro-batch --------------------------------------------------------------------------------------

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        trajectory = minibatch.experience.trajectory
        experience = minibatch.experience.segments[cut.segment]
        unit = trajectory.segments[cut.segment].log_prob_unit
        replay = policy.replay(trajectory, cut, self._loss_needs(policy))
        log_probs = replay.of("log_prob")
        device = log_probs.device
        mask, weights = (cut.take(x).to(device) for x in (experience.mask, minibatch.weights[cut.segment]))
        denominator = minibatch.denominators[cut.segment]

        losses = []
        critic_only = self.settings.value is not None and iteration < self.settings.value.warm_up_iterations
        if not critic_only:
            losses.append(
                aggregate(self._policy_terms(experience, cut, replay, mask, unit, metrics), weights, denominator)
            )
            metrics.sum("loss/policy", losses[-1].detach())
            losses += self._kl_loss(policy, trajectory, experience, cut, replay, mask, weights, denominator, metrics)
            losses += self._entropy_loss(replay, mask, weights, denominator, metrics)
        features = replay.features
        if critic_only and features is not None:
            features = features.detach()  # of the policy's own trunk
        losses += self._value_loss(trajectory, experience, cut, features, weights, denominator, metrics)
        total = torch.stack(losses).sum()
        metrics.sum("loss/total", total.detach())
        return total

    def _loss_needs(self, policy: Policy) -> frozenset[Need]:
        needs: set[Need] = {"log_prob"}
        if "entropy" in policy.offers:
            needs.add("entropy")
        if self.settings.kl is not None and self.settings.kl.placement == "loss":
            needs |= _KL_NEEDS.get(self.settings.kl.estimator, frozenset())
        if self.critic is not None:
            needs |= self.critic.needs()
        return frozenset(needs)

    def _policy_terms(
        self, experience: SegmentExperience, cut: Cut, replay: Replay, mask: Tensor, unit: LogProbUnit, metrics: Metrics
    ) -> Tensor:
        """[b, t] surrogate loss per decision."""
        log_probs = replay.of("log_prob")
        old, advantages = (cut.take(x).to(log_probs.device) for x in (experience.old_log_probs, experience.advantages))
        ratios = log_ratio(log_probs, old, mask=mask)
        if self.settings.ratio == "sequence":
            ratios = sequence_log_ratio(ratios, mask)
        terms = self.settings.surrogate_terms(ratios, advantages, unit)
        metrics.share("policy/clip_share", terms.clipped, mask=mask)
        metrics.mean("policy/ratio_mean", terms.ratio, mask=mask)
        metrics.maximum("policy/ratio_max_deviation", (terms.ratio - 1).abs(), mask=mask)
        if experience.correction is None:
            return terms.loss
        return terms.loss * cut.take(experience.correction).to(log_probs.device)

    def _kl_loss(
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
        """The KL term with its coefficient, if there is one in the loss; logs the distance to the reference."""
        kl = self.settings.kl
        if kl is None:
            return []
        assert self.kl_controller is not None
        if experience.reference_log_probs is not None:
            reference = cut.take(experience.reference_log_probs).to(mask.device)
            log_probs = replay.of("log_prob")
            metrics.mean("kl/reference", kl_estimate("k3", log_probs.detach(), reference, mask=mask), mask=mask)
            if kl.placement == "reward":
                return []
            divergence = kl_estimate(kl.estimator, log_probs, reference, mask=mask)  # type: ignore[arg-type]
        else:
            needs = _KL_NEEDS[kl.estimator]
            with torch.no_grad(), policy.using("reference"):
                reference_replay = policy.replay(trajectory, cut, needs)
            if kl.estimator == "gaussian":
                divergence = gaussian_kl(replay.of("mean"), reference_replay.of("mean"), replay.of("std"))
            else:
                divergence = prediction_mse(replay.of("prediction"), reference_replay.of("prediction"))
            metrics.mean("kl/reference", divergence.detach(), mask=mask)
        term = aggregate(divergence, weights, denominator)
        metrics.sum("loss/kl", term.detach())
        return [self.kl_controller.coefficient * term]

    def _entropy_loss(
        self, replay: Replay, mask: Tensor, weights: Tensor, denominator: Tensor, metrics: Metrics
    ) -> list[Tensor]:
        if replay.entropy is None:
            return []
        metrics.mean("policy/entropy", replay.entropy.detach(), mask=mask)
        if not self.settings.entropy_coefficient:
            return []
        term = -aggregate(replay.entropy, weights, denominator)
        metrics.sum("loss/entropy", term.detach())
        return [self.settings.entropy_coefficient * term]

    def _value_loss(
        self,
        trajectory: Trajectory,
        experience: SegmentExperience,
        cut: Cut,
        features: Tensor | None,
        weights: Tensor,
        denominator: Tensor,
        metrics: Metrics,
    ) -> list[Tensor]:
        if self.critic is None:
            return []
        assert experience.values is not None and experience.returns is not None and self.settings.value is not None
        values = self.critic.values(trajectory, cut, features)
        old, returns = (cut.take(x).to(values.device) for x in (experience.values, experience.returns))
        term = aggregate(clipped_value_loss(values, old, returns, self.settings.value.clip).loss, weights, denominator)
        metrics.sum("loss/value", term.detach())
        return [self.settings.value.coefficient * term]

    # -- from iteration to iteration -------------------------------------------------------------------------------

    def finish_iteration(self, experience: Experience, engine: Engine, metrics: Metrics) -> None:
        kl = self.settings.kl
        if kl is None or self.kl_controller is None:
            return
        metrics.last("kl/coefficient", self.kl_controller.coefficient)
        if kl.adaptive is None:
            return
        count_and_sum = torch.zeros(2, dtype=torch.float64)
        for segment in experience.segments:
            if segment.reference_log_probs is not None:
                estimate = kl_estimate("k1", segment.old_log_probs, segment.reference_log_probs, mask=segment.mask)
                count_and_sum += torch.stack([segment.mask.any(1).sum(), estimate.double().sum()])
        samples, total = engine.sum_over_ranks(count_and_sum).tolist()
        if samples:  # else nothing was trained on that could say how far the policy has moved
            self.kl_controller.update(total / samples, int(samples))

    def state_dict(self) -> dict[str, Any]:
        return {
            "kl_controller": self.kl_controller.state_dict() if self.kl_controller else {},
            "running_statistics": {
                str(segment): statistics.state_dict() for segment, statistics in self.running_statistics.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.kl_controller:
            self.kl_controller.load_state_dict(state["kl_controller"])
        for segment, statistics in state["running_statistics"].items():
            self._statistics_of(int(segment)).load_state_dict(statistics)


_KL_NEEDS: dict[str, frozenset[Need]] = {
    "gaussian": frozenset({"mean", "std"}),
    "prediction_mse": frozenset({"prediction"}),
}
