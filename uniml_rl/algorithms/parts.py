"""The parts of an algorithm: one block per choice. A key that the chosen type does not read cannot be written."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor

from modalities.base import Need, Policy
from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.algorithms.advantages import overlong_penalty
from uniml_rl.algorithms.aggregation import AggregationMode
from uniml_rl.algorithms.controllers import AdaptiveKL, FixedKL, KLController
from uniml_rl.algorithms.denoising_surrogates import FlowDPPO, GRPOGuard
from uniml_rl.algorithms.mismatch import Correction, mask_mismatch, truncate_mismatch
from uniml_rl.algorithms.token_surrogates import CISPO, DRPO, PPOClip, Reinforce

SurrogateSettings = Annotated[PPOClip | Reinforce | CISPO | DRPO | GRPOGuard | FlowDPPO, Field(discriminator="type")]


class AdaptiveKLSettings(Settings):
    """beta <- beta (1 + clip(kl / target - 1, +-0.2) samples / horizon) after each iteration."""

    target: float = Field(gt=0)
    """KL per sample (summed over its decisions) that the controller steers to."""
    horizon: float = Field(gt=0)
    """Samples over which the coefficient may change by 20 %."""


class FixedReference(Settings):
    """The policy that the stage began with."""

    type: Literal["fixed"] = "fixed"
    """It never moves."""

    def follow(self, policy: Policy, finished_iterations: int) -> None:
        """Moves the weight set "reference" after an iteration, if it is time."""


class RefreshedReference(Settings):
    """A copy of the policy, taken again and again."""

    type: Literal["refreshed"] = "refreshed"
    """It jumps to the current policy."""
    every: int = Field(ge=1)
    """Iterations from one copy to the next."""

    def follow(self, policy: Policy, finished_iterations: int) -> None:
        """Moves the weight set "reference" after an iteration, if it is time."""
        if finished_iterations % self.every == 0:
            policy.keep("reference")


class MovingAverageReference(Settings):
    """An exponential moving average of the policy's trainable weights (of an adapter's factors, each by itself)."""

    type: Literal["moving_average"] = "moving_average"
    """It follows slowly."""
    decay: float = Field(ge=0, lt=1)
    """Share of the old average that is kept."""
    every: int = Field(default=1, ge=1)
    """Iterations from one average to the next."""

    def follow(self, policy: Policy, finished_iterations: int) -> None:
        """Moves the weight set "reference" after an iteration, if it is time."""
        if finished_iterations % self.every == 0:
            policy.average("reference", self.decay)


ReferenceSettings = Annotated[FixedReference | RefreshedReference | MovingAverageReference, Field(discriminator="type")]


_KL_NEEDS: dict[str, frozenset[Need]] = {
    "gaussian": frozenset({"mean", "std"}),
    "prediction_mse": frozenset({"prediction"}),
}


class KLSettings(Settings):
    """The pull back to the reference policy."""

    coefficient: float = Field(gt=0)
    """Weight of the divergence; where it starts, if adaptive."""
    estimator: Literal["k1", "k2", "k3", "gaussian", "prediction_mse"]
    """From log-probs: k1, k2 or k3. For denoising also: gaussian, the KL of the transitions (true variance), and
    prediction_mse, the mean squared difference of the predicted velocity or noise."""
    placement: Literal["reward", "loss"]
    """Subtract it from the reward of each decision, or add it to the loss."""
    adaptive: AdaptiveKLSettings | None = None
    """Steer the coefficient to a target divergence; null: it stays."""
    reference: ReferenceSettings = FixedReference()
    """Which policy it is the distance to."""

    @model_validator(mode="after")
    def _parts_fit(self) -> KLSettings:
        if self.estimator == "k1" and self.placement == "loss":
            raise UserError(
                "estimator k1 in the loss does nothing: its expected gradient is 0 on-policy. Use k2 in the loss "
                "(its gradient is that of the reverse KL), or placement: reward."
            )
        if self.estimator in ("gaussian", "prediction_mse"):
            if self.placement == "reward":
                raise UserError(
                    f"estimator {self.estimator!r} is no estimate from a sample's log-probs, which is what a reward is "
                    "charged with. Use placement: loss, or estimator: k1."
                )
            if self.adaptive is not None:
                raise UserError(
                    f"adaptive: the controller steers the KL that is estimated from log-probs, and estimator "
                    f"{self.estimator!r} does not compute them for the reference. Use k2 or k3, or adaptive: null."
                )
        return self

    @property
    def needs(self) -> frozenset[Need]:
        """What the divergence is made of besides log-probs. Those of the reference are computed once per rollout."""
        return _KL_NEEDS.get(self.estimator, frozenset())

    def controller(self) -> KLController:
        """The controller of the coefficient."""
        if self.adaptive is None:
            return FixedKL(self.coefficient)
        return AdaptiveKL(self.coefficient, self.adaptive.target, self.adaptive.horizon)


class AggregationSettings(Settings):
    """How the losses of single decisions become one number."""

    mode: AggregationMode = "token_mean"
    """Mean over decisions; mean over samples of the mean (or sum) over their decisions; sum over a constant; or mean
    over prompts of the mean over their decisions."""
    constant: float | None = Field(default=None, gt=0)
    """What sum_over_constant divides by; given exactly when the mode is that."""

    @model_validator(mode="after")
    def _constant_is_read(self) -> AggregationSettings:
        if self.mode == "sum_over_constant" and self.constant is None:
            raise UserError(
                "mode: sum_over_constant needs a `constant`: for Dr. GRPO, samples per optimizer step x maximal length."
            )
        if self.mode != "sum_over_constant" and self.constant is not None:
            raise UserError(
                f"constant: {self.constant:g}: mode {self.mode} reads none; remove it, or take mode: sum_over_constant."
            )
        return self


class ValueSettings(Settings):
    """The critic's loss. What the critic is, and its optimizer, stand in the stage's `critic` block."""

    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the value loss, which matters where its gradient reaches the policy's own trunk."""
    clip: float | None = Field(default=0.2, gt=0)
    """How far a value may move from the one at rollout before its gradient stops; null: any distance."""
    warm_up_iterations: int = Field(default=0, ge=0)
    """Iterations at the start in which only the critic learns."""
    pretraining_epochs: int = Field(default=0, ge=0)
    """Passes over the first rollout in which only the critic learns, before its first update."""


