"""What every latent image family shares: sizes in pixels, the VAE, images as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from modalities.denoising import DenoisingPolicy
from modalities.denoising_settings import DenoisingSampling
from modalities.errors import UserError
from modalities.samples import Image, Sample


class LatentImagePolicy(DenoisingPolicy):
    """Latents [C, H, W] of an AutoencoderKL, one latent pixel per `vae_scale_factor` pixels."""

    sample_kind = "image"
    config_patch_size: ClassVar[bool] = False

    def _denoiser_config(self) -> Any:
        return self.denoiser.config  # type: ignore[union-attr]

    def _patch_size(self) -> int:
        return int(self._denoiser_config().patch_size) if self.config_patch_size else 1

    def latent_shape(self, sampling: DenoisingSampling) -> tuple[int, ...]:
        config, factor = self._denoiser_config(), int(self.pipeline.vae_scale_factor)
        own = config.sample_size
        own_height, own_width = (own, own) if isinstance(own, int) else own
        height = sampling.height or own_height * factor
        width = sampling.width or own_width * factor
        unit = factor * self._patch_size()
        for key, size in (("height", height), ("width", width)):
            if size % unit:
                raise UserError(f"sampling.{key}: {size} is not a multiple of {unit}, which this model needs.")
        return (int(config.in_channels), height // factor, width // factor)

    def sequence_length(self, shape: tuple[int, ...]) -> int:
        return (shape[1] // self._patch_size()) * (shape[2] // self._patch_size())

    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        pixels: Tensor = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0)).sample
        return pixels

    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        images = [sample for sample in samples if isinstance(sample, Image)]
        if len(images) != len(samples):
            raise ValueError("an image policy encodes images only.")
        pixels = torch.stack([image.unit() for image in images]).to(self.device) * 2 - 1
        latents: Tensor = self.vae.encode(pixels).latent_dist.mode()
        return (latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        images = [Image(row) for row in pixels]  # float first: uint8 would hide a NaN
        return list(images) if differentiable else [Image(image.uint8().cpu()) for image in images]
