"""The parts of an algorithm: one block per choice. A key that the chosen type does not read cannot be written."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from modalities.base import LogProbUnit, Need
from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.algorithms.aggregation import AggregationMode
from uniml_rl.algorithms.controllers import AdaptiveKL, FixedKL, KLController
from uniml_rl.algorithms.mismatch import Correction, mask_mismatch, truncate_mismatch
from uniml_rl.algorithms.surrogate import SurrogateInputs, SurrogateTerms, clipped_surrogate

CLIP_RANGES: dict[LogProbUnit, float] = {"token": 0.2, "element_mean": 1e-4}
"""The usual clip range of each unit of a log-prob. "element_sum" has none: it grows with the latent's size."""

GROUP_ESTIMATORS = ("group", "leave_one_out")


class GroupAdvantage(Settings):
    """(r - mean of the group) / (std + epsilon): GRPO, Dr. GRPO, Flow-GRPO."""

    type: Literal["group"] = "group"
    """Compare the samples of one prompt with each other."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What divides: the group's own standard deviation, that of all rewards of the batch, or nothing."""
    epsilon: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation."""
    clip: float | None = Field(default=None, gt=0)
    """Bound of the advantage's absolute value; null: none."""


class LeaveOneOutAdvantage(Settings):
    """r minus the mean of the group's other samples: RLOO."""

    type: Literal["leave_one_out"] = "leave_one_out"
    """Compare each sample of a prompt with the others."""
    clip: float | None = Field(default=None, gt=0)
    """Bound of the advantage's absolute value; null: none."""


class RunningPromptAdvantage(Settings):
    """(r - mean) / (std + epsilon) over the prompt's last rewards, whichever iterations they come from: DDPO."""

    type: Literal["running_prompt"] = "running_prompt"
    """Compare a sample with what its prompt got before."""
    buffer_size: int = Field(default=16, ge=1)
    """Rewards remembered per prompt."""
    min_count: int = Field(default=16, ge=1)
    """With fewer remembered rewards, the batch's mean and standard deviation are taken."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    clip: float | None = Field(default=5.0, gt=0)
    """Bound of the advantage's absolute value; null: none."""

    @model_validator(mode="after")
    def _reachable(self) -> RunningPromptAdvantage:
        if self.min_count > self.buffer_size:
            raise UserError(
                f"min_count {self.min_count} can never be reached with buffer_size {self.buffer_size}: "
                "the statistics per prompt would never be used. Raise buffer_size or lower min_count."
            )
        return self


class BatchAdvantage(Settings):
    """(r - mean of the batch) / (std + epsilon), one number per sample: REINFORCE with normalised rewards."""

    type: Literal["batch"] = "batch"
    """Compare a sample with all samples of the iteration."""
    scale: Literal["batch_std", "none"] = "batch_std"
    """What divides: the standard deviation of the batch, or nothing."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    clip: float | None = Field(default=None, gt=0)
    """Bound of the advantage's absolute value; null: none."""


class GAEAdvantage(Settings):
    """Generalised advantage estimation with a critic: PPO."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["gae"] = "gae"
    """Compare each decision's outcome with a critic's expectation."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per decision."""
    lambda_: float = Field(default=0.95, ge=0, le=1, alias="lambda")
    """Trades the critic's bias (0) against the return's variance (1)."""
    whiten: bool = True
    """Normalise the advantages of the iteration to mean 0 and standard deviation 1 over all trained decisions."""
    epsilon: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation when whitening."""
    clip: float | None = Field(default=None, gt=0)
    """Bound of the advantage's absolute value; null: none."""


AdvantageSettings = Annotated[
    GroupAdvantage | LeaveOneOutAdvantage | RunningPromptAdvantage | BatchAdvantage | GAEAdvantage,
    Field(discriminator="type"),
]


class PPOClip(Settings):
    """max(-A r, -A clip(r, 1 - low, 1 + high)), optionally with a second bound for A < 0."""

    needs: ClassVar[frozenset[Need]] = frozenset()
    """What it reads of a replay, now and under the old policy, besides log-probs."""

    type: Literal["ppo_clip"] = "ppo_clip"
    """Clip the probability ratio."""
    low: float | None = Field(default=None, gt=0, le=1)
    """The ratio's gradient stops below 1 - low. null: 0.2 for tokens, 1e-4 for mean log-probs of latents."""
    high: float | None = Field(default=None, gt=0)
    """The ratio's gradient stops above 1 + high. null: the same as low."""
    dual: float | None = Field(default=None, gt=1)
    """Bound of the loss at dual x |A| where A < 0 (dual-clip PPO; 3 is usual); null: none."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        """Raises UserError where it does not fit a segment's unit of log-probs or its kind."""
        if self.low is None and unit is not None and unit not in CLIP_RANGES:
            raise UserError(
                f"algorithm.surrogate.low: there is no usual clip range for log-probs of the unit {unit!r}, because "
                "they grow with the latent's size; give one (1e-4 x elements is where to start)."
            )

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        """The loss of each decision."""
        low = CLIP_RANGES[inputs.unit] if self.low is None else self.low
        high = low if self.high is None else self.high
        return clipped_surrogate(inputs.log_ratio, inputs.advantages, low, high, self.dual)


SurrogateSettings = PPOClip
"""Becomes a union discriminated by `type` with the second surrogate."""


class AdaptiveKLSettings(Settings):
    """beta <- beta (1 + clip(kl / target - 1, +-0.2) samples / horizon) after each iteration."""

    target: float = Field(gt=0)
    """KL per sample (summed over its decisions) that the controller steers to."""
    horizon: float = Field(gt=0)
    """Samples over which the coefficient may change by 20 %."""


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
        if (self.mode == "sum_over_constant") != (self.constant is not None):
            raise UserError(
                f"mode {self.mode!r} with constant {self.constant}: sum_over_constant needs a constant (for Dr. GRPO: "
                "samples per optimizer step x maximal length), and no other mode reads one."
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
