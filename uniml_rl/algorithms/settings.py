"""The `algorithm` block, resolved: what every algorithm says of itself, and the settings of each kind of objective."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from modalities.base import LogProbUnit
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.settings import Settings
from uniml_rl.algorithms.advantage_settings import AdvantageSettings, GAEAdvantage, GroupAdvantage, ReturnsAdvantage
from uniml_rl.algorithms.matching import MatchingLoss, OldPolicySettings
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
from uniml_rl.algorithms.preference import logistic_preference_loss
from uniml_rl.algorithms.token_surrogates import DRPO, PPOClip

LearnsFrom = Literal["rollouts", "records"]


class AlgorithmSettings(Settings):
    """What every algorithm has. `name` picks a row of the table in `presets.py`; every other key replaces a part of
    it."""

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"rollouts"})
    """Its own rollouts, given records, or either."""

    kinds: ClassVar[frozenset[str]] = frozenset({"tokens", "denoising"})
    """Decisions that it can train."""

    name: str
    """The preset."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""

    @property
    def needs_critic(self) -> bool:
        """Whether the stage must give a `critic` block."""
        return False

    @property
    def compares_groups(self) -> bool:
        """Whether a prompt's samples are compared with each other, so that one alone teaches nothing."""
        return False

    @property
    def per_reward(self) -> bool:
        """Whether each of the stage's rewards is compared by itself, and not their sum."""
        return False

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        """Raises UserError where the algorithm does not fit the group size (or a record's number of samples) or, where
        they are known, a segment's unit of log-probs and its kind ("tokens", "denoising")."""
        if kind is not None and kind not in self.kinds:
            raise UserError(
                f"algorithm {self.name!r} trains {' or '.join(sorted(self.kinds))}, but this policy makes {kind}. "
                + ("A reward model learns by algorithm: reward_model." if kind == "scores" else "Choose another one.")
            )
        if self.compares_groups and group_size is not None and group_size < 2:
            raise UserError(
                f"algorithm {self.name!r} compares the samples of a prompt with each other, but the group size is "
                f"{group_size}: nothing could be learned. Use at least 2"
                + (", or advantage.type: batch or running_prompt." if hasattr(self, "advantage") else ".")
            )


class PolicyGradientSettings(AlgorithmSettings):
    """A row of parts: advantage x ratio x surrogate x KL x aggregation."""

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


class SupervisedSettings(AlgorithmSettings):
    """Maximum likelihood on given samples: -log-prob of tokens, the denoising loss of latents."""

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"records"})

    objective: Literal["supervised"] = "supervised"
    """How samples become a gradient; it comes with the name."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""
    aggregation: AggregationSettings = AggregationSettings()
    """From decisions to one number."""


class LogisticLoss(Settings):
    """-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h the margin of the chosen over the rejected sample."""

    type: Literal["logistic"] = "logistic"
    """DPO; without a reference, the Bradley-Terry loss of a reward model."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """s, the share of labels that are taken to be wrong."""

    def terms(self, margin: Tensor) -> Tensor:
        """The loss of each pair."""
        return logistic_preference_loss(margin, self.beta, self.label_smoothing)


class SquareLoss(Settings):
    """(h - 1 / (2 beta))^2, h the margin of the chosen over the rejected sample."""

    type: Literal["square"] = "square"
    """IPO."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference; tau in the paper."""
    per_decision: bool = False
    """Divide each sample's log-ratio by its number of decisions first."""

    def terms(self, margin: Tensor) -> Tensor:
        """The loss of each pair."""
        return (margin - 1 / (2 * self.beta)).square()


PreferenceLoss = Annotated[LogisticLoss | SquareLoss, Field(discriminator="type")]


class PreferenceSettings(AlgorithmSettings):
    """Learns from pairs: given ones, or the best and the worst of the policy's own samples of a prompt."""

    kinds: ClassVar[frozenset[str]] = frozenset({"tokens", "denoising", "scores"})

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"rollouts", "records"})

    objective: Literal["preference"] = "preference"
    """How pairs become a gradient; it comes with the name."""
    loss: PreferenceLoss
    """The loss of a pair."""
    reference_free: bool = False
    """Compare the log-probs (a reward model's scores) themselves, without those of a reference."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""

    @property
    def compares_groups(self) -> bool:
        return True

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        super().check(group_size, log_prob_unit, kind)
        if kind == "scores" and not self.reference_free:
            raise UserError(
                f"algorithm {self.name!r} pulls to a reference, and the scores of a reward model have none. Use "
                "algorithm: reward_model, or reference_free: true."
            )


class KTOSettings(AlgorithmSettings):
    """Learns from single samples that are desirable or not."""

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"rollouts", "records"})

    objective: Literal["kto"] = "kto"
    """How samples become a gradient; it comes with the name."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the pull to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of desirable samples, lambda_D."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of the others, lambda_U."""
    desirable_above: float | Literal["group_mean"] = 0.5
    """A sample is desirable if its label or reward is above this number, or above the mean of its prompt's samples."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""

    @property
    def compares_groups(self) -> bool:
        return self.desirable_above == "group_mean"


