"""Wan 2.1: a flow transformer over [C, F, H, W] latents, with one T5 text encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from modalities.denoising import DenoisingPolicy
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.errors import UserError
from modalities.noise_process import FlowProcess
from modalities.pipeline_folder import read_index
from modalities.samples import Sample, Video, cover
from modalities.summary import layer_activations, model_activations

if TYPE_CHECKING:
    from modalities.video.config import VideoPolicyConfig, VideoSampling

DEFAULT_HEIGHT, DEFAULT_WIDTH = 480, 832  # the pipeline's own


class WanPolicy(DenoisingPolicy):
    """A `WanPipeline` folder with one transformer (Wan 2.1). Sampled by its flow, not by a multistep scheduler."""

    sample_kind = "video"
    denoiser_component = "transformer"
    process_type = FlowProcess
    attention_kernels = ("flash_attention_2", "xformers")
    reads_max_sequence_length = True

    @staticmethod
    def check_folder(folder: Path) -> None:
        index = read_index(folder)
        if (index.get("transformer_2") or [None])[0] is not None or index.get("expand_timesteps"):
            raise UserError(f"model: {str(folder)!r} is a Wan 2.2 pipeline; only the one-stage Wan 2.1 is supported.")

    @staticmethod
    def feature_size_of(denoiser: Any) -> int:
        return int(denoiser.num_attention_heads * denoiser.attention_head_dim)

    def trunk(self) -> nn.Module:
        return cast(nn.Module, self.denoiser.norm_out)

    @classmethod
    def activations(cls, denoiser: Any, shape: tuple[int, ...], settings: DenoisingSettings) -> int:
        hidden = denoiser.num_attention_heads * denoiser.attention_head_dim
        tokens = cls.sequence_length(shape, denoiser)
        texts = 512 if settings.max_sequence_length is None else settings.max_sequence_length  # the pipeline's own
        each = tokens * layer_activations(hidden, denoiser.ffn_dim, cross_attention=True) + texts * 4 * hidden
        return model_activations(denoiser.num_layers, each, tokens * hidden, settings.gradient_checkpointing)

    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        length = self.settings.max_sequence_length
        options = {} if length is None else {"max_sequence_length": length}
        embeddings, _ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, device=self.device, **options
        )
        return {"prompt_embeds": embeddings}

    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self.denoiser(
            hidden_states=latents,
            timestep=model_times,
            encoder_hidden_states=embeddings["prompt_embeds"],
            return_dict=False,
        )[0]
        return output

    @staticmethod
    def latent_shape_of(sampling: DenoisingSampling, denoiser: Any, vae: Any) -> tuple[int, ...]:
        space, time = vae.scale_factor_spatial, vae.scale_factor_temporal
        frames = cast("VideoSampling", sampling).frames
        if (frames - 1) % time:
            raise UserError(
                f"sampling.frames: {frames} is not one more than a multiple of {time}, as this model needs."
            )
        height, width = sampling.height or DEFAULT_HEIGHT, sampling.width or DEFAULT_WIDTH
        for key, size, patch in (("height", height, denoiser.patch_size[1]), ("width", width, denoiser.patch_size[2])):
            if size % (space * patch):
                raise UserError(f"sampling.{key}: {size} is not a multiple of {space * patch}, as this model needs.")
        return (denoiser.in_channels, (frames - 1) // time + 1, height // space, width // space)

    @staticmethod
    def sequence_length(shape: tuple[int, ...], denoiser: Any) -> int:
        patch = denoiser.patch_size
        return (shape[1] // patch[0]) * (shape[2] // patch[1]) * (shape[3] // patch[2])

    def _latent_statistics(self) -> tuple[Tensor, Tensor]:
        statistics = (self.vae.config.latents_mean, self.vae.config.latents_std)
        mean, std = (torch.tensor(values, device=self.device).reshape(-1, 1, 1, 1) for values in statistics)
        return mean, std

    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        mean, std = self._latent_statistics()
        pixels: Tensor = self.vae.decode(latents * std + mean).sample
        return rearrange(pixels, "b c f h w -> b f c h w")

    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        videos = [sample for sample in samples if isinstance(sample, Video)]
        if len(videos) != len(samples):
            raise ValueError("a video policy encodes videos only.")
        _, _, *latent_size = self.latent_shape(self.sampling)
        height, width = (size * self.vae.config.scale_factor_spatial for size in latent_size)
        frames = cast("VideoSampling", self.sampling).frames
        if wrong := [len(video.frames) for video in videos if len(video.frames) != frames]:
            raise UserError(f"sampling.frames: {frames}, but a given video has {wrong[0]} frames.")
        clips = torch.stack([cover(video.unit(), height, width) for video in videos])
        pixels = rearrange(clips.to(self.device), "b f c h w -> b c f h w") * 2 - 1
        mean, std = self._latent_statistics()
        latents: Tensor = (self.vae.encode(pixels).latent_dist.mode() - mean) / std
        return latents

    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        rate = cast("VideoPolicyConfig", self.settings).frames_per_second
        videos = [Video(row, rate) for row in pixels]  # float first: uint8 would hide a NaN
        return list(videos) if differentiable else [Video(video.uint8().cpu(), rate) for video in videos]
