"""The `type: image` policy block: any supported text-to-image pipeline folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from modalities.denoising import DenoisingPolicy
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.image.stable_diffusion import StableDiffusionPolicy
from modalities.image.stable_diffusion_3 import StableDiffusion3Policy
from modalities.pipeline_folder import count_parameters, pipeline_class, pipeline_folder

FAMILIES: dict[str, type[DenoisingPolicy]] = {
    "StableDiffusionPipeline": StableDiffusionPolicy,
    "StableDiffusion3Pipeline": StableDiffusion3Policy,
}


class ImagePolicyConfig(DenoisingSettings):
    """A text-to-image diffusers pipeline: Stable Diffusion 1.x/2.x (UNet) or Stable Diffusion 3 (flow transformer)."""

    type: Literal["image"] = "image"
    """Selects this policy."""
    sampling: DenoisingSampling = DenoisingSampling()
    """How samples are drawn in training."""

    def _family(self) -> tuple[type[DenoisingPolicy], Path]:
        folder = pipeline_folder(self.model)
        return FAMILIES[pipeline_class(folder, FAMILIES)], folder

    def build(self, name: str, device: str, seed: int) -> DenoisingPolicy:
        """The policy; the class in the folder's model_index.json chooses its family. UserError if none fits."""
        family, folder = self._family()
        return family(name, self, self.sampling, folder, device, seed)

    def inspect(self) -> dict[str, int]:
        """`{"total": ..., "trainable": ...}` parameters, without loading a weight."""
        family, folder = self._family()
        return count_parameters(folder, family.denoiser_component, self.lora, family.lora_targets)
