"""Divergence from the reference policy, per decision, in float32. None of these is averaged here."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    estimator: KLEstimator, log_prob: Tensor, reference_log_prob: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """Estimates KL(pi || pi_ref) from samples of pi (Schulman 2020), with d = log pi - log pi_ref: [b, t].

        k1 = d                     unbiased, any sign. As a loss its expected on-policy gradient is 0: reward only
        k2 = d^2 / 2               biased value; its on-policy gradient is that of KL(pi || pi_ref)
        k3 = exp(-d) - 1 + d       unbiased, >= 0; its on-policy gradient is that of KL(pi_ref || pi)

    The gradient goes to `log_prob` alone. k3 clamps d at -20, below which there is no gradient. Outside of `mask` the
    result is 0 and has no gradient. Raises ValueError for another estimator.
    """
    difference = log_prob.float() - reference_log_prob.detach().float()
    if mask is not None:
        difference = torch.where(mask, difference, 0.0)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator != "k3":
        raise ValueError(f"{estimator!r} is no estimator from log-probs; there are k1, k2 and k3.")
    # Both terms: with the exponential's gradient alone gone, the other one would push further away.
    difference = difference.clamp(min=-20)
    return torch.expm1(-difference) + difference


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """KL between two transitions of equal std, averaged over the latent's elements: (mu - mu_ref)^2 / (2 s^2).

    The true KL of the latents divided by their size, in step with log-probs of the unit "element_mean". A transition
    of std 0 has none: the result is inf there, without gradient (it is never trained).

    Args:
        mean, reference_mean: [b, t, ...] float32; gradient goes to `mean`.
        std: [b, t], the transition's own noise std.
    """
    stochastic = std > 0
    variance = torch.where(stochastic, std.detach().float(), 1.0).square()
    return torch.where(stochastic, prediction_mse(mean, reference_mean) / (2 * variance), torch.inf)


def prediction_mse(prediction: Tensor, reference: Tensor) -> Tensor:
    """Mean over elements of (prediction - reference)^2 per decision: [b, t, ...] -> [b, t]. Gradient to `prediction`.

    The default divergence for denoising models: a weighted Gaussian KL that does not blow up at small sigma.
    """
    squares = (prediction.float() - reference.detach().float()).square()
    return squares.flatten(2).mean(2) if squares.ndim > 2 else squares
