"""Surrogate losses that know what a denoising transition is: a Gaussian whose mean moves and whose std does not."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from modalities.base import LogProbUnit, Need
from modalities.errors import UserError
from uniml_rl.algorithms.kl import gaussian_kl
from uniml_rl.algorithms.surrogate import SurrogateInputs, SurrogateTerms, clipped_surrogate
from uniml_rl.algorithms.token_surrogates import Surrogate

GUARD_CLIP = 2e-6
"""The authors' clip range, for mean log-probs of latents."""


def _check_denoising(type: str, kind: str | None) -> None:
    if kind not in (None, "denoising"):
        raise UserError(
            f"algorithm.surrogate.type {type!r} compares the means of denoising transitions, and {kind} have none. Use "
            "ppo_clip."
        )


def _drift(inputs: SurrogateInputs) -> Tensor:
    """[b, t]: mean over elements of (mu - mu_old)^2 / (2 s^2), s the transition's own std; 0 outside of the mask."""
    drift = gaussian_kl(inputs.now["mean"], inputs.old["mean"], inputs.now["std"])
    return torch.where(inputs.mask, drift, 0.0)


class GRPOGuard(Surrogate):
    """GRPO-Guard (Wang et al. 2025): PPO's clip of a ratio that is centred at 1 and as wide at every step.

        log r' = (log r + (mu - mu_old)^2 / (2 s^2)) s,  loss = max(-A r', -A clip(r', 1 - low, 1 + high)) / step size

    log r' is noise (mu - mu_old) for the noise that the old policy drew: its mean is 0, where that of log r is minus
    the KL, so that a symmetric clip lets more of A > 0 through. The step size is sigma - sigma_next.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"mean", "std", "step_size"})

    type: Literal["grpo_guard"] = "grpo_guard"
    """Recentre the ratio, then clip it."""
    low: float | None = Field(default=None, gt=0, le=1)
    """The ratio's gradient stops below 1 - low. null: 2e-6 for mean log-probs."""
    high: float | None = Field(default=None, gt=0)
    """The ratio's gradient stops above 1 + high. null: the same as low."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        _check_denoising(self.type, kind)
        if unit in ("error_mean", "error_sum"):
            raise UserError(
                "algorithm.surrogate.type 'grpo_guard' adds the transitions' KL to the log-ratio, and unnormalised "
                "log-probs are not on its scale. Set sampling.sampler.log_prob: gaussian."
            )
        if self.low is None and unit not in (None, "element_mean"):
            raise UserError(
                f"algorithm.surrogate.low: there is no usual clip range for log-probs of the unit {unit!r}, because "
                "they grow with the latent's size; give one (2e-6 x elements is where to start)."
            )

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        mean, std, step_size = (inputs.now[need] for need in ("mean", "std", "step_size"))
        elements = mean[0, 0].numel() if inputs.unit == "element_sum" else 1
        centred = (inputs.log_ratio + elements * _drift(inputs)) * std
        low = GUARD_CLIP if self.low is None else self.low
        terms = clipped_surrogate(centred, inputs.advantages, low, low if self.high is None else self.high)
        return SurrogateTerms(terms.loss / step_size, terms.clipped, terms.ratio)


class FlowDPPO(Surrogate):
    """Flow-DPPO (Ping et al. 2026): -A r without a clip, dropped where the transition has moved by the threshold.

    A decision is dropped if its KL, the mean over elements of (mu - mu_old)^2 / (2 s^2), is at or above the threshold
    and its gradient would move it further away: A > 0 and r > 1, or A < 0 and r < 1. It stays in the denominator.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"mean", "std"})

    type: Literal["flow_dppo"] = "flow_dppo"
    """Bound the transition's KL, not its ratio."""
    threshold: float = Field(default=1e-6, gt=0)
    """Largest KL, a mean over the latent's elements, that an update may still enlarge."""

    def check(self, unit: LogProbUnit | None, kind: str | None) -> None:
        _check_denoising(self.type, kind)

    def terms(self, inputs: SurrogateInputs) -> SurrogateTerms:
        ratio, advantages = inputs.log_ratio.exp(), inputs.advantages.detach()
        away = advantages * (ratio - 1) > 0
        dropped = away & (_drift(inputs) >= self.threshold)
        return SurrogateTerms(torch.where(dropped, 0.0, -advantages * ratio), dropped, ratio.detach())
