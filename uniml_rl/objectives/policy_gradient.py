"""The policy-gradient objective: an algorithm's parts put together, from a scored trajectory to a loss."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, Need, Policy, Replay, Trajectory
from modalities.critic import Critic
from modalities.errors import UserError
from modalities.trajectories import select
from rewards.combine import RewardResult, RewardSet
from uniml_rl.algorithms.advantages import groups_with_signal
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.algorithm import sample_limit
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings, replay_tolerance
from uniml_rl.algorithms.surrogate import SurrogateInputs, log_ratio, sequence_log_ratio
from uniml_rl.algorithms.value import clipped_value_loss
from uniml_rl.engines.base import PRECISIONS, Engine
from uniml_rl.experience import (
    Experience,
    Minibatch,
    SegmentExperience,
    leaves,
    put,
    select_results,
    to_segment,
)
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective, minibatch_of_decisions
from uniml_rl.objectives.credit import CreditAssignment, RewardPart
from uniml_rl.objectives.divergence import Divergence, log_probs_under
from uniml_rl.objectives.replay import ExperienceReplay

_log = logging.getLogger(__name__)


class PolicyGradientObjective(Objective):
    """advantage x ratio x surrogate x KL x aggregation, over every segment of a trajectory.

    The loss is the sum over segments; each is normalised by its own denominator, so a segment of few decisions weighs
    as much as one of many.
    """

    def __init__(self, settings: PolicyGradientSettings, critic: Critic | None) -> None:
        self.settings = settings
        self.critic = critic
        self.credit = CreditAssignment(settings.advantage)
        self.divergence = Divergence(settings.kl) if settings.kl else None
        self.needs_reference = settings.kl is not None
        self.keeps_groups = settings.aggregation.mode == "prompt_mean"
        self.resampling_rounds = settings.dynamic_sampling.rounds if settings.dynamic_sampling else 0
        self.pretraining_epochs = settings.value.pretraining_epochs if settings.value else 0
        self.replay = ExperienceReplay(settings.replay.iterations) if settings.replay else None
        self._newest: Experience | None = None

    @classmethod
    def build(cls, settings: Any, critic: Critic | None, rewards: RewardSet | None) -> PolicyGradientObjective:
        return cls(settings, critic)

    # -- once per rollout ------------------------------------------------------------------------------------------

    def useful(self, trajectory: Trajectory, result: RewardResult) -> Tensor:
        """Whether the prompt's samples differ in their reward; what `overlong` takes from it does not count."""
        groups = trajectory.segments[0].group
        groups_of_leaves = groups[trajectory.roots(len(trajectory.segments) - 1)]
        scores = [result.total]
        if self.settings.per_reward:
            scores = [result.raw[name] for name, weight in result.weights.items() if weight]
        known = [groups_with_signal(score, result.valid & score.isfinite(), groups_of_leaves) for score in scores]
        return torch.isin(groups, torch.cat(known))

    def as_trained(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult
    ) -> tuple[Trajectory, RewardResult]:
        if not self.resampling_rounds:
            return trajectory, result
        roots = self.useful(trajectory, result).nonzero().flatten()
        if not len(roots):  # a row that counts for nothing: without any, this rank could not go along with the others
            roots, result = torch.zeros(1, dtype=torch.long), replace(result, valid=torch.zeros_like(result.valid))
        return select(trajectory, roots), select_results(result, leaves(trajectory, roots))

    def check_replay(self, policy: Policy, trajectory: Trajectory, cut: Cut, precision: str) -> None:
        if self.settings.replay_check == "off":
            return
        segment = trajectory.segments[cut.segment]
        with torch.no_grad():
            replayed = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").cpu()
        mask = cut.take(segment.trained_mask)
        if not mask.any():
            return
        found = float((replayed - cut.take(segment.rollout_log_probs)).abs()[mask].mean())
        types = {policy.dtype, PRECISIONS[precision]}
        allowed = max(replay_tolerance(self.settings, dtype, segment.log_prob_unit) for dtype in types)
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
        segments = self._replay_all(policy, trajectory, result, cuts, engine)
        totals = result.total
        if self.settings.overlong is not None:
            last = trajectory.segments[-1]
            lengths = (last.length_mask & ~last.context_mask).sum(1)
            penalties = self.settings.overlong.penalty(lengths, sample_limit(policy.sampling))
            metrics.mean("reward/overlong_penalty", penalties, mask=result.valid)
            totals = totals - penalties
        for index, (segment, experience) in enumerate(zip(trajectory.segments, segments, strict=True)):
            rewards, valid = to_segment(trajectory, totals, result.valid, index)
            mismatch = (experience.old_log_probs - segment.rollout_log_probs).abs()
            metrics.mean("rollout/mismatch", mismatch, mask=experience.mask)
            if self.settings.mismatch is not None:
                correction = self.settings.mismatch.correct(
                    experience.old_log_probs, segment.rollout_log_probs, experience.mask
                )
                experience.mask, experience.correction = correction.kept, correction.weights
            penalty = torch.zeros_like(experience.old_log_probs)
            if self.divergence is not None and self.divergence.from_log_probs:
                experience.reference_log_probs = log_probs_under(policy, "reference", trajectory, index, cuts)
                penalty = self.divergence.reward_penalty(experience)
            parts = self._parts(trajectory, result, index) if self.settings.per_reward else None
            self.credit.assign(experience, trajectory, index, rewards, valid, penalty, engine, metrics, parts)
        self._newest = Experience(trajectory, segments)
        return self.replay.beside(self._newest) if self.replay else self._newest

    @staticmethod
    def _parts(trajectory: Trajectory, result: RewardResult, index: int) -> list[RewardPart]:
        """The single rewards of a segment's rows."""
        parts = []
        for name, weight in result.weights.items():
            if weight:
                values = result.raw[name]
                values, valid = to_segment(trajectory, values, result.valid & values.isfinite(), index)
                parts.append(RewardPart(weight, values, valid))
        return parts

    def _replay_all(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult, cuts: list[Cut], engine: Engine
    ) -> list[SegmentExperience]:
        """Every segment with its old log-probs [B, T], what the surrogate needs of the old policy, the critic's values.

        In float32 the sampler's log-probs are training's own, if `check_replay` guarantees it. In lower precision the
        micro-batch's shape changes the rounding, so they are scored again with the cuts that training uses; and so they
        are where a mismatch is allowed, or corrected.
        """
        exact = engine.precision == "fp32" and policy.dtype == torch.float32
        score_again = not exact or self.settings.replay_check != "error" or self.settings.mismatch is not None
        kept = self.settings.surrogate.needs
        needs: set[Need] = {*kept, *(self.critic.needs() if self.critic else ())}
        needs |= {"log_prob"} if score_again else set()
        segments = []
        for index, segment in enumerate(trajectory.segments):
            valid = to_segment(trajectory, result.total, result.valid, index)[1]
            mask = segment.trained_mask & valid.unsqueeze(1)
            old = segment.rollout_log_probs.clone()
            segments.append(SegmentExperience(mask, segment.group, old, torch.zeros(())))
            segments[-1].values = torch.zeros_like(old) if self.critic else None
        for cut in cuts if needs or self.critic else []:
            replay = policy.replay(trajectory, cut, frozenset(needs)) if needs else Replay()
            experience = segments[cut.segment]
            if score_again:
                put(experience.old_log_probs, cut, replay.of("log_prob"))
            for need in kept:
                part = replay.of(need)
                if need not in experience.old:
                    experience.old[need] = torch.zeros(*experience.mask.shape, *part.shape[2:])
                put(experience.old[need], cut, part)
            if self.critic is not None and experience.values is not None:
                put(experience.values, cut, self.critic.values(trajectory, cut, replay.features))
        return segments

    # -- once per optimizer step -----------------------------------------------------------------------------------

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        return minibatch_of_decisions(experience, roots, self.settings.aggregation, engine)

    # -- once per micro-batch --------------------------------------------------------------------------------------

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        trajectory = minibatch.experience.trajectory
        experience = minibatch.experience.segments[cut.segment]
        replay = policy.replay(trajectory, cut, self._loss_needs(policy))
        device = replay.of("log_prob").device
        mask, weights = (cut.take(x).to(device) for x in (experience.mask, minibatch.weights[cut.segment]))
        denominator = minibatch.denominators[cut.segment]

        losses = []
        critic_only = self._trains_critic_only(iteration)
        if not critic_only:
            terms = self._policy_terms(experience, cut, replay, mask, trajectory, iteration, metrics)
            losses.append(aggregate(terms, weights, denominator))
            metrics.sum("loss/policy", losses[-1].detach())
            if self.divergence is not None:
                losses += self.divergence.loss(
                    policy, trajectory, experience, cut, replay, mask, weights, denominator, metrics
                )
            losses += self._entropy_loss(replay, mask, weights, denominator, metrics)
        features = replay.features
        if critic_only and features is not None:
            features = features.detach()  # of the policy's own trunk
        losses += self._value_loss(trajectory, experience, cut, features, weights, denominator, metrics)
        total = torch.stack(losses).sum()
        metrics.sum("loss/total", total.detach())
        return total

    def _trains_critic_only(self, iteration: int) -> bool:
        """During the warm-up, and in the passes before the first iteration, which count as iteration -1."""
        return self.settings.value is not None and iteration < self.settings.value.warm_up_iterations

    def _loss_needs(self, policy: Policy) -> frozenset[Need]:
        needs: set[Need] = {"log_prob", *self.settings.surrogate.needs}
        if "entropy" in policy.offers:
            needs.add("entropy")
        if self.divergence is not None:
            needs |= self.divergence.needs
        if self.critic is not None:
            needs |= self.critic.needs()
        return frozenset(needs)

    def _policy_terms(
        self,
        experience: SegmentExperience,
        cut: Cut,
        replay: Replay,
        mask: Tensor,
        trajectory: Trajectory,
        iteration: int,
        metrics: Metrics,
    ) -> Tensor:
        """[b, t] surrogate loss per decision."""
        log_probs = replay.of("log_prob")

        def taken(values: Tensor) -> Tensor:
            return cut.take(values).to(log_probs.device)

        old_log_probs = taken(experience.old_log_probs)
        ratios = log_ratio(log_probs, old_log_probs, mask=mask)
        if self.settings.ratio == "sequence":
            ratios = sequence_log_ratio(ratios, mask)
        terms = self.settings.surrogate.terms(
            SurrogateInputs(
                ratios,
                taken(experience.advantages),
                log_probs,
                mask,
                trajectory.segments[cut.segment].log_prob_unit,
                iteration,
                now={need: replay.of(need) for need in self.settings.surrogate.needs},
                old={"log_prob": old_log_probs, **{need: taken(values) for need, values in experience.old.items()}},
            )
        )
        metrics.share("policy/clip_share", terms.clipped, mask=mask)
        metrics.mean("policy/ratio_mean", terms.ratio, mask=mask)
        metrics.maximum("policy/ratio_max_deviation", (terms.ratio - 1).abs(), mask=mask)
        return terms.loss if experience.correction is None else terms.loss * taken(experience.correction)

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

    def finish_iteration(
        self, policy: Policy, experience: Experience, iteration: int, engine: Engine, metrics: Metrics
    ) -> None:
        assert self._newest is not None
        if self.divergence is not None and not self._trains_critic_only(iteration):
            self.divergence.finish_iteration(self._newest, engine, metrics)
        if self.divergence is not None:
            self.divergence.move_reference(policy, iteration)
        if self.replay is not None:
            self.replay.remember(self._newest)
        self._newest = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "kl_controller": self.divergence.state_dict() if self.divergence else {},
            "running_statistics": self.credit.state_dict(),
            "replay": self.replay.state_dict() if self.replay else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.divergence is not None:
            self.divergence.load_state_dict(state["kl_controller"])
        self.credit.load_state_dict(state["running_statistics"])
        if self.replay is not None:
            self.replay.load_state_dict(state["replay"])
