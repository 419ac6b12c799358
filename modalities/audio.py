"""The audio policy: MusicGen-like models, which pick a token of each codebook for every frame of a neural codec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from einops import rearrange
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    MusicgenForConditionalGeneration,
    PreTrainedTokenizerBase,
)

from modalities.base import (
    Cut,
    LogProbUnit,
    Need,
    Policy,
    PolicyConfig,
    Replay,
    Request,
    TokenSegment,
    Trajectory,
)
from modalities.causal_lm import checkpoint_layers
from modalities.codec_tokens import CodecTokenModel, Decisions, delay_pattern, delays
from modalities.errors import UserError
from modalities.lora import (
    LoraSettings,
    attach_lora,
    lora_layers,
    merged_state_dict,
    require_float32_when_trained,
    save_adapter,
)
from modalities.opening import put_trained
from modalities.samples import Audio, Sample
from modalities.segments import PADDED_PROMPTS
from modalities.sources import loading, resolve_model
from modalities.summary import PolicySummary, RowMemory, layer_activations, model_activations, sizes_of
from modalities.tokens import (
    SoftmaxSampling,
    choose_tokens,
    cuts_by_length,
    left_pad,
    require_trainable,
    uniform_draws,
)
from modalities.weights import WeightSets
from modalities.whole_models import load_model, load_tokenizer

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class CodecSampling(SoftmaxSampling):
    """How codec tokens are drawn."""

    frames: int = Field(default=250, ge=1)
    """Codec frames of a sample, that is seconds times the codec's frame rate (MusicGen: 50 per second)."""
    guidance_scale: float = Field(default=1.0, ge=1)
    """Classifier-free guidance of the logits, in rollout and replay alike: 1 is off and halves the work, 3 is what
    MusicGen was published with (Copet et al. 2023)."""


class AudioPolicyConfig(PolicyConfig):
    """A MusicGen model of transformers: text conditions a decoder of codec tokens, a codec turns them into sound."""

    type: Literal["audio"] = "audio"
    """Selects this policy."""
    model: str
    """Folder or hub id of a `MusicgenForConditionalGeneration` with its text tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the text encoder and of the decoder under an adapter. Trainable weights and the codec are always float32,
    so full fine-tuning takes no other; computing in bfloat16 is the engine's `precision`."""
    lora: LoraSettings | None = None
    """A low-rank adapter on the decoder; None trains all of its weights and the projection of the text."""
    gradient_checkpointing: bool = False
    """Compute each decoder layer's activations again in the backward pass instead of keeping them."""
    logits_chunk: int = Field(default=512, ge=1)
    """Decisions whose logits exist at the same time while log-probs are computed."""
    decoding_rows: int = Field(default=8, ge=1)
    """Rows that the codec decodes together."""
    sampling: CodecSampling = CodecSampling()
    """How sounds are drawn for training."""

    _sampling_can_be_trained = field_validator("sampling")(require_trainable)

    @model_validator(mode="after")
    def _trained_weights_are_float32(self) -> AudioPolicyConfig:
        require_float32_when_trained(self.dtype, self.lora)
        return self

    def _load(self, meta: bool) -> tuple[Any, Any]:
        source = resolve_model(self.model, kind="transformers")
        with loading(self.model):
            found = AutoConfig.from_pretrained(source).model_type
        if found != "musicgen":
            raise UserError(f"model: {self.model!r} is a {found} model; an audio policy takes a musicgen model.")
        tokenizer = load_tokenizer(AutoTokenizer, source, self.model)
        dtype = getattr(torch, self.dtype)
        return load_model(MusicgenForConditionalGeneration, source, self.model, meta=meta, dtype=dtype), tokenizer

    def build(self, name: str, device: str, seed: int) -> AudioPolicy:
        """Loads the model and its text tokenizer; a fresh adapter is initialised from `seed`."""
        model, tokenizer = self._load(meta=False)
        return AudioPolicy(name, model, tokenizer, self, torch.device(device), seed)

    def inspect(self) -> PolicySummary:
        """Counts on the meta device, from the configuration and the headers of the weights."""
        model, _ = self._load(meta=True)
        make_trainable(model, self.lora, seed=0)
        size = getattr(torch, self.dtype).itemsize
        trained = [part for name, part in model.named_children() if name not in ("text_encoder", "audio_encoder")]
        return PolicySummary(
            model=f"{self.model} ({type(model).__name__})",
            sample_kind="audio",
            decisions=[("tokens", "token")],
            offers=AudioPolicy.offers,
            weights=sizes_of(trained, size, [(model.text_encoder, size), (model.audio_encoder, 4)]),
            feature_size=model.decoder.config.hidden_size,
            sampling=self.sampling,
            rows=[self._row_memory(model.decoder.config)],
        )

    def _row_memory(self, decoder: Any) -> RowMemory:
        branches = 1 if self.sampling.guidance_scale == 1 else 2
        each = layer_activations(decoder.hidden_size, decoder.ffn_dim, cross_attention=True)
        kept = model_activations(decoder.num_hidden_layers, each, decoder.hidden_size, self.gradient_checkpointing)
        return RowMemory(
            tokens=self.sampling.frames + decoder.num_codebooks // decoder.audio_channels - 1,
            cache=branches * 2 * decoder.num_hidden_layers * decoder.hidden_size,
            rows_at_once=1 if self.sampling.fixed_shape else self.sampling.rows_per_batch,
            activations=branches * kept,
            logits=branches * self.logits_chunk * decoder.vocab_size,
        )