class TruncateMismatch(Settings):
    """Weight min(rho, cap) on each decision, rho = exp(old - rollout log-prob)."""

    type: Literal["truncate"] = "truncate"
    """Truncated importance sampling."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""

    def correct(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Correction:
        """The weights and the decisions that stay; all [B, T]."""
        return truncate_mismatch(old_log_probs, rollout_log_probs, mask, self.cap)


class MaskMismatch(Settings):
    """Decisions or sequences whose rho lies outside of [low, high] are not trained."""

    type: Literal["mask"] = "mask"
    """Leave out what the sampler and the trainer disagree on."""
    low: float = Field(default=0.5, ge=0)
    """Smallest rho that is kept."""
    high: float = Field(default=2.0, gt=0)
    """Largest rho that is kept."""
    level: Literal["decision", "sequence"] = "decision"
    """Judge single decisions, or whole samples by the geometric mean of rho."""

    @model_validator(mode="after")
    def _band_holds_one(self) -> MaskMismatch:
        if not self.low < 1 < self.high:
            raise UserError(f"the band [{self.low}, {self.high}] must hold 1, the rho of a perfect sampler.")
        return self

    def correct(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Correction:
        """The weights and the decisions that stay; all [B, T]."""
        return mask_mismatch(old_log_probs, rollout_log_probs, mask, self.low, self.high, self.level)


MismatchSettings = Annotated[TruncateMismatch | MaskMismatch, Field(discriminator="type")]


class DynamicSampling(Settings):
    """Prompts whose samples all got the same reward are dropped, and others are sampled in their place (DAPO)."""

    rounds: int = Field(default=10, ge=1)
    """How often at most, in one iteration. What is found by then is trained on."""


class OverlongSettings(Settings):
    """Takes from the reward of long samples: min(length - (maximum - buffer), buffer) / buffer x factor (DAPO)."""

    maximum: int | None = Field(default=None, ge=1)
    """Length, in the model's own tokens, from which the whole factor is taken. null: the sampling limit
    (`max_new_tokens`)."""
    buffer: int | None = Field(default=None, ge=1)
    """Tokens before that over which the punishment grows from 0. null: a fifth of the maximum, the paper's ratio."""
    factor: float = Field(default=1.0, gt=0)
    """Largest punishment, in units of the total reward."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> OverlongSettings:
        if self.maximum is not None and self.buffer is not None and self.buffer > self.maximum:
            raise UserError(
                f"buffer: {self.buffer}: it is longer than the maximum of {self.maximum}; give a shorter one."
            )
        return self

    def penalty(self, lengths: Tensor, limit: int) -> Tensor:
        """[B] float32 for lengths [B] in tokens; `limit` stands in for a maximum that is not given."""
        return overlong_penalty(lengths, *self._range(limit), self.factor)

    def check(self, limit: int) -> None:
        """Raises UserError if no sample of a policy whose samples have `limit` tokens at most (0: not known) would be
        punished."""
        maximum, buffer = self._range(limit)
        if not maximum:
            raise UserError(
                "algorithm.overlong.maximum: the policy has no sampling.max_new_tokens to take it from; give the "
                "length from which the whole factor is taken."
            )
        if buffer > maximum:
            raise UserError(
                f"algorithm.overlong.buffer: {buffer}: the punishment would have begun before the first of the "
                f"{maximum} tokens that sampling.max_new_tokens allows; give at most {maximum}, or null for a fifth."
            )
        if 0 < limit <= maximum - buffer:
            raise UserError(
                f"algorithm.overlong: only samples of more than maximum - buffer = {maximum} - {buffer} tokens are "
                f"punished, and sampling.max_new_tokens ends every sample at {limit}: nothing ever would be. Lower "
                "maximum (null takes max_new_tokens), or let the policy write longer samples."
            )

    def _range(self, limit: int) -> tuple[int, int]:
        """Maximum and buffer in tokens."""
        maximum = self.maximum or limit
        return maximum, self.buffer or max(1, round(maximum / 5))


class ReplaySettings(Settings):
    """Recent rollouts are trained again beside the new one, with the advantages and the old log-probs that they had."""

    iterations: int = Field(ge=1)
    """How many of the last rollouts."""