class LastSteps(Settings):
    """DRaFT-K: the gradient runs through the last K denoising steps."""

    early_clean: ClassVar[bool] = False
    type: Literal["last_steps"] = "last_steps"
    """A fixed number of steps."""
    count: int = Field(default=1, ge=1)
    """K; the number of sampling steps or more is the whole trajectory (DRaFT)."""

    def draw(self, steps: int, generator: torch.Generator) -> int:
        """How many of the last of `steps` steps keep the gradient."""
        return min(self.count, steps)


class RandomLastSteps(Settings):
    """AlignProp: as many of the last steps as are drawn, uniformly from 1 to all, for each iteration."""

    early_clean: ClassVar[bool] = False
    type: Literal["random_last_steps"] = "random_last_steps"
    """A random number of steps."""

    def draw(self, steps: int, generator: torch.Generator) -> int:
        """How many of the last of `steps` steps keep the gradient."""
        return int(torch.randint(1, steps + 1, (), generator=generator))


class EarlyClean(Settings):
    """ReFL: sampling stops at a random step, and the clean latent that this step predicts is rewarded."""

    early_clean: ClassVar[bool] = True
    type: Literal["early_clean"] = "early_clean"
    """One step, away from the end."""
    first: float = Field(default=0.75, ge=0, lt=1)
    """The step is drawn, uniformly and for each iteration, from those behind this share of the schedule."""

    def draw(self, steps: int, generator: torch.Generator) -> int:
        """How many steps before the end of `steps` it lies."""
        return int(torch.randint(1, steps - int(self.first * steps) + 1, (), generator=generator))


class RewardGradientSettings(AlgorithmSettings):
    """Raises a differentiable reward by its own gradient, through the decoder and the last denoising steps."""

    objective: Literal["reward_gradient"] = "reward_gradient"
    """How rewards become a gradient; it comes with the name."""
    gradient: Annotated[LastSteps | RandomLastSteps | EarlyClean, Field(discriminator="type")]
    """Which steps the gradient runs through."""

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        super().check(group_size, log_prob_unit, kind)
        if kind not in (None, "denoising"):
            raise UserError(
                f"algorithm {self.name!r} sends the reward's gradient into the sample, and {kind} have none: they are "
                "drawn from discrete choices. Use it with a denoising policy, or grpo, ppo ... here."
            )


class ForwardProcessAlgorithmSettings(AlgorithmSettings):
    """Reinforcement on noised samples, whatever sampler they come from; see `matching`."""

    objective: Literal["forward_process"] = "forward_process"
    """How rewards become a gradient; it comes with the name."""
    loss: MatchingLoss
    """What an advantage does to the denoising loss."""
    advantage: AdvantageSettings
    """How good each sample was; every estimator but gae."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """At which times of the forward process samples are trained."""
    old: OldPolicySettings | None = None
    """The policy that follows the trained one; needed by nft, a second reference for awm."""
    kl: KLSettings | None = None
    """Divergence from the reference policy, prediction_mse in the loss; null: none, and no reference is loaded."""

    @model_validator(mode="after")
    def _parts_fit(self) -> ForwardProcessAlgorithmSettings:
        if isinstance(self.advantage, GAEAdvantage | ReturnsAdvantage):
            raise UserError(
                f"advantage.type: {self.advantage.type} assigns credit to decisions, and here a whole sample is "
                "learned from. Take another."
            )
        if isinstance(self.advantage, GroupAdvantage) and self.advantage.normalisation == "per_reward":
            raise UserError("advantage.normalisation: per_reward is for policy gradients. Use total.")
        if self.kl is not None and self.kl.estimator != "prediction_mse":
            raise UserError(
                f"kl.estimator {self.kl.estimator!r} compares the sampler's decisions, and this algorithm trains none "
                "of them. Use prediction_mse, the mean squared difference of the predictions."
            )
        if self.loss.needs_old_policy and self.old is None:
            raise UserError(f"loss.type {self.loss.type!r} compares with the old policy: add an `old` block.")
        if self.old is not None and not (self.loss.needs_old_policy or self.old.pull):
            raise UserError(
                f"the `old` block: loss.type {self.loss.type!r} has no use for an old policy but to be pulled to it. "
                "Give old.pull, or remove the block (old: null)."
            )
        return self

    @property
    def compares_groups(self) -> bool:
        return self.advantage.compares_groups

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        super().check(group_size, log_prob_unit, kind)
        if kind not in (None, "denoising"):
            raise UserError(
                f"algorithm {self.name!r} trains a denoising model on noised samples, and {kind} are not denoised. Use "
                "it with an image or video policy, or grpo, ppo ... here."
            )


AnyAlgorithm = Annotated[
    PolicyGradientSettings
    | SupervisedSettings
    | PreferenceSettings
    | KTOSettings
    | RewardGradientSettings
    | ForwardProcessAlgorithmSettings,
    Field(discriminator="objective"),
]