def make_trainable(model: MusicgenForConditionalGeneration, lora: LoraSettings | None, seed: int) -> None:
    """Freezes text encoder and codec, and attaches the adapter to the decoder or frees all of it."""
    model.requires_grad_(False)
    if lora is not None:
        attach_lora(model.decoder, lora, LORA_TARGETS, seed)
        return
    model.decoder.requires_grad_(True)
    if hasattr(model, "enc_to_dec_proj"):
        model.enc_to_dec_proj.requires_grad_(True)


@dataclass
class CodecSegment(TokenSegment):
    """Tokens of K codebooks: decision c K + k is codebook k's token in column c, which belongs to frame c - delay(k).

    Entries that the delay pattern forces are not in `length_mask`. `prompt_tokens` are those of the text encoder.
    """

    text_states: Tensor = field(  # [P, L, D]: its output, once per prompt
        default_factory=lambda: torch.empty(0, 0, 0), metadata=PADDED_PROMPTS
    )
    guidance_scale: float = 1.0


class AudioPolicy(Policy):
    """Codec-token decisions of a MusicGen decoder. Text encoder and codec are frozen."""

    sample_kind = "audio"
    offers: frozenset[Need] = frozenset({"log_prob", "entropy", "features"})
    sampling: CodecSampling

    def __init__(
        self,
        name: str,
        model: MusicgenForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        config: AudioPolicyConfig,
        device: torch.device,
        seed: int,
    ) -> None:
        self.name, self.config, self.device, self.sampling = name, config, device, config.sampling
        self.tokenizer = tokenizer
        self.dtype = getattr(torch, config.dtype)
        make_trainable(model, config.lora, seed)
        self.musicgen = model.eval()
        for part in (model.text_encoder, model.audio_encoder):
            nn.Module.to(part, device)
        put_trained(model, device)
        self.musicgen.audio_encoder.float()
        if config.gradient_checkpointing:
            checkpoint_layers(self.musicgen.decoder)
        self.model = CodecTokenModel(model, config.logits_chunk)
        self.weight_sets = WeightSets(self.trainable_modules())
        self.feature_size = model.decoder.config.hidden_size
        self.num_codebooks: int = model.decoder.num_codebooks
        self.num_channels: int = model.decoder.config.audio_channels
        self.delay = delays(self.num_codebooks, self.num_channels)

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        """See `Policy.decisions`."""
        return [("tokens", "token")]

    @torch.no_grad()
    def rollout(self, requests: Sequence[Request], sampling: CodecSampling | None = None) -> Trajectory:
        """See `Policy.rollout`; a temperature of 0, top_k or top_p gives rows without trained decisions.

        Raises FloatingPointError if the model gives no finite logits.
        """
        sampling = sampling or self.sampling
        rows_per_batch = 1 if sampling.fixed_shape else sampling.rows_per_batch
        prompts: dict[tuple[int, ...], int] = {}
        prompt_index = [
            prompts.setdefault(tuple(self.tokenizer(request.prompt.text).input_ids), len(prompts))
            for request in requests
        ]
        prompt_tokens, prompt_mask = left_pad([list(prompt) for prompt in prompts])
        pattern_CK = delay_pattern(sampling.frames, self.delay)
        shape = (len(requests), pattern_CK.numel())
        exists = pattern_CK.flatten().expand(shape).clone()
        segment = CodecSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.zeros(shape),
            trained_mask=exists & (sampling.why_untrainable() is None),
            length_mask=exists,
            context_mask=torch.zeros_like(exists),
            log_prob_unit="token",
            version=self.version,
            ended=["complete"] * len(requests),
            keys=[request.key for request in requests],
            tokens=torch.full(shape, self.musicgen.decoder.config.pad_token_id),
            prompt_tokens=prompt_tokens,
            prompt_mask=prompt_mask,
            prompt_index=torch.tensor(prompt_index),
            temperature=sampling.temperature or 1.0,
            text_states=self._encode_texts(prompt_tokens, prompt_mask, rows_per_batch),
            guidance_scale=sampling.guidance_scale,
        )
        for rows in torch.arange(len(requests)).split(rows_per_batch):
            self._draw(segment, rows, pattern_CK, sampling)
        if not segment.rollout_log_probs.isfinite().all():
            raise FloatingPointError(f"policy {self.name!r} gave logits that are not finite while sampling.")
        return Trajectory([segment], list(requests))

    def _encode_texts(self, tokens: Tensor, mask: Tensor, rows_per_batch: int) -> Tensor:
        """[P, L, D] on the CPU; a batch is as wide as its longest text."""
        states = torch.zeros(*tokens.shape, self.musicgen.text_encoder.config.hidden_size, dtype=self.dtype)
        for rows in torch.arange(len(tokens)).split(rows_per_batch):
            width = int(mask[rows].sum(1).max())
            inputs = (values[rows, -width:].to(self.device) for values in (tokens, mask.long()))
            output = self.musicgen.text_encoder(*inputs).last_hidden_state
            states[rows, -width:] = output.to(states)
        return states

    def _condition(self, segment: CodecSegment, rows: Tensor) -> tuple[Tensor, Tensor, float]:
        prompts = segment.prompt_index[rows]
        width = int(segment.prompt_mask[prompts].sum(1).max())
        states, mask = segment.text_states[prompts, -width:], segment.prompt_mask[prompts, -width:]
        return states.to(self.device), mask.to(self.device), segment.guidance_scale

    def _draw(self, segment: CodecSegment, rows: Tensor, pattern_CK: Tensor, sampling: CodecSampling) -> None:
        """Fills in the tokens and log-probs of some rows, column by column."""
        uniforms = uniform_draws([segment.keys[row] for row in rows], pattern_CK.numel()).to(self.device)
        condition, cache = self._condition(segment, rows), self.model.new_cache()
        pad = self.musicgen.decoder.config.pad_token_id
        column_bK = torch.full((len(rows), self.num_codebooks), pad, device=self.device)
        for start, chosen in zip(range(0, pattern_CK.numel(), self.num_codebooks), pattern_CK, strict=True):
            codebooks = chosen.nonzero()[:, 0]
            logits_bKV = self.model(column_bK[:, :, None], *condition, cache=cache)
            choice = choose_tokens(
                logits_bKV[:, codebooks].flatten(0, 1), uniforms[:, start + codebooks].flatten(), sampling
            )
            tokens = choice.tokens.view(len(rows), -1)
            column_bK = torch.full_like(column_bK, pad)
            column_bK[:, codebooks] = tokens
            segment.tokens[rows[:, None], start + codebooks] = tokens.cpu()
            segment.rollout_log_probs[rows[:, None], start + codebooks] = choice.log_probs.view_as(tokens).cpu()
            segment.near_ties += int(choice.near_ties)

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """See `Policy.replay`; [b, t] (features [b, t, D]) on the policy's device, 0 where there is no decision."""
        if not needs <= self.offers:
            raise ValueError(f"an audio policy offers {sorted(self.offers)}, not {sorted(needs - self.offers)}.")
        segment = trajectory.segments[cut.segment]
        assert isinstance(segment, CodecSegment)
        columns_bKC = rearrange(segment.tokens[cut.rows], "b (c k) -> b k c", k=self.num_codebooks)
        start = torch.full_like(columns_bKC[:, :, :1], self.musicgen.decoder.config.pad_token_id)
        exists_bt = cut.take(segment.length_mask)
        rows, steps = exists_bt.nonzero(as_tuple=True)
        rows, steps = rows.to(self.device), steps.to(self.device)
        decision = steps + (cut.steps.start or 0)
        flat = self.model(
            torch.cat([start, columns_bKC[:, :, :-1]], dim=2).to(self.device),
            *self._condition(segment, cut.rows),
            decisions=Decisions(
                rows=rows,
                columns=decision // self.num_codebooks,
                codebooks=decision % self.num_codebooks,
                tokens=cut.take(segment.tokens)[exists_bt].to(self.device),
                temperature=segment.temperature,
                needs=needs,
            ),
        )

        def spread(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            grid = values.new_zeros(*exists_bt.shape, *values.shape[1:])
            return grid.index_put((rows, steps), values)

        return Replay(log_prob=spread(flat.log_prob), entropy=spread(flat.entropy), features=spread(flat.features))

    def codes(self, segment: CodecSegment) -> list[Tensor]:
        """[K, F] int64 of each row: the codec's tokens, each codebook moved back by its delay."""
        grid_BCK = rearrange(segment.tokens, "b (c k) -> b c k", k=self.num_codebooks)
        frames_B = segment.length_mask.sum(1) // self.num_codebooks
        lags = list(enumerate(self.delay.tolist()))
        return [
            torch.stack([grid_CK[lag : lag + frames, codebook] for codebook, lag in lags])
            for grid_CK, frames in zip(grid_BCK, frames_B.tolist(), strict=True)
        ]

    @torch.no_grad()
    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        """See `Policy.decode`. Tokens have no gradient to keep."""
        if differentiable:
            raise ValueError("sound is made of discrete codec tokens: decoding it cannot be differentiable.")
        segment = trajectory.segments[-1]
        assert isinstance(segment, CodecSegment)
        rate, samples = self.musicgen.config.audio_encoder.sampling_rate, list[Sample]()
        for _, alike in groupby(self.codes(segment), key=lambda codes_KF: codes_KF.shape[1]):
            for codes_bKF in torch.stack(list(alike)).to(self.device).split(self.config.decoding_rows):
                samples += [Audio(waveform, rate) for waveform in self._sound(codes_bKF)]
        return samples

    def _sound(self, codes_bKF: Tensor) -> Tensor:
        """[b, channels, samples] on the CPU; the channels of stereo are decoded as sounds of their own."""
        channels = [self._waveforms(codes_bKF[:, first :: self.num_channels]) for first in range(self.num_channels)]
        return torch.cat(channels, dim=1).clamp(-1, 1).cpu()

    def _waveforms(self, codes_bKF: Tensor) -> Tensor:
        with torch.autocast(self.device.type, enabled=False):
            decoded = self.musicgen.audio_encoder.decode(codes_bKF[None], audio_scales=[None] * len(codes_bKF))
        waveforms: Tensor = decoded.audio_values
        return waveforms

    def trainable_modules(self) -> dict[str, nn.Module]:
        """See `Policy.trainable_modules`: the one module `model`."""
        return {"model": self.model}

    def plan(self, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """See `Policy.plan`: all decisions of a row in one cut, texts of similar length together."""
        return [
            cut
            for index, segment in enumerate(trajectory.segments)
            if segment.agent == self.name
            for cut in cuts_by_length(trajectory, index, roots, budget)
        ]

    def export(self, folder: Path) -> None:
        """See `Policy.export`: the model and the text tokenizer; the adapter, if any, in `adapter/`."""
        folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {}
        if lora_layers(self.musicgen):
            state = {"state_dict": merged_state_dict(self.musicgen)}
            save_adapter(self.musicgen.decoder, folder / "adapter")
        self.musicgen.save_pretrained(folder, **state)
        self.tokenizer.save_pretrained(folder)
