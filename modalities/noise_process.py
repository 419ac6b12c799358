"""What a noise level means: the schedule of a flow or a diffusion model, and its transition kernels by name."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modalities import samplers
from modalities.base import LogProbUnit
from modalities.denoising_settings import Cps, DanceSde, Ddim, DenoisingSampling, FlowSde, Sampler, Window
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samplers import expand

_UNNORMALISED: dict[LogProbUnit, LogProbUnit] = {"element_mean": "error_mean", "element_sum": "error_sum"}
FIRST_ITERATION = SampleKey(run_seed=0, stage=0, iteration=0, prompt=0, sample=0)


@dataclass(frozen=True)
class Schedule:
    """A sampling run's table: T transitions."""

    sampler: str
    """Name of the kernel, and how it is scored where that is a choice."""
    times: Tensor  # [T + 1]
    std: Tensor  # [T]; 0 = deterministic
    guidance_scale: Tensor  # [T]; 1 = no guidance
    log_prob_unit: LogProbUnit


@dataclass(frozen=True)
class Transition:
    """One step down the schedule for b rows; its mean is `carried + predicted`."""

    sampler: str
    carried: Tensor  # [b, ...] float32: the mean's part of x, on which the model has no say
    predicted: Tensor  # [b, ...] float32: the mean's part of the denoiser's output
    std: Tensor  # [b]
    prediction: Tensor  # [b, ...] float32: the denoiser's output, guided
    features: Tensor | None = None  # [b, D] float32

    @property
    def mean(self) -> Tensor:
        """[b, ...] float32."""
        return self.carried + self.predicted

    def log_prob(self, following: Tensor, unit: LogProbUnit) -> Tensor:
        """[b] float32, of the latents after the step, as the sampler scores them.

        The mean's parts are subtracted one by one: their sum would be rounded at the size of x, many times the std.
        """
        target = following - self.carried
        if self.sampler == "cps_unnormalised":
            return samplers.unnormalised_log_prob(target, self.predicted, unit)
        return samplers.gaussian_log_prob(target, self.predicted, self.std, unit)


