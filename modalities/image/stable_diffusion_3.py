"""Stable Diffusion 3 and 3.5: a flow transformer with two CLIP text encoders and an optional T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from modalities.image.base import LatentImagePolicy
from modalities.noise_process import FlowProcess


class StableDiffusion3Policy(LatentImagePolicy):
    """A `StableDiffusion3Pipeline` folder. Without a T5 its embeddings are zeros, as in the pipeline."""

    denoiser_component = "transformer"
    process_type = FlowProcess
    reads_max_sequence_length = True

    @classmethod
    def unused_layers(cls, denoiser: nn.Module) -> list[nn.Module]:
        last: Any = cast(Any, denoiser).transformer_blocks[-1]  # it returns no text stream, so text asks nothing
        return [last.attn.add_q_proj] if last.context_pre_only else []

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

    @property
    def feature_size(self) -> int:  # type: ignore[override]
        return int(self.denoiser.inner_dim)  # type: ignore[arg-type]

    def trunk(self) -> nn.Module:
        return self.denoiser.norm_out  # type: ignore[return-value]
