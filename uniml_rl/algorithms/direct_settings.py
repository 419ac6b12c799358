"""The `algorithm` blocks that learn from whole samples: supervised, from preferences, by a reward's own gradient."""

from __future__ import annotations

from collections.abc import Set
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from modalities.base import LogProbUnit
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.settings import Settings
from uniml_rl.algorithms.algorithm import AlgorithmSettings, LearnsFrom
from uniml_rl.algorithms.parts import AggregationSettings
from uniml_rl.algorithms.preference import logistic_preference_loss


class SupervisedSettings(AlgorithmSettings):
    """Maximum likelihood on given samples: -log-prob of tokens, the denoising loss of latents."""

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"records"})

    objective: Literal["supervised"] = "supervised"
    """How samples become a gradient; it comes with the name."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""
    aggregation: AggregationSettings = AggregationSettings()
    """From decisions to one number."""

    def check_labels(self, labels: Set[float]) -> None:
        if 1.0 not in labels:
            raise UserError("records: no sample has the label 1, and only such are imitated.")


class LogisticLoss(Settings):
    """-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), h the margin of the chosen over the rejected sample."""

    per_decision: ClassVar[bool] = False

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


def _doubts_of_beta(key: str, beta: float, kind: str) -> list[str]:
    """The log-ratio that beta multiplies is a sum of nats on tokens, and a small difference of errors on denoising."""
    if kind == "tokens" and beta > 10:
        return [
            f"{key}: {beta:g} on tokens, whose log-ratios are sums of nats: a pair teaches nothing beyond a margin of "
            f"about 1 / beta = {1 / beta:.1g}, so the policy stays at its reference. 0.1 is usual; thousands are for "
            "denoising models, whose log-ratios are far smaller."
        ]
    if kind == "denoising" and beta < 1:
        return [
            f"{key}: {beta:g} on denoising steps, whose log-ratios are differences of mean squared errors, far below "
            f"1: the reference pulls back only from about 1 / beta = {1 / beta:g} on, so nothing holds the policy. "
            "kto wants about 3 or more, pairs 2500 (diffusion_dpo)."
        ]
    return []


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
    scores_only: bool = False
    """Refuse a policy that is no reward model."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""

    @property
    def compares_groups(self) -> bool:
        return True

    def doubts(self, kind: str) -> list[str]:
        return _doubts_of_beta("loss.beta", self.loss.beta, kind)

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        super().check(group_size, log_prob_unit, kind)
        if self.scores_only and kind not in (None, "scores"):
            raise UserError(
                f"algorithm {self.name!r} trains a reward model, and this policy makes {kind}. Take a policy of type "
                "text_reward_model or image_text_reward_model; or algorithm: dpo, which prefers samples themselves."
            )
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

    def doubts(self, kind: str) -> list[str]:
        return _doubts_of_beta("beta", self.beta, kind)

    def check_labels(self, labels: Set[float]) -> None:
        if self.desirable_above != "group_mean" and not 0 <= self.desirable_above < 1:
            raise UserError(
                f"algorithm.desirable_above: {self.desirable_above:g}: records are labelled 1 and 0, so the number "
                "must be at least 0 and below 1."
            )
        if 0.0 not in labels:
            raise UserError(
                f"records: every sample is desirable, and algorithm {self.name!r} compares such with undesirable ones. "
                "Use records of `type: labelled` or `preferences`, or algorithm: sft."
            )


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

    follows_gradient: ClassVar[bool] = True

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
