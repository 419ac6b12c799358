"""The `type: image` policy block: any supported text-to-image pipeline folder."""

from __future__ import annotations

from typing import Literal

from modalities.denoising import Families
from modalities.denoising_settings import DenoisingSettings
from modalities.image.stable_diffusion import StableDiffusionPolicy
from modalities.image.stable_diffusion_3 import StableDiffusion3Policy


class ImagePolicyConfig(DenoisingSettings):
    """A text-to-image diffusers pipeline: Stable Diffusion 1.x/2.x (UNet) or Stable Diffusion 3 (flow transformer)."""

    type: Literal["image"] = "image"
    """Selects this policy."""

    def families(self) -> Families:
        return {
            "StableDiffusionPipeline": StableDiffusionPolicy,
            "StableDiffusion3Pipeline": StableDiffusion3Policy,
        }
