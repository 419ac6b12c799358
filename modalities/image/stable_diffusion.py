"""Stable Diffusion 1.x and 2.x: a UNet that predicts epsilon, v or the clean latent, with one CLIP text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modalities.denoising_settings import DenoisingSettings
from modalities.errors import UserError
from modalities.image.base import LatentImagePolicy
from modalities.noise_process import DiffusionProcess
from modalities.pipeline_folder import component_config
from modalities.summary import model_activations


class StableDiffusionPolicy(LatentImagePolicy):
    """A `StableDiffusionPipeline` folder, sampled with DDIM whatever scheduler it names. No safety checker is run."""

    denoiser_component = "unet"
    process_type = DiffusionProcess

    @staticmethod
    def check_folder(folder: Path) -> None:
        if component_config(folder, "unet").get("time_cond_proj_dim") is not None:
            raise UserError(f"model: the UNet of {str(folder)!r} is distilled for a guidance input: unsupported.")

    @staticmethod
    def absent_components() -> dict[str, None]:
        return {"safety_checker": None, "feature_extractor": None, "image_encoder": None}

    @classmethod
    def activations(cls, denoiser: Any, shape: tuple[int, ...], settings: DenoisingSettings) -> int:
        widths, per_level = denoiser.block_out_channels, denoiser.layers_per_block
        blocks = per_level * 2 + 1 if isinstance(per_level, int) else 2 * max(per_level) + 1
        # A block is a residual one and its attention; 40 values per channel and latent pixel are what they keep.
        between = sum(shape[1] * shape[2] // 4**level * width for level, width in enumerate(widths))
        each = 40 * between // len(widths)
        return model_activations(blocks * len(widths), each, between // len(widths), settings.gradient_checkpointing)

    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        prompt_embeds, _ = self.pipeline.encode_prompt(texts, self.device, 1, do_classifier_free_guidance=False)
        return {"prompt_embeds": prompt_embeds}

    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self.denoiser(
            latents, model_times, encoder_hidden_states=embeddings["prompt_embeds"], return_dict=False
        )[0]
        return output

    @staticmethod
    def feature_size_of(denoiser: Any) -> int:
        return int(denoiser.block_out_channels[-1])

    def trunk(self) -> nn.Module:
        return self.denoiser.mid_block  # type: ignore[return-value]
