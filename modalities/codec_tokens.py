"""The decoder of a codec-token model: columns of tokens under a delay pattern, one head per codebook, guidance."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, MusicgenForConditionalGeneration

from modalities.base import Need, Replay
from modalities.tokens import score_hidden


def delays(num_codebooks: int, num_channels: int) -> Tensor:
    """[K] int64: the columns by which each codebook lags; the channels of stereo are interleaved and lag together."""
    return torch.arange(num_codebooks) // num_channels


def delay_pattern(frames: int, delay: Tensor) -> Tensor:
    """[C, K] bool: which entries of the columns are decisions; the others are padding before and after a codebook."""
    frame = torch.arange(frames + int(delay.max()))[:, None] - delay
    return (frame >= 0) & (frame < frames)


@dataclass(frozen=True)
class Decisions:
    """Which entries of a batch of columns are scored: decision n is `tokens[n]` of `codebooks[n]`. All [N] int64."""

    rows: Tensor
    columns: Tensor
    codebooks: Tensor
    tokens: Tensor
    temperature: float
    needs: frozenset[Need]


class CodecTokenModel(nn.Module):
    """The decoder as a trunk, and one head per codebook that is applied to chosen positions, in chunks.

    Everything is computed inside `forward`, so that hooks of a sharded engine on this module see it.
    """

    def __init__(self, model: MusicgenForConditionalGeneration, logits_chunk: int) -> None:
        super().__init__()
        self.decoder = model.decoder
        self.projection = getattr(model, "enc_to_dec_proj", nn.Identity())
        self.logits_chunk = logits_chunk
        accepted = inspect.signature(self.decoder.model.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"

    def new_cache(self) -> EncoderDecoderCache:
        """An empty cache of self-attention and of the text's keys and values."""
        config = self.decoder.config
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))

    def forward(
        self,
        columns_bKC: Tensor,
        text_states: Tensor,
        text_mask: Tensor,
        guidance_scale: float,
        cache: EncoderDecoderCache | None = None,
        decisions: Decisions | None = None,
    ) -> Tensor | Replay:
        """Logits [b, K, V] of the column after the last one; with `decisions` their Replay, tensors [N] or [N, D]."""
        states = self.projection(text_states) * text_mask[..., None]
        if guidance_scale != 1:
            # Without a bias in the keys and values, a text of zeros is no text, whatever its mask.
            states, text_mask = torch.cat([states, torch.zeros_like(states)]), text_mask.repeat(2, 1)
            columns_bKC = columns_bKC.repeat(2, 1, 1)
        hidden = self.decoder.model(
            columns_bKC.flatten(0, 1),
            encoder_hidden_states=states,
            encoder_attention_mask=text_mask.long(),
            use_cache=cache is not None,
            **{self._cache_argument: cache},
        ).last_hidden_state
        width = hidden.shape[-1]
        if guidance_scale != 1:
            hidden = torch.cat(hidden.chunk(2), dim=-1)  # a row and the same row without text, side by side
        heads = [partial(self._head, head, guidance_scale) for head in self.decoder.lm_heads]
        if decisions is None:
            return torch.stack([head(hidden[:, -1]) for head in heads], dim=1)
        chosen = hidden[decisions.rows, decisions.columns]
        replay = Replay(features=chosen[:, :width] if "features" in decisions.needs else None)
        if decisions.needs & {"log_prob", "entropy"}:
            order = decisions.codebooks.argsort(stable=True)
            counts = decisions.codebooks.bincount(minlength=len(heads)).tolist()
            with_entropy = "entropy" in decisions.needs
            scores = [
                score_hidden(head, part, tokens, decisions.temperature, with_entropy, self.logits_chunk)
                for head, part, tokens in zip(
                    heads, chosen[order].split(counts), decisions.tokens[order].split(counts), strict=True
                )
            ]
            back = order.argsort()
            replay.log_prob = torch.cat([log_probs for log_probs, _ in scores])[back]
            if with_entropy:
                replay.entropy = torch.cat([entropy for _, entropy in scores if entropy is not None])[back]
        return replay

    @staticmethod
    def _head(head: nn.Module, guidance_scale: float, hidden: Tensor) -> Tensor:
        if guidance_scale == 1:
            logits: Tensor = head(hidden)
            return logits
        towards, away = (head(part).float() for part in hidden.chunk(2, dim=-1))
        return away + guidance_scale * (towards - away)
