"""Surrogate losses for any decision with a log-prob: the blocks that `algorithm.surrogate` may hold."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from modalities.base import LogProbUnit, Need
from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.algorithms.surrogate import (
    SurrogateInputs,
    SurrogateTerms,
    capped_weight_surrogate,
    clipped_surrogate,
    penalised_surrogate,
    score_function_surrogate,
)

CLIP_RANGES: dict[LogProbUnit, float] = {"token": 0.2, "element_mean": 1e-4, "error_mean": 1e-5}
"""The usual clip range of each unit of a log-prob. Sums over elements have none: they grow with the latent's size."""


class RangeSchedule(Settings):
    """Moves a range linearly from its full width to a share of it, and leaves it there."""

    final_share: float = Field(gt=0)
    """Share of the width at the end."""
    iterations: int = Field(ge=1)
    """Iterations of the stage until then."""

    def share(self, iteration: int) -> float:
        """The share of the width in an iteration of the stage."""
        return 1 + (self.final_share - 1) * min(iteration / self.iterations, 1.0)


class Surrogate(Settings):
    """The loss made of an advantage and the probability of a decision, now and before."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What it reads of a replay, now and under the old policy, besides log-probs."""
    corrects_off_policy: ClassVar[bool] = True
    """Whether it weighs a decision by what the policy has become since it was sampled."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        """Raises UserError where it does not fit a segment's unit of log-probs or its kind."""

    @abstractmethod
    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """The loss of each decision."""


def _width(given: float | None, schedule: RangeSchedule | None, inputs: SurrogateInputs) -> float:
    width = CLIP_RANGES[inputs.unit] if given is None else given
    return width if schedule is None else width * schedule.share(inputs.iteration)


def _require_width(given: float | None, key: str, unit: LogProbUnit | None) -> None:
    if given is None and unit is not None and unit not in CLIP_RANGES:
        raise UserError(
            f"algorithm.surrogate.{key}: there is no usual range for log-probs of the unit {unit!r}, because "
            "they grow with the latent's size; give one (1e-4 x elements is where to start)."
        )


class PPOClip(Surrogate):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), optionally with a second bound for A < 0."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Clip the probability ratio."""
    low: float | None = Field(default=None, gt=0, le=1)
    """The ratio's gradient stops below 1 - low. null: 0.2 for tokens, 1e-4 for mean log-probs of latents."""
    high: float | None = Field(default=None, gt=0)
    """The ratio's gradient stops above 1 + high. null: the same as low."""
    dual: float | None = Field(default=None, gt=1)
    """Bound of the loss at dual x |A| where A < 0 (dual-clip PPO; 3 is usual); null: none."""
    schedule: RangeSchedule | None = None
    """Narrows (or widens) low and high over the stage; null: they stay."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        _require_width(self.low, "low", unit)

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        low = _width(self.low, self.schedule, inputs)
        high = low if self.high is None else _width(self.high, self.schedule, inputs)
        return clipped_surrogate(inputs.log_ratio, inputs.advantages, low, high, self.dual)


class Reinforce(Surrogate):
    """-A log pi: the policy gradient itself, for decisions that the current policy made."""

    corrects_off_policy: ClassVar[bool] = False

    type: Literal["reinforce"] = "reinforce"
    """No probability ratio."""

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        return score_function_surrogate(inputs.log_probs, inputs.advantages, inputs.log_ratio, inputs.mask)


class CISPO(Surrogate):
    """-stopgrad(clip(r, low, high)) A log pi: every decision keeps a gradient, its importance weight is bounded."""

    type: Literal["cispo"] = "cispo"
    """Clip the importance weight and not the update."""
    low: float = Field(default=0.0, ge=0)
    """Smallest weight; 0: no bound from below."""
    high: float = Field(default=5.0, gt=0)
    """Largest weight: an absolute number, 1 + epsilon_high of the paper."""
    schedule: RangeSchedule | None = None
    """Moves `high` over the stage, to final_share x high; null: it stays."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> CISPO:
        final = self.high if self.schedule is None else self.high * self.schedule.final_share
        if self.low >= min(self.high, final):
            raise UserError(f"low {self.low} is not below high {min(self.high, final)}: every weight would be a bound.")
        return self

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        high = _width(self.high, self.schedule, inputs)
        return capped_weight_surrogate(
            inputs.log_probs, inputs.advantages, inputs.log_ratio, self.low, high, inputs.mask
        )


class DRPO(Surrogate):
    """-A r + |A| w (r - 1)^2 / (2 epsilon): a quadratic penalty in place of a clip, which pulls far ratios back."""

    type: Literal["drpo"] = "drpo"
    """Penalise the ratio's distance from 1."""
    epsilon: float | None = Field(default=None, gt=0)
    """With w = 1 the loss is smallest at r = 1 +- epsilon. null: as `low` of ppo_clip."""
    weight: Literal["old_probability", "one"] = "old_probability"
    """w: the probability that the old policy gave the token, so that rare ones may move further; or 1."""
    schedule: RangeSchedule | None = None
    """Narrows (or widens) epsilon over the stage; null: it stays."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        _require_width(self.epsilon, "epsilon", unit)
        if self.weight == "old_probability" and kind == "denoising":
            raise UserError(
                "algorithm.surrogate.weight: old_probability is for tokens; a latent has a density, not a probability. "
                "Use weight: one."
            )

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        epsilon = _width(self.epsilon, self.schedule, inputs)
        weights = inputs.old["log_prob"].exp() if self.weight == "old_probability" else 1.0
        return penalised_surrogate(inputs.log_ratio, inputs.advantages, epsilon, weights)
