"""Transition kernels, noise schedules and log-probs of denoising, as pure functions on float32 tensors of any rank.

A transition moves a latent x [B, ...] one step down the schedule: x' = mean + std * noise. The std of every kernel here
depends on the schedule alone, and its mean is linear, on_x * x + on_prediction * prediction, with coefficients [B] of
the schedule and the std. So a recorded std is all that is needed to compute the mean again; std 0 gives the
deterministic step (ODE, DDIM).

Flow models: sigma runs 1 -> 0, x = (1 - sigma) x0 + sigma noise, the model predicts v = noise - x0.
Diffusion models: x = sqrt(alpha) x0 + sqrt(1 - alpha) noise, alpha is the cumulative product of the schedule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from modalities.base import LogProbUnit


def expand(values: Tensor, like: Tensor) -> Tensor:
    """[B] -> [B, 1, ...], to broadcast over a latent `like` [B, ...]."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


# Flow models


def flow_sde_std(sigmas: Tensor, noise_level: float) -> Tensor:
    """Flow-GRPO (Liu et al. 2025): a sqrt(sigma / (1 - sigma)) sqrt(-delta); [T + 1] -> [T].

    At sigma = 1 the denominator takes the schedule's second sigma, so the first std is `noise_level` itself. The
    transition to sigma = 0 gets std 0, where the paper's formula would leave noise in the sample.
    """
    start = sigmas[:-1]
    denominator = 1 - torch.where(start >= 1, sigmas[1], start)
    std = noise_level * (start / denominator).sqrt() * (start - sigmas[1:]).sqrt()
    return torch.where(sigmas[1:] > 0, std, 0.0)


def dance_sde_std(sigmas: Tensor, noise_level: float) -> Tensor:
    """DanceGRPO (Xue et al. 2025): eta sqrt(-delta), and 0 on the transition to sigma = 0; [T + 1] -> [T]."""
    std = noise_level * (sigmas[:-1] - sigmas[1:]).sqrt()
    return torch.where(sigmas[1:] > 0, std, 0.0)


def cps_std(sigmas: Tensor, noise_level: float) -> Tensor:
    """Flow-CPS (Wang and Yu 2025): sigma_next sin(a pi / 2); [T + 1] -> [T]."""
    return sigmas[1:] * math.sin(noise_level * math.pi / 2)


