"""Losses on the forward process: rewarded samples are noised, and the denoiser learns to undo it more or less well.

Both parts are a settings block with its formula. ||.||^2 is a mean over the latent's elements. w(t) is that of the
`forward` block: which error is squared (the model's output's, the implied noise's, the implied clean latent's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from modalities.settings import Settings
from uniml_rl.algorithms.surrogate import SurrogateTerms, clipped_surrogate, log_ratio

SMALLEST_ERROR = 1e-10
"""Added to a squared error under a power below 1, whose slope would be infinite at 0."""
SMALLEST_DEVIATION = 1e-5
"""Lower bound of the mean absolute error that a self-normalised loss divides by."""


@dataclass(frozen=True)
class MatchingInputs:
    """Noised samples of b rows and t draws as a loss sees them; `prediction` and `log_prob` have a gradient."""

    prediction: Tensor  # [b, t, ...] float32, the denoiser's output
    target: Tensor  # [b, t, ...] float32, that of a perfect denoiser
    log_prob: Tensor  # [b, t] float32, -w(t) mean((prediction - target)^2)
    weights: Tensor  # [b, t] float32, w(t)
    advantages: Tensor  # [b, t] float32
    old_prediction: Tensor | None = None  # [b, t, ...] of the old policy, for losses that need it
    old_log_prob: Tensor | None = None  # [b, t] of the weights that the iteration began with, for losses that need it


class OldPolicySettings(Settings):
    """A policy that follows the trained one: old <- d old + (1 - d) current after each iteration, with
    d = min(limit, slope max(0, u - delay)) after u optimizer steps of the stage."""

    delay: int = Field(default=0, ge=0)
    """Optimizer steps during which it is the trained policy itself."""
    slope: float = Field(default=0.001, ge=0)
    """What each further optimizer step adds to the decay d."""
    limit: float = Field(default=0.5, ge=0, lt=1)
    """Largest decay d."""
    pull: float = Field(default=0.0, ge=0)
    """Weight of mean((prediction - old prediction)^2) in the loss."""

    def decay(self, optimizer_steps: int) -> float:
        """d after so many optimizer steps."""
        return min(self.limit, self.slope * max(0, optimizer_steps - self.delay))


class NegativeAware(Settings):
    """DiffusionNFT (Zheng et al. 2025, algorithm 1): learns from good samples through the policy and from bad ones
    through its mirror image at the old policy.

        v+ = beta v + (1 - beta) v_old,  v- = (1 + beta) v_old - beta v,  r = clip(A / c, +-1) / 2 + 1 / 2
        loss = c / beta w(t) [r ||v+ - target||^2 + (1 - r) ||v- - target||^2]

    The factor c / beta, which the authors' code has and the paper has not, makes the gradient at v = v_old that of
    A w(t) ||v - target||^2, whatever beta and c. All predictions are affine in each other, so mixing outputs is mixing
    the clean latents that they imply. `self_normalised` divides each square by the mean absolute error, as a constant:
    with `forward.weighting: clean` that is the paper's ||x+ - x0||^2 / sg(mean |x+ - x0|).
    """

    needs_old_policy: ClassVar[bool] = True
    needs_old_log_prob: ClassVar[bool] = False

    type: Literal["nft"] = "nft"
    """Compare with the old policy, which also makes the rollouts."""
    beta: float = Field(default=1.0, gt=0)
    """How far the two mixed policies lie from the old one, in steps of the trained one."""
    advantage_limit: float = Field(default=5.0, gt=0)
    """c: the advantage from which on a sample counts as wholly good."""
    self_normalised: bool = True
    """Divide each squared error by its own mean absolute error."""

    def terms(self, inputs: MatchingInputs) -> SurrogateTerms:
        """The loss of each draw; the ratio is 1, and clipped is where the advantage was."""
        assert inputs.old_prediction is not None
        old, step = inputs.old_prediction, self.beta * (inputs.prediction - inputs.old_prediction)
        share = inputs.advantages / self.advantage_limit
        good = share.clamp(-1, 1) / 2 + 0.5
        loss = good * self._error(old + step, inputs) + (1 - good) * self._error(old - step, inputs)
        return SurrogateTerms(
            self.advantage_limit / self.beta * loss, torch.zeros_like(good, dtype=torch.bool), torch.ones_like(good)
        )

    def _error(self, prediction: Tensor, inputs: MatchingInputs) -> Tensor:
        """[b, t]: w(t) mean((prediction - target)^2), over sqrt(w(t)) mean |prediction - target| if self-normalised."""
        residual = (prediction - inputs.target).flatten(2)
        error = inputs.weights * residual.square().mean(2)
        if not self.self_normalised:
            return error
        deviation = inputs.weights.sqrt() * residual.detach().abs().mean(2)
        return error / deviation.clamp(min=SMALLEST_DEVIATION)


class AdvantageWeighted(Settings):
    """AWM (Xue et al. 2025): A w(t) ||v - target||^2, the pretraining loss weighted by the advantage.

    `power` p replaces the squared error e by ((e + 1e-10)^p - 1e-10^p) / p, which weighs large errors less. With `clip`
    the loss is PPO's (its clip range), of the ratio exp(l - l_old) of these weighted errors l = -w(t) e; its gradient
    at the first optimizer step of a rollout is the same.
    """

    needs_old_policy: ClassVar[bool] = False

    type: Literal["awm"] = "awm"
    """Weight the denoising loss by the advantage."""
    power: float | None = Field(default=None, gt=0, lt=1)
    """p; null: the squared error itself."""
    clip: float | None = Field(default=None, gt=0)
    """Clip range of the ratio; null: no ratio, for one optimizer step per rollout."""

    @property
    def needs_old_log_prob(self) -> bool:
        """Whether `terms` reads the log-probs that the iteration began with."""
        return self.clip is not None

    def terms(self, inputs: MatchingInputs) -> SurrogateTerms:
        """The loss of each draw."""
        score = self._score(inputs.log_prob, inputs.weights)
        if self.clip is None:
            ones = torch.ones_like(score)
            return SurrogateTerms(-inputs.advantages * score, torch.zeros_like(ones, dtype=torch.bool), ones)
        assert inputs.old_log_prob is not None
        ratio = log_ratio(score, self._score(inputs.old_log_prob, inputs.weights))
        return clipped_surrogate(ratio, inputs.advantages, self.clip, self.clip)

    def _score(self, log_prob: Tensor, weights: Tensor) -> Tensor:
        """[b, t]: -w(t) e, or its power."""
        if self.power is None:
            return log_prob
        # Where the weight is 0 (the noise that pure noise implies) the error is not known, nor needed.
        error = -log_prob / weights.where(weights > 0, 1.0) + SMALLEST_ERROR
        return -weights * (error.pow(self.power) - SMALLEST_ERROR**self.power) / self.power


MatchingLoss = Annotated[NegativeAware | AdvantageWeighted, Field(discriminator="type")]
