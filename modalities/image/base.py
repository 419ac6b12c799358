"""What every latent image family shares: sizes in pixels, the VAE, images as samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modalities.denoising import DenoisingPolicy
from modalities.denoising_settings import DenoisingSampling
from modalities.errors import UserError
from modalities.samples import Image, Sample, cover


class LatentImagePolicy(DenoisingPolicy):
    """Latents [C, H, W] of an AutoencoderKL, several pixels of the image per latent pixel."""

    sample_kind = "image"

    @staticmethod
    def latent_shape_of(sampling: DenoisingSampling, denoiser: Any, vae: Any) -> tuple[int, ...]:
        factor, patch = 2 ** (len(vae.block_out_channels) - 1), denoiser.get("patch_size", 1)
        own = denoiser.sample_size
        own_height, own_width = (own, own) if isinstance(own, int) else own
        largest = denoiser.get("pos_embed_max_size")
        shape = [int(denoiser.in_channels)]
        for key, asked, default in (("height", sampling.height, own_height), ("width", sampling.width, own_width)):
            size = asked or default * factor
            if size % (factor * patch):
                raise UserError(f"sampling.{key}: {size} is not a multiple of {factor * patch}, as this model needs.")
            if largest and size > largest * factor * patch:
                raise UserError(f"sampling.{key}: {size} is more than this model's {largest * factor * patch}.")
            shape.append(size // factor)
        return tuple(shape)

    @staticmethod
    def sequence_length(shape: tuple[int, ...], denoiser: Any) -> int:
        patch = denoiser.get("patch_size", 1)
        return (shape[1] // patch) * (shape[2] // patch)

    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        pixels: Tensor = self.vae.decode(latents / config.scaling_factor + (config.shift_factor or 0.0)).sample
        return pixels

    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        images = [sample for sample in samples if isinstance(sample, Image)]
        if len(images) != len(samples):
            raise ValueError("an image policy encodes images only.")
        factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        height, width = (size * factor for size in self.latent_shape(self.sampling)[1:])
        pixels = torch.cat([cover(image.unit()[None], height, width) for image in images]).to(self.device) * 2 - 1
        latents: Tensor = self.vae.encode(pixels).latent_dist.mode()
        return (latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        images = [Image(row) for row in pixels]  # float first: uint8 would hide a NaN
        return list(images) if differentiable else [Image(image.uint8().cpu()) for image in images]