def flow_sde_coefficients(sigma: Tensor, sigma_next: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Euler-Maruyama step of the reverse SDE with diffusion g = std / sqrt(-delta) (Flow-GRPO eq. 9, DanceGRPO eq. 8).

    Both papers' kernels are this one, with another g. With std 0 it is the Euler step of the ODE. [B] -> [B], [B].
    """
    correction = -(std**2) / (2 * sigma)  # g^2 delta / (2 sigma)
    return 1 + correction, sigma_next - sigma + correction * (1 - sigma)


def cps_coefficients(sigma: Tensor, sigma_next: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-CPS (Wang and Yu 2025): (1 - sigma_next) x0 + sqrt(sigma_next^2 - std^2) x1. [B] -> [B], [B].

    x0 = x - sigma v is the predicted data and x1 = x + (1 - sigma) v the predicted noise, shrunk to make room for new.
    """
    on_clean, on_noise = 1 - sigma_next, (sigma_next**2 - std**2).clamp_min(0).sqrt()
    return on_clean + on_noise, on_noise * (1 - sigma) - on_clean * sigma


# Diffusion models


def ddim_std(alphas: Tensor, eta: float) -> Tensor:
    """DDIM (Song et al. 2021, eq. 16): eta sqrt((1 - a_next) / (1 - a) (1 - a / a_next)); [T + 1] -> [T]."""
    start, end = alphas[:-1], alphas[1:]
    return eta * ((1 - end) / (1 - start) * (1 - start / end)).clamp_min(0).sqrt()


def ddim_coefficients(alpha: Tensor, alpha_next: Tensor, std: Tensor, prediction_type: str) -> tuple[Tensor, Tensor]:
    """DDIM (Song et al. 2021, eq. 12): sqrt(a_next) x0 + sqrt(1 - a_next - std^2) noise, both as the model predicts
    them; `prediction_type` is "epsilon", "sample" or "v_prediction". [B] -> [B], [B]."""
    signal, noise = alpha.sqrt(), (1 - alpha).sqrt()
    on_clean, on_noise = alpha_next.sqrt(), (1 - alpha_next - std**2).clamp_min(0).sqrt()
    if prediction_type == "epsilon":
        return on_clean / signal, on_noise - on_clean * noise / signal
    if prediction_type == "sample":
        return on_noise / noise, on_clean - on_noise * signal / noise
    if prediction_type == "v_prediction":
        return on_clean * signal + on_noise * noise, on_noise * signal - on_clean * noise
    raise ValueError(f"unknown prediction type {prediction_type!r}.")


def clean_and_noise(x: Tensor, prediction: Tensor, alpha: Tensor, prediction_type: str) -> tuple[Tensor, Tensor]:
    """The model's output as (clean latent, noise); `prediction_type` is "epsilon", "sample" or "v_prediction"."""
    signal, noise_scale = expand(alpha.sqrt(), x), expand((1 - alpha).sqrt(), x)
    if prediction_type == "epsilon":
        return (x - noise_scale * prediction) / signal, prediction
    if prediction_type == "sample":
        return prediction, (x - signal * prediction) / noise_scale
    if prediction_type == "v_prediction":
        return signal * x - noise_scale * prediction, signal * prediction + noise_scale * x
    raise ValueError(f"unknown prediction type {prediction_type!r}.")


def prediction_of(clean: Tensor, noise: Tensor, alpha: Tensor, prediction_type: str) -> Tensor:
    """The inverse of `clean_and_noise`: what a model of that type should output."""
    if prediction_type == "epsilon":
        return noise
    if prediction_type == "sample":
        return clean
    if prediction_type == "v_prediction":
        return expand(alpha.sqrt(), clean) * noise - expand((1 - alpha).sqrt(), clean) * clean
    raise ValueError(f"unknown prediction type {prediction_type!r}.")


# Log-probs


def _reduce(values: Tensor, unit: LogProbUnit) -> Tensor:
    if unit not in ("element_mean", "element_sum", "error_mean", "error_sum"):
        raise ValueError(f"a denoising log-prob is counted per 'element_mean' or 'element_sum', not {unit!r}.")
    return values.flatten(1).mean(1) if unit.endswith("mean") else values.flatten(1).sum(1)


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor, unit: LogProbUnit) -> Tensor:
    """log N(x; mean, std^2), the mean or the sum over each row's elements; [B, ...] -> [B] float32; `std` [B] > 0."""
    std = expand(std.float(), x)
    residual = (x.float() - mean.float()) / std
    return _reduce(-0.5 * residual**2 - std.log() - 0.5 * math.log(2 * math.pi), unit)


def unnormalised_log_prob(x: Tensor, mean: Tensor, unit: LogProbUnit) -> Tensor:
    """-(x - mean)^2, what the Flow-CPS paper scores with: not a log-density of the sampler. [B, ...] -> [B] float32."""
    return _reduce(-((x.float() - mean.float()) ** 2), unit)


def gaussian_entropy(std: Tensor, num_elements: int, unit: LogProbUnit) -> Tensor:
    """Entropy in nats of the transition, per element or of all `num_elements` together; [B] -> [B] float32."""
    entropy = std.float().log() + 0.5 * math.log(2 * math.pi * math.e)
    return entropy * num_elements if unit.endswith("sum") else entropy


# Schedules


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """SD3's resolution shift (Esser et al. 2024, eq. 23): s sigma / (1 + (s - 1) sigma)."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def uniform_sigmas(num_steps: int, shift: float) -> Tensor:
    """[T + 1] float32 from 1 to 0: uniform in time, shifted exactly once."""
    return shift_sigmas(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift).float()


def ddim_timesteps(num_steps: int, num_train_timesteps: int, spacing: str, steps_offset: int) -> Tensor:
    """[T] int64, descending (Lin et al. 2024, table 2): spacing "leading", "trailing" or "linspace"."""
    if spacing == "leading":
        return torch.arange(num_steps).flip(0) * (num_train_timesteps // num_steps) + steps_offset
    if spacing == "trailing":
        ends = num_train_timesteps - torch.arange(num_steps, dtype=torch.float64) * (num_train_timesteps / num_steps)
        return ends.round().long() - 1
    if spacing == "linspace":
        return torch.linspace(0, num_train_timesteps - 1, num_steps, dtype=torch.float64).round().long().flip(0)
    raise ValueError(f"unknown timestep spacing {spacing!r}.")
