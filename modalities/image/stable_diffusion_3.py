"""Stable Diffusion 3 and 3.5: a flow transformer with two CLIP text encoders and an optional T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from modalities.denoising_settings import DenoisingSettings
from modalities.image.base import LatentImagePolicy
from modalities.noise_process import FlowProcess
from modalities.summary import layer_activations, model_activations


class StableDiffusion3Policy(LatentImagePolicy):
    """A `StableDiffusion3Pipeline` folder. Without a T5 its embeddings are zeros, as in the pipeline."""

    denoiser_component = "transformer"
    process_type = FlowProcess
    reads_max_sequence_length = True

    @classmethod
    def unused_layers(cls, denoiser: nn.Module) -> list[nn.Module]:
        last: Any = cast(Any, denoiser).transformer_blocks[-1]  # it returns no text stream, so text asks nothing
        return [last.attn.add_q_proj] if last.context_pre_only else []

    @classmethod
    def activations(cls, denoiser: Any, shape: tuple[int, ...], settings: DenoisingSettings) -> int:
        # diffusers pads the texts of CLIP to 77 tokens and those of T5 to 256
        texts = 77 + (256 if settings.max_sequence_length is None else settings.max_sequence_length)
        hidden = denoiser.num_attention_heads * denoiser.attention_head_dim
        tokens = cls.sequence_length(shape, denoiser) + texts
        each = tokens * layer_activations(hidden, 4 * hidden)
        return model_activations(denoiser.num_layers, each, tokens * hidden, settings.gradient_checkpointing)

    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        length = self.settings.max_sequence_length
        options = {} if length is None else {"max_sequence_length": length}
        prompt_embeds, _, pooled_embeds, _ = self.pipeline.encode_prompt(
            texts, None, None, device=self.device, do_classifier_free_guidance=False, **options
        )
        return {"prompt_embeds": prompt_embeds, "pooled_embeds": pooled_embeds}

    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = self.denoiser(
            hidden_states=latents,
            timestep=model_times,
            encoder_hidden_states=embeddings["prompt_embeds"],
            pooled_projections=embeddings["pooled_embeds"],
            return_dict=False,
        )[0]
        return output

    @staticmethod
    def feature_size_of(denoiser: Any) -> int:
        return int(denoiser.num_attention_heads * denoiser.attention_head_dim)

    def trunk(self) -> nn.Module:
        return self.denoiser.norm_out  # type: ignore[return-value]
