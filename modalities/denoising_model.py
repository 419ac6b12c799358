"""The model under every denoising policy: a diffusers pipeline, its denoiser, one step of it, and the decoder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modalities.attention import set_denoiser_attention
from modalities.base import Policy
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.guidance import Condition, guided_prediction, mean_over_positions, outputs_of
from modalities.lora import LoraSettings, attach_lora
from modalities.noise_process import FIRST_ITERATION, NoiseProcess, Schedule, Transition
from modalities.opening import put_trained
from modalities.pipeline_folder import export_pipeline, load_pipeline
from modalities.randomness import SampleKey
from modalities.samples import Sample
from modalities.weights import WeightSets

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
LORA_TARGETS += ["net.0.proj", "net.2"]
Value = TypeVar("Value")


class DenoisingModel(Policy):
    """A text-to-image or text-to-video diffusers pipeline whose denoiser is trained.

    Text encoders and the decoder are frozen. Latents, schedules and log-probs are float32 whatever the model's dtype.
    """

    denoiser_component: ClassVar[str]
    process_type: ClassVar[type[NoiseProcess]]
    attention_kernels: ClassVar[tuple[str, ...]] = ("xformers",)
    """What diffusers offers for this denoiser beside scaled_dot_product_attention, the fastest first."""
    reads_max_sequence_length: ClassVar[bool] = False
    """Whether the text encoder's length can be chosen."""
    settings: DenoisingSettings
    sampling: DenoisingSampling

    def __init__(self, name: str, settings: DenoisingSettings, folder: Path, device: str, seed: int) -> None:
        self.name, self.settings, self.sampling, self.folder = name, settings, settings.sampling, folder
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.storage_dtype: torch.dtype = getattr(torch, settings.storage_dtype)
        self.pipeline = load_pipeline(folder, self.dtype, settings.trust_remote_code, **self.absent_components())
        self.denoiser: nn.Module = getattr(self.pipeline, self.denoiser_component)
        self.feature_size = self.feature_size_of(self.denoiser.config)
        self.vae: Any = self.pipeline.vae
        for component in self.pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval()
                if component is not self.denoiser:
                    component.to(self.device)
        self.vae.float()
        if settings.vae_tiling:
            self.vae.enable_tiling()
        self.make_trainable(self.denoiser, settings.lora, seed)
        put_trained(self.denoiser, self.device)
        set_denoiser_attention(self.denoiser, settings.attention)
        if settings.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        self.weight_sets = WeightSets(self.trainable_modules())
        self.process = self.process_type(self.pipeline.scheduler.config)
        self.schedule(self.sampling)  # a sampler that does not fit is an error now, not at the first rollout

    @classmethod
    def make_trainable(cls, denoiser: nn.Module, lora: LoraSettings | None, seed: int) -> None:
        """Attaches the adapter, or frees every weight; layers without effect on the output stay frozen."""
        if lora is None:
            denoiser.requires_grad_(True)
        else:
            attach_lora(denoiser, lora, LORA_TARGETS, seed)
        for layer in cls.unused_layers(denoiser):
            layer.requires_grad_(False)

    # What a family supplies

    @classmethod
    def unused_layers(cls, denoiser: nn.Module) -> list[nn.Module]:
        """Layers that the denoiser computes but whose result it drops: their gradient is always zero."""
        return []

    @staticmethod
    def absent_components() -> dict[str, None]:
        """Components of the folder that are not loaded."""
        return {}

    @staticmethod
    def check_folder(folder: Path) -> None:
        """Raises UserError for a folder of this family's class that is not supported all the same."""

    @abstractmethod
    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        """Text embeddings, name -> [len(texts), ...]."""

    @abstractmethod
    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """The denoiser's raw output [b, ...]."""

    @abstractmethod
    def trunk(self) -> nn.Module:
        """The module whose output, averaged over positions, is the row's features."""

    @staticmethod
    @abstractmethod
    def feature_size_of(denoiser: Any) -> int:
        """Channels of the trunk's output, from the denoiser's configuration."""

    @staticmethod
    @abstractmethod
    def latent_shape_of(sampling: DenoisingSampling, denoiser: Any, vae: Any) -> tuple[int, ...]:
        """Shape of one sample's latent, from the configurations; UserError if the size in pixels does not fit."""

    @staticmethod
    @abstractmethod
    def sequence_length(shape: tuple[int, ...], denoiser: Any) -> int:
        """Number of the denoiser's tokens for a latent of that shape, which some schedules depend on."""

    @classmethod
    @abstractmethod
    def activations(cls, denoiser: Any, shape: tuple[int, ...], settings: DenoisingSettings) -> int:
        """Values that one step of one row keeps for the backward pass, roughly, without guidance."""

    @abstractmethod
    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        """VAE decoding: latents [b, ...] float32 -> pixels in [-1, 1], not yet clamped."""

    @abstractmethod
    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        """VAE encoding, the mean of its posterior: [b, ...] float32; samples take the policy's size (`cover`)."""

    @abstractmethod
    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        """Pixels [b, ...] in [0, 1] as samples: uint8, or float with the gradient if `differentiable`."""

    # The schedule

    @classmethod
    def schedule_of(
        cls,
        sampling: DenoisingSampling,
        process: NoiseProcess,
        denoiser: Any,
        vae: Any,
        key: SampleKey = FIRST_ITERATION,
    ) -> Schedule:
        """The table of `sampling`, from configurations; UserError if its sampler, window or size does not fit."""
        shape = cls.latent_shape_of(sampling, denoiser, vae)
        return process.schedule(sampling, cls.sequence_length(shape, denoiser), key)

    def schedule(self, sampling: DenoisingSampling, key: SampleKey = FIRST_ITERATION) -> Schedule:
        """The table of `sampling` for this model in the iteration of `key`; UserError if it does not fit."""
        return self.schedule_of(sampling, self.process, self.denoiser.config, self.vae.config, key)

    def latent_shape(self, sampling: DenoisingSampling) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        return self.latent_shape_of(sampling, self.denoiser.config, self.vae.config)

    # One step, shared by rollout, replay, forward-process losses and reward backpropagation

    def predict(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """The guided output of the denoiser [b, ...] float32 for latents [b, ...] at `times` [b] of the process."""
        return self._predict(latents, times, condition, with_features=False)[0]

    def transition(
        self,
        latents: Tensor,
        times: Tensor,
        next_times: Tensor,
        std: Tensor,
        sampler: str,
        condition: Condition,
        with_features: bool = False,
    ) -> Transition:
        """The step `times` -> `next_times` [b] with noise `std` [b] of the kernel `sampler`; differentiable."""
        prediction, features = self._predict(latents, times, condition, with_features)
        return replace(self.process.step(sampler, latents, prediction, times, next_times, std), features=features)

    def _predict(
        self, latents: Tensor, times: Tensor, condition: Condition, with_features: bool
    ) -> tuple[Tensor, Tensor | None]:
        with outputs_of(self.trunk(), wanted=with_features) as outputs:
            prediction = guided_prediction(self._call, latents, times, condition, self.settings.guidance_gradient)
        # The rows without the negative branch are the last ones of the last call.
        return prediction, mean_over_positions(outputs[-1][-len(latents) :]) if with_features else None

    def _call(self, latents: Tensor, times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        embeddings = {key: value.to(self.dtype) for key, value in embeddings.items()}
        return self.denoise(latents.to(self.dtype), self.process.model_times(times), embeddings).float()

    def recomputed(self, function: Callable[..., Value]) -> Callable[..., Value]:
        """The function, computed again in the backward pass where there is one and `gradient_checkpointing` is set."""
        if not (torch.is_grad_enabled() and self.settings.gradient_checkpointing):
            return function
        return partial(checkpoint, function, use_reentrant=False)

    # Decoding and weights

    def decode_latents(self, latents: Tensor, differentiable: bool = False) -> Tensor:
        """Latents [b, ...] -> pixels [b, ...] float32 in [0, 1] on the device; `differentiable` keeps the gradient.

        Raises FloatingPointError for pixels that are not finite.
        """
        with torch.set_grad_enabled(differentiable), torch.autocast(self.device.type, enabled=False):
            latents = latents.to(self.device).float()
            pixels = self.recomputed(self.pixels_from_latents)(latents)
            if not pixels.isfinite().all():
                raise FloatingPointError(f"policy {self.name!r}: the decoder made pixels that are not finite.")
            return (pixels / 2 + 0.5).clamp(0, 1)

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def export(self, folder: Path) -> None:
        export_pipeline(self.folder, folder, self.denoiser_component, self.denoiser)