class NoiseProcess(ABC):
    """The forward process of a model: its own `times` [T + 1], from pure noise to data, and what they stand for."""

    default_sampler: Sampler
    sampler_types: tuple[str, ...]

    @abstractmethod
    def __init__(self, scheduler: Mapping[str, Any]) -> None:
        """`scheduler` is the configuration of the pipeline's scheduler; UserError if it is of another process."""

    @abstractmethod
    def times(self, sampling: DenoisingSampling, sequence_length: int) -> Tensor:
        """[T + 1] float32, the schedule of `sampling`; `sequence_length` is the number of the denoiser's tokens."""

    @abstractmethod
    def model_times(self, times: Tensor) -> Tensor:
        """What the denoiser is given for `times`."""

    @abstractmethod
    def time_at(self, share: Tensor) -> Tensor:
        """The time (float32, as in `times`) at a share in (0, 1] of the process's own clock; 1 is the noisy end."""

    @abstractmethod
    def step_size(self, time: Tensor, next_time: Tensor) -> Tensor:
        """[B] > 0: the share of the process's own clock that the transition `time` -> `next_time` [B] passes."""

    @abstractmethod
    def noise_levels(self, times: Tensor) -> Tensor:
        """The factor of the noise in x at `times`: 1 is pure noise, 0 is data."""

    @abstractmethod
    def std(self, times: Tensor, sampler: Sampler) -> Tensor:
        """[T] noise std of each transition of a schedule `times` [T + 1]; 0 where it is deterministic."""

    @abstractmethod
    def coefficients(self, sampler: str, time: Tensor, next_time: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Factors [B] of x and of the denoiser's output in the mean of the transition `time` -> `next_time` [B]."""

    @abstractmethod
    def clean(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
        """The clean latent that the denoiser's output implies."""

    @abstractmethod
    def noised(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """x at `time` [B]."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What a perfect denoiser outputs for `noised(clean, noise, time)`."""

    @abstractmethod
    def oracle(self, x: Tensor, clean: Tensor, time: Tensor) -> Tensor:
        """What a denoiser that knows the clean latent outputs at x."""

    def step(
        self, sampler: str, x: Tensor, prediction: Tensor, time: Tensor, next_time: Tensor, std: Tensor
    ) -> Transition:
        """The transition `time` -> `next_time` [B] with noise `std` [B] of latents x [B, ...]; differentiable."""
        on_x, on_prediction = self.coefficients(sampler, time, next_time, std)
        predicted = expand(on_prediction, x) * prediction
        return Transition(sampler, expand(on_x, x) * x.float(), predicted, std, prediction)

    def schedule(self, sampling: DenoisingSampling, sequence_length: int, key: SampleKey = FIRST_ITERATION) -> Schedule:
        """The table of `sampling` in the iteration of `key`; UserError if its sampler, steps or window do not fit."""
        sampler = sampling.sampler or self.default_sampler
        if sampler.type not in self.sampler_types:
            raise UserError(
                f"sampling.sampler.type: {sampler.type!r} does not fit this model; allowed are "
                f"{', '.join(self.sampler_types)}."
            )
        times = self.times(sampling, sequence_length)
        std = self.std(times, sampler)
        if sampling.window is not None:
            std = self._within(sampling.window, times, std, key)
        share = torch.arange(len(std)) / len(std)
        start, end = sampling.guidance_interval
        scale = torch.where((share >= start) & (share < end), sampling.guidance_scale, 1.0)
        unit: LogProbUnit = sampling.log_prob_unit if std.any() else "none"
        if not (isinstance(sampler, Cps) and sampler.log_prob == "unnormalised"):
            return Schedule(sampler.type, times, std, scale, unit)
        return Schedule("cps_unnormalised", times, std, scale, _UNNORMALISED.get(unit, unit))

    def _within(self, window: Window, times: Tensor, std: Tensor, key: SampleKey) -> Tensor:
        levels = self.noise_levels(times[:-1])
        steps = window.moving.steps_at(key, std.nonzero().flatten().tolist()) if window.moving else window.steps
        low, high = steps or window.noise_levels or (0, 0)
        place = torch.arange(len(std)) if steps else levels
        inside = torch.where((place >= low) & (place <= high), std, 0.0)
        count = int((inside > 0).sum())
        if count < (high - low + 1 if window.steps else 1):
            stochastic = [(step, round(levels[step].item(), 4)) for step in range(len(std)) if std[step] > 0]
            raise UserError(
                f"sampling.window: ({low}, {high}) asks for transitions that draw no noise or do not exist; as (step, "
                f"noise level) the stochastic ones are {stochastic}."
            )
        return inside


class FlowProcess(NoiseProcess):
    """Rectified flow: times are sigmas from 1 to 0, x = (1 - sigma) x0 + sigma noise, v = noise - x0."""

    default_sampler = FlowSde()
    sampler_types = ("flow_sde", "dance_sde", "cps", "ode")

    def __init__(self, scheduler: Mapping[str, Any]) -> None:
        self.config = dict(scheduler)
        name = self.config.get("_class_name", "FlowMatchEulerDiscreteScheduler")
        self.is_euler = name == "FlowMatchEulerDiscreteScheduler"
        if not self.is_euler and not self.config.get("use_flow_sigmas"):
            raise UserError(
                f"scheduler: {name} has no flow schedule; allowed are FlowMatchEulerDiscreteScheduler and schedulers "
                "with `use_flow_sigmas: true`."
            )
        for key in ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"):
            if self.config.get(key):
                raise UserError(f"scheduler: {key} is not supported for flow models; set it to false in the folder.")
        self.num_train_timesteps = int(self.config.get("num_train_timesteps", 1000))

    def times(self, sampling: DenoisingSampling, sequence_length: int) -> Tensor:
        if sampling.shift is not None:
            return samplers.uniform_sigmas(sampling.steps, sampling.shift)
        return self.pipeline_sigmas(sampling.steps, sequence_length)

    def pipeline_sigmas(self, num_steps: int, sequence_length: int) -> Tensor:
        """[T + 1] float32: the schedule that the diffusers pipeline itself denoises with.

        FlowMatchEulerDiscreteScheduler spaces its sigmas down to an already shifted 1 / N and shifts all of them again.
        """
        dynamic = bool(self.config.get("use_dynamic_shifting"))
        shift = float(self.config.get("shift", 1.0) if self.is_euler else self.config.get("flow_shift", 1.0))
        lowest = torch.tensor(1 / self.num_train_timesteps)
        if self.is_euler:
            lowest = lowest if dynamic else samplers.shift_sigmas(lowest, shift)
            sigmas = torch.linspace(1, lowest.item(), num_steps, dtype=torch.float64)
        else:
            sigmas = torch.linspace(1, lowest.item(), num_steps + 1, dtype=torch.float64)[:-1]
        sigmas = self._shift_dynamically(sigmas, sequence_length) if dynamic else samplers.shift_sigmas(sigmas, shift)
        if terminal := self.config.get("shift_terminal"):
            sigmas = 1 - (1 - sigmas) * (1 - terminal) / (1 - sigmas[-1])
        return torch.cat([sigmas.float(), torch.zeros(1)])

    def _shift_dynamically(self, sigmas: Tensor, sequence_length: int) -> Tensor:
        low, high = self.config.get("base_image_seq_len", 256), self.config.get("max_image_seq_len", 4096)
        base, top = self.config.get("base_shift", 0.5), self.config.get("max_shift", 1.15)
        mu = base + (top - base) / (high - low) * (sequence_length - low)
        strength = mu if self.config.get("time_shift_type") == "linear" else math.exp(mu)
        return strength / (strength + (1 / sigmas - 1))

    def model_times(self, times: Tensor) -> Tensor:
        return times * self.num_train_timesteps

    def time_at(self, share: Tensor) -> Tensor:
        return share.float()

    def step_size(self, time: Tensor, next_time: Tensor) -> Tensor:
        return time - next_time

    def noise_levels(self, times: Tensor) -> Tensor:
        return times

    def std(self, times: Tensor, sampler: Sampler) -> Tensor:
        if isinstance(sampler, FlowSde):
            return samplers.flow_sde_std(times, sampler.noise_level)
        if isinstance(sampler, DanceSde):
            return samplers.dance_sde_std(times, sampler.noise_level)
        if isinstance(sampler, Cps):
            return samplers.cps_std(times, sampler.noise_level)
        return torch.zeros_like(times[1:])

    def coefficients(self, sampler: str, time: Tensor, next_time: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        kernel = samplers.cps_coefficients if sampler.startswith("cps") else samplers.flow_sde_coefficients
        return kernel(time, next_time, std)

    def clean(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
        return x - expand(time, x) * prediction

    def noised(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return expand(1 - time, clean) * clean + expand(time, clean) * noise

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return noise - clean

    def oracle(self, x: Tensor, clean: Tensor, time: Tensor) -> Tensor:
        return (x - clean) / expand(time, x)


class DiffusionProcess(NoiseProcess):
    """DDPM's variance-preserving process: times are timesteps, and -1 is the clean end of every schedule."""

    default_sampler = Ddim()
    sampler_types = ("ddim", "ode")

    def __init__(self, scheduler: Mapping[str, Any]) -> None:
        """`scheduler` is the configuration of the pipeline's scheduler, of whatever class: it is sampled with DDIM."""
        from diffusers import DDIMScheduler

        self.config = dict(scheduler)
        if "beta_schedule" not in self.config:
            raise UserError(f"scheduler: {self.config.get('_class_name')} has no beta schedule, as a UNet's must.")
        keys = ["num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas"]
        keys += ["set_alpha_to_one", "rescale_betas_zero_snr"]
        ddim: Any = DDIMScheduler(**{key: self.config[key] for key in keys if key in self.config})
        self.alphas: Tensor = torch.cat([ddim.alphas_cumprod, ddim.final_alpha_cumprod.reshape(1)])  # [-1] is the end
        self.prediction_type = str(self.config.get("prediction_type", "epsilon"))
        if self.prediction_type not in ("epsilon", "sample", "v_prediction"):
            raise UserError(
                f"scheduler: prediction_type {self.prediction_type!r}; allowed are epsilon, sample and v_prediction."
            )
        if self.prediction_type == "epsilon" and self.alphas.min() <= 0:
            raise UserError(
                "scheduler: rescale_betas_zero_snr leaves no signal to predict epsilon from; use v_prediction."
            )
        for key in ("clip_sample", "thresholding"):
            if self.config.get(key):
                warnings.warn(
                    f"the scheduler's {key} is turned off: a clipped mean is not the mean of a Gaussian transition.",
                    stacklevel=2,
                )

    @property
    def num_train_timesteps(self) -> int:
        return len(self.alphas) - 1

    def times(self, sampling: DenoisingSampling, sequence_length: int) -> Tensor:
        if sampling.shift is not None:
            raise UserError("sampling.shift: this model's schedule has no shift; only flow models have one. Remove it.")
        if sampling.steps > self.num_train_timesteps:
            raise UserError(f"sampling.steps: {sampling.steps} is more than the model's {self.num_train_timesteps}.")
        spacing = str(self.config.get("timestep_spacing", "leading"))
        offset = int(self.config.get("steps_offset", 0))
        timesteps = samplers.ddim_timesteps(sampling.steps, self.num_train_timesteps, spacing, offset)
        if timesteps[0] >= self.num_train_timesteps:
            raise UserError(f"sampling.steps: {sampling.steps} steps and steps_offset {offset} leave the schedule.")
        return torch.cat([timesteps, torch.tensor([-1])]).float()

    def _alpha(self, times: Tensor) -> Tensor:
        return self.alphas.to(times.device)[times.long()]

    def model_times(self, times: Tensor) -> Tensor:
        return times.long()

    def time_at(self, share: Tensor) -> Tensor:
        return (share * self.num_train_timesteps).ceil().float() - 1

    def step_size(self, time: Tensor, next_time: Tensor) -> Tensor:
        return (time - next_time) / self.num_train_timesteps

    def noise_levels(self, times: Tensor) -> Tensor:
        return (1 - self._alpha(times)).sqrt()

    def std(self, times: Tensor, sampler: Sampler) -> Tensor:
        return samplers.ddim_std(self._alpha(times), sampler.eta if isinstance(sampler, Ddim) else 0.0)

    def coefficients(self, sampler: str, time: Tensor, next_time: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return samplers.ddim_coefficients(self._alpha(time), self._alpha(next_time), std, self.prediction_type)

    def clean(self, x: Tensor, prediction: Tensor, time: Tensor) -> Tensor:
        return samplers.clean_and_noise(x, prediction, self._alpha(time), self.prediction_type)[0]

    def noised(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        alpha = self._alpha(time)
        return expand(alpha.sqrt(), clean) * clean + expand((1 - alpha).sqrt(), clean) * noise

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return samplers.prediction_of(clean, noise, self._alpha(time), self.prediction_type)

    def oracle(self, x: Tensor, clean: Tensor, time: Tensor) -> Tensor:
        alpha = self._alpha(time)
        noise = (x - expand(alpha.sqrt(), x) * clean) / expand((1 - alpha).sqrt(), x)
        return self.target(clean, noise, time)
