"""The `algorithm` block of a policy gradient: one choice per part, and what does not go together."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from modalities.base import LogProbUnit, Need, PolicySummary
from modalities.errors import UserError
from uniml_rl.algorithms.advantage_settings import AdvantageSettings, GroupAdvantage
from uniml_rl.algorithms.algorithm import AlgorithmSettings, sample_limit
from uniml_rl.algorithms.parts import (
    AggregationSettings,
    DynamicSampling,
    FixedReference,
    KLSettings,
    MismatchSettings,
    OverlongSettings,
    ReplaySettings,
    SurrogateSettings,
    ValueSettings,
)
from uniml_rl.algorithms.token_surrogates import DRPO, PPOClip


class PolicyGradientSettings(AlgorithmSettings):
    """A row of parts: advantage x ratio x surrogate x KL x aggregation."""

    learns_from_whole_samples: ClassVar[bool] = False

    objective: Literal["policy_gradient"] = "policy_gradient"
    """How rewards become a gradient; it comes with the name."""
    advantage: AdvantageSettings
    """How good each decision was."""
    ratio: Literal["decision", "sequence"] = "decision"
    """The probability ratio of each decision, or the geometric mean over its sequence (GSPO)."""
    surrogate: SurrogateSettings = PPOClip()
    """The loss made of ratio and advantage."""
    kl: KLSettings | None = None
    """Divergence from the reference policy; null: none, and no reference is loaded."""
    aggregation: AggregationSettings = AggregationSettings()
    """From decisions to one number."""
    value: ValueSettings | None = None
    """The critic; given exactly when the advantage is gae."""
    mismatch: MismatchSettings | None = None
    """Correction for a sampler whose numerics differ from the trainer's; null: none."""
    dynamic_sampling: DynamicSampling | None = None
    """Other prompts in place of those that teach nothing; null: none."""
    overlong: OverlongSettings | None = None
    """Punishment of long samples; null: none."""
    replay: ReplaySettings | None = None
    """Recent rollouts beside the new one; null: none."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    needs_window: bool = False
    """Refuse a policy whose `sampling` has no window of trained transitions. It is what defines mix_grpo and
    flow_grpo_fast; without one they are flow_grpo with other numbers."""
    replay_check: Literal["error", "warn", "off"] = "error"
    """What happens if replay and rollout disagree before the first update."""
    replay_tolerance: float | None = Field(default=None, gt=0)
    """Largest mean |replayed - rollout log-prob| that passes; null: chosen by dtype and unit."""

    @model_validator(mode="after")
    def _ratio_fits(self) -> PolicyGradientSettings:
        if self.ratio == "sequence":
            if not self.surrogate.corrects_off_policy:
                raise UserError(f"ratio: sequence with surrogate {self.surrogate.type!r}, which reads no ratio.")
            if self.aggregation.mode != "sequence_mean_token_mean":
                raise UserError(
                    f"ratio: sequence with aggregation.mode: {self.aggregation.mode}: a ratio shared by a whole "
                    "sequence would be counted once per decision, so long samples would dominate. Use "
                    "sequence_mean_token_mean."
                )
            if isinstance(self.surrogate, DRPO) and self.surrogate.weight == "old_probability":
                raise UserError("ratio: sequence with surrogate.weight: old_probability, that of one token. Use one.")
        return self

    @model_validator(mode="after")
    def _critic_fits(self) -> PolicyGradientSettings:
        if self.advantage.type == "gae" and self.value is None:
            raise UserError("advantage.type: gae needs a critic: add a `value` block, or choose a critic-free type.")
        if self.advantage.type != "gae" and self.value is not None:
            raise UserError(
                f"the `value` block: advantage.type {self.advantage.type!r} has no use for a critic. Remove the block "
                "(value: null), or take advantage.type: gae."
            )
        return self

    @model_validator(mode="after")
    def _trains_what_it_can_correct(self) -> PolicyGradientSettings:
        updates = self.epochs * self.minibatches
        if not self.surrogate.corrects_off_policy and (updates > 1 or self.replay is not None):
            cause = "replay" if self.replay is not None else f"epochs x minibatches = {updates}"
            raise UserError(
                f"surrogate {self.surrogate.type!r} with {cause}: it takes every sample for one of the current policy, "
                "and after the first update they are not. Use one update per rollout, or a surrogate with a "
                "probability ratio: cispo is this one with a bounded importance weight."
            )
        if self.replay is None:
            return self
        if self.value is not None:
            raise UserError("replay with a critic: the kept advantages rest on values that it no longer has.")
        if self.kl is not None and self.kl.reference != FixedReference():
            raise UserError("replay with a reference that moves: the kept samples were compared with an earlier one.")
        return self

    @model_validator(mode="after")
    def _rewards_fit(self) -> PolicyGradientSettings:
        if self.dynamic_sampling is not None and not self.compares_groups:
            raise UserError(
                f"dynamic_sampling with advantage.type {self.advantage.type!r}: it replaces prompts whose samples got "
                "equal rewards, and only where these are compared with each other do they teach nothing. Take "
                "advantage.type: group or leave_one_out, or remove the block."
            )
        if self.per_reward:
            charged = self.kl is not None and self.kl.placement == "reward"
            if charged or self.overlong is not None:
                raise UserError(
                    "advantage.normalisation: per_reward compares each reward by itself, so there is no total that "
                    f"{'the KL' if charged else 'overlong'} could be subtracted from. "
                    + ("Use kl.placement: loss." if charged else "Use a reward of the stage for lengths.")
                )
        return self

    @property
    def per_reward(self) -> bool:
        return isinstance(self.advantage, GroupAdvantage) and self.advantage.normalisation == "per_reward"

    @property
    def needs_critic(self) -> bool:
        return self.value is not None

    @property
    def policy_waits(self) -> int:
        return 0 if self.value is None else self.value.warm_up_iterations

    @property
    def compares_groups(self) -> bool:
        return self.advantage.compares_groups

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        super().check(group_size, log_prob_unit, kind)
        self._check_sampler(log_prob_unit)
        self.surrogate.check(log_prob_unit, kind)
        if kind == "denoising":
            if self.ratio == "sequence":
                raise UserError("algorithm.ratio: sequence is for tokens; denoising steps are scored one at a time.")
            if self.overlong is not None:
                raise UserError(
                    "algorithm.overlong: every sample has as many denoising steps as the sampler takes, so there is "
                    "no length to punish. Remove the block (overlong: null)."
                )
            if self.entropy_coefficient:
                raise UserError(
                    "algorithm.entropy_coefficient: the entropy of a denoising step depends on its noise schedule "
                    "alone, not on the weights, so a bonus has no gradient. Set it to 0."
                )
        elif kind is not None and self.kl is not None and self.kl.estimator in ("gaussian", "prediction_mse"):
            raise UserError(
                f"algorithm.kl.estimator {self.kl.estimator!r} compares denoising steps; a segment of {kind} has "
                "none. Use k1, k2 or k3."
            )

    def check_policy(self, policy: PolicySummary, group_size: int | None = None) -> None:
        super().check_policy(policy, group_size)
        parts: dict[str, frozenset[Need]] = {
            f"surrogate.type: {self.surrogate.type}": self.surrogate.needs,
            f"kl.estimator: {self.kl and self.kl.estimator}": self.kl.needs if self.kl else frozenset(),
            "entropy_coefficient": frozenset({"entropy"} if self.entropy_coefficient else ()),
            "value, the critic": frozenset({"features"} if self.needs_critic else ()),
        }
        for part, needs in parts.items():
            if missing := needs - policy.offers:
                raise UserError(
                    f"algorithm.{part}: reads {', '.join(sorted(missing))} of every decision, and this policy "
                    f"({policy.model}) gives only {', '.join(sorted(policy.offers))}. Leave this part out."
                )
        if self.needs_window and "denoising" not in dict(policy.decisions):
            raise UserError(
                f"algorithm {self.name!r} trains a window of denoising transitions, and this policy ({policy.model}) "
                "has none: take algorithm: grpo."
            )
        if self.needs_window and not policy.windowed:
            raise UserError(
                f"algorithm {self.name!r} trains a window of the transitions, and the policy's sampling.window is not "
                "set: every transition would be trained. Give it in the policy's block, such as `window: {moving: "
                "{size: 4}}` or `window: {steps: [0, 1]}`; or take algorithm: flow_grpo, or needs_window: false."
            )
        if self.overlong is not None:
            self.overlong.check(sample_limit(policy.sampling))

    def _check_sampler(self, unit: LogProbUnit | None) -> None:
        """Raises UserError if the sampler's log-probs do not exist, or are not what the KL is made of."""
        if unit == "none":
            raise UserError(
                f"algorithm {self.name!r} trains the sampler's decisions, and sampling.sampler draws no noise, so that "
                "nothing is decided. Take a stochastic sampler (evaluation may have its own), or an algorithm that "
                "learns from whole samples: diffusion_nft, awm."
            )
        if unit in ("error_mean", "error_sum") and self.kl is not None and self.kl.estimator != "prediction_mse":
            raise UserError(
                f"algorithm.kl.estimator {self.kl.estimator!r} is in nats, and the unnormalised log-probs of "
                "sampling.sampler are not: they lack the factor 1 / (2 s^2), which differs from step to step, so their "
                "balance would too. Use sampling.sampler.log_prob: gaussian, or estimator: prediction_mse."
            )


_REPLAY_TOLERANCES: dict[LogProbUnit, dict[torch.dtype, float]] = {
    "token": {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1},
    "element_mean": {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3},
    "element_sum": {torch.float32: 1e-2, torch.float16: 1.0, torch.bfloat16: 5.0},
    "error_mean": {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3},
    "error_sum": {torch.float32: 1e-2, torch.float16: 1.0, torch.bfloat16: 5.0},
}


def replay_tolerance(settings: PolicyGradientSettings, dtype: torch.dtype, unit: LogProbUnit) -> float:
    """Largest mean |replayed - rollout log-prob| that passes the replay check, for a policy computing in `dtype`.

    The defaults lie a few times above what rounding alone does, and below what a lost temperature, guidance scale or
    position does.
    """
    return settings.replay_tolerance or _REPLAY_TOLERANCES[unit][dtype]
