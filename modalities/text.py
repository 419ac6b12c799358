"""The text policy: any transformers causal language model, fully trained or through a low-rank adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from modalities.attention import choose_attention
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
from modalities.causal_lm import CausalTokenModel, checkpoint_layers
from modalities.chat import prompt_tokens
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
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample, Text
from modalities.sources import loading, resolve_model
from modalities.summary import PolicySummary, RowMemory, layer_activations, model_activations, sizes_of
from modalities.tensor_parallel import planned_parameters, require_plan
from modalities.token_sampler import InProcessSampler, require_room
from modalities.tokens import TokenSampling, cuts_by_length, distinct, left_pad, replay_tokens, require_trainable
from modalities.weights import WeightSets
from modalities.whole_models import load_model, load_tokenizer

DEFAULT_LORA_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"),  # Llama, Qwen, OPT ...
    *("c_attn", "c_proj", "c_fc"),  # GPT-2
    *("query_key_value", "dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX, Bloom, Falcon
    *("qkv_proj", "gate_up_proj", "fc1", "fc2"),  # Phi
)


class TextPolicyConfig(PolicyConfig):
    """A causal language model as a policy."""

    type: Literal["text"] = "text"
    """Which policy this is."""
    model: str
    """Where the model comes from: a hub id, a folder, a .gguf file, `package:NAME==VERSION#FILE` or `bundled:PATH`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the frozen weights under an adapter. Trainable weights are always float32, so full fine-tuning takes no
    other; computing in bfloat16 is the engine's `precision`."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernel. `auto` is flash-attn where it is installed, on a GPU in half precision, and otherwise the
    model's own choice, usually PyTorch's scaled_dot_product_attention. `check` prints which one it is."""
    lora: LoraSettings | None = None
    """A low-rank adapter; None trains every weight."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    chat_template: bool | None = None
    """Wrap prompts in the tokenizer's chat template; None does where it has one."""
    system_prompt: str | None = None
    """System message of the chat template."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    logits_chunk: int = Field(default=512, ge=1)
    """Decisions whose logits exist at the same time while log-probs are computed."""
    sampling: TokenSampling = TokenSampling()
    """How responses are drawn for training."""

    _sampling_can_be_trained = field_validator("sampling")(require_trainable)

    @model_validator(mode="after")
    def _keys_agree(self) -> TextPolicyConfig:
        require_float32_when_trained(self.dtype, self.lora)
        if self.system_prompt is not None and self.chat_template is False:
            raise ValueError("system_prompt needs the chat template, but chat_template is false.")
        return self

    def settled(self, device: str, precision: torch.dtype) -> TextPolicyConfig:
        """See `PolicyConfig.settled`: the attention kernel."""
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self._model_config()), None)
        is_unknown = model_class is None and self.attention != "auto"  # code of its own; transformers will say
        offered = ["flash_attention_2"] if is_unknown or getattr(model_class, "_supports_flash_attn", False) else []
        is_half = {precision, getattr(torch, self.dtype)} != {torch.float32}
        kernel = choose_attention(self.attention, offered, device, is_half, otherwise="auto")
        return self.model_copy(update={"attention": kernel})

    def build(self, name: str, device: str, seed: int) -> TextPolicy:
        """Loads the model and its tokenizer; a fresh adapter is initialised from `seed`."""
        model, tokenizer = self._load(meta=False)
        return TextPolicy(name, model, tokenizer, self, torch.device(device), seed)

    def _model_config(self) -> Any:
        source = resolve_model(self.model, kind="transformers")
        with loading(self.model):
            return AutoConfig.from_pretrained(source, trust_remote_code=self.trust_remote_code)

    def _load(self, meta: bool) -> tuple[Any, Any]:
        source = resolve_model(self.model, kind="transformers")
        code = {"trust_remote_code": self.trust_remote_code}
        kernel = {} if self.attention == "auto" else {"attn_implementation": self.attention}
        dtype = getattr(torch, self.dtype)
        tokenizer = load_tokenizer(AutoTokenizer, source, self.model, **code)
        with loading(self.model):
            config = self._model_config()
            if meta and hasattr(config, "quantization_config"):  # packed weights are read on their own device only
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(config, **kernel, **code), tokenizer
        model = load_model(AutoModelForCausalLM, source, self.model, meta=meta, dtype=dtype, **kernel, **code)
        return model, tokenizer

    def inspect(self) -> PolicySummary:
        """Counts on the meta device, from the model's configuration and the headers of its weights."""
        model, tokenizer = self._load(meta=True)
        reader = PromptReader(self, tokenizer, model)
        if self.lora is not None:
            attach_lora(model, self.lora, DEFAULT_LORA_TARGETS, seed=0)
        if self.gradient_checkpointing:
            checkpoint_layers(model)
        return PolicySummary(
            model=f"{self.model} ({type(model).__name__})",
            sample_kind="text",
            decisions=[("tokens", "token")],
            offers=TextPolicy.offers,
            weights=replace(sizes_of([model], getattr(torch, self.dtype).itemsize), planned=planned_parameters(model)),
            check_tensor_parallel=partial(require_plan, model),
            feature_size=feature_size_of(model),
            sampling=self.sampling,
            attention=model.config._attn_implementation,
            fit=reader.fit,
            fit_given=reader.read_given,
            rows=[self._row_memory(model)],
        )

    def _row_memory(self, causal_lm: PreTrainedModel) -> RowMemory:
        config: Any = causal_lm.config.get_text_config()
        hidden, heads = config.hidden_size, config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        each = layer_activations(hidden, getattr(config, "intermediate_size", None) or 4 * hidden)
        return RowMemory(
            tokens=self.sampling.max_new_tokens,
            cache=2 * config.num_hidden_layers * key_heads * head_size,
            rows_at_once=1 if self.sampling.fixed_shape else self.sampling.rows_per_batch,
            activations=model_activations(config.num_hidden_layers, each, hidden, self.gradient_checkpointing),
            logits=self.logits_chunk * config.vocab_size,
        )


def feature_size_of(causal_lm: PreTrainedModel) -> int:
    """Width of what the model's head reads."""
    return int(causal_lm.get_output_embeddings().weight.shape[1])


class PromptReader:
    """How a policy reads prompts: as token ids, in the chat template where that is on."""

    def __init__(
        self, config: TextPolicyConfig, tokenizer: PreTrainedTokenizerBase, causal_lm: PreTrainedModel
    ) -> None:
        """Raises UserError for settings that tokenizer and model cannot follow."""
        self.tokenizer = tokenizer
        self.chat_template, self.system_prompt = config.chat_template, config.system_prompt
        text_config: Any = causal_lm.config.get_text_config()
        self.vocabulary: int = causal_lm.get_output_embeddings().weight.shape[0]
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        found: set[int] = set()
        generation_config = getattr(causal_lm, "generation_config", None)
        for source in (tokenizer, generation_config, text_config):
            ids = getattr(source, "eos_token_id", None)
            found |= set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
        self.eos_token_ids: list[int] = sorted(config.sampling.eos_token_ids or found)
        if not self.eos_token_ids:
            raise UserError("the model names no end-of-sequence token; set sampling.eos_token_ids.")
        self.check_sampling(config.sampling)
        self.tokenize(Prompt("any", 0))  # a template that is missing, or refuses the system prompt, is an error now

    def check_sampling(self, sampling: TokenSampling) -> None:
        """Raises UserError for end tokens that the model cannot choose."""
        if outside := [token for token in sampling.eos_token_ids or () if not 0 <= token < self.vocabulary]:
            raise UserError(
                f"sampling.eos_token_ids: {outside} are not among the model's tokens 0 to {self.vocabulary - 1}."
            )

    def fit(self, prompts: Sequence[Prompt], sampling: TokenSampling) -> int:
        """See `PolicySummary.fit`."""
        self.check_sampling(sampling)
        sequences = [self.tokenize(prompt) for prompt in prompts]
        for prompt, ids in zip(prompts, sequences, strict=True):
            require_room(prompt, len(ids), sampling.max_new_tokens, self.max_positions)
            self._require_known(ids)
        return max(map(len, sequences), default=0)

    def read_given(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
        """The token ids of each prompt and of its given text, an end token behind a finished one.

        Raises UserError for a text that does not fit behind its prompt.
        """
        end = self.tokenizer.eos_token_id
        end = end if end in self.eos_token_ids else self.eos_token_ids[0]
        read = []
        for prompt, text in zip(prompts, samples, strict=True):
            if not isinstance(text, Text):
                raise ValueError("a text policy encodes texts only.")
            own, ids = self.tokenize(prompt), list(self.tokenizer(text.text, add_special_tokens=False).input_ids)
            ids += [end] if text.finished else []
            if not ids:
                raise ValueError("an empty text that was not finished holds no decision to encode.")
            length, most = len(own) + len(ids), self.max_positions
            if most is not None and length > most:
                raise UserError(
                    f"prompt {prompt.index} ({prompt.text[:40]!r}...) and its given text have {length} tokens, more "
                    f"than the model's {most} positions. Shorten or drop the record."
                )
            self._require_known([*own, *ids])
            read.append((own, ids))
        return read

    def _require_known(self, ids: Sequence[int]) -> None:
        if max(ids) >= self.vocabulary:
            raise UserError(
                f"the tokenizer gives token {max(ids)}, but the model has only {self.vocabulary}; the tokenizer "
                "belongs to another model."
            )

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; never empty."""
        ids = prompt_tokens(self.tokenizer, prompt.text, self.chat_template, self.system_prompt, "the model")
        start = self.tokenizer.bos_token_id
        return ids or [self.eos_token_ids[0] if start is None else start]


class TextPolicy(Policy):
    """Token decisions of a causal language model."""

    sample_kind = "text"
    offers: frozenset[Need] = frozenset({"log_prob", "entropy", "features"})

    def __init__(
        self,
        name: str,
        causal_lm: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TextPolicyConfig,
        device: torch.device,
        seed: int,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.config = config
        self.device = device
        self.sampling = config.sampling
        if config.lora is not None:
            attach_lora(causal_lm, config.lora, DEFAULT_LORA_TARGETS, seed)
        else:
            causal_lm.requires_grad_(True)
        put_trained(causal_lm, device)
        if config.gradient_checkpointing:
            checkpoint_layers(causal_lm)
        self.model = CausalTokenModel(causal_lm, config.logits_chunk).eval()
        self.weight_sets = WeightSets(self.trainable_modules())
        self.dtype = getattr(torch, config.dtype)
        self.feature_size = feature_size_of(causal_lm)
        self.reader = PromptReader(config, tokenizer, causal_lm)
        self.eos_token_ids = self.reader.eos_token_ids
        self.sampler = InProcessSampler(
            name, self.model, self.tokenize, self.eos_token_ids, device, self.reader.max_positions
        )

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, in the chat template where that is on; never empty."""
        return self.reader.tokenize(prompt)

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        """See `Policy.decisions`."""
        return [("tokens", "token")]

    def rollout(self, requests: Sequence[Request], sampling: TokenSampling | None = None) -> Trajectory:
        """See `Policy.rollout`; a temperature of 0, top_k or top_p gives rows without trained decisions."""
        return Trajectory([self.sampler.sample(requests, sampling or self.sampling)], list(requests))

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """See `Policy.replay`; [b, t] (features [b, t, D]) on the policy's device, 0 where there is no decision."""
        if not needs <= self.offers:
            raise ValueError(f"a text policy offers {sorted(self.offers)}, not {sorted(needs - self.offers)}.")
        segment = trajectory.segments[cut.segment]
        assert isinstance(segment, TokenSegment)
        return replay_tokens(self.model, segment, cut, needs, self.device)

    def encode(self, prompts: Sequence[Prompt], samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Trajectory:
        """See `Policy.encode`. An end token follows a finished text. The rollout log-probs are NaN: there was none."""
        requests = [Request(prompt, prompt.index, key) for prompt, key in zip(prompts, keys, strict=True)]
        read = self.reader.read_given(prompts, samples)
        responses = [torch.tensor(ids, dtype=torch.long) for _, ids in read]
        tokens = nn.utils.rnn.pad_sequence(responses, batch_first=True)
        exists = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in responses])[:, None]
        sequences, prompt_index = distinct([own for own, _ in read])
        prompt_tokens, prompt_mask = left_pad(sequences)
        segment = TokenSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.full(tokens.shape, torch.nan),
            trained_mask=exists,
            length_mask=exists,
            context_mask=torch.zeros_like(exists),
            log_prob_unit="token",
            version=self.version,
            ended=["eos" if isinstance(text, Text) and text.finished else "length" for text in samples],
            keys=list(keys),
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            prompt_mask=prompt_mask,
            prompt_index=torch.tensor(prompt_index),
            temperature=self.sampling.temperature,
        )
        return Trajectory([segment], requests)

    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        """See `Policy.decode`; special tokens are left out of the text. Tokens have no gradient to keep."""
        if differentiable:
            raise ValueError("text is made of discrete tokens: decoding it cannot be differentiable.")
        segment = trajectory.segments[-1]
        assert isinstance(segment, TokenSegment)
        return [
            Text(
                str(
                    self.tokenizer.decode(tokens[exists], skip_special_tokens=True, clean_up_tokenization_spaces=False)
                ),
                num_tokens=int(exists.sum()),
                finished=ended == "eos",
            )
            for tokens, exists, ended in zip(segment.tokens, segment.length_mask, segment.ended, strict=True)
        ]

    def trainable_modules(self) -> dict[str, nn.Module]:
        """See `Policy.trainable_modules`: the one module `model`."""
        return {"model": self.model}

    def plan(self, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """See `Policy.plan`: rows of similar length together, all decisions of a row in one cut."""
        return [
            cut
            for index, segment in enumerate(trajectory.segments)
            if segment.agent == self.name
            for cut in cuts_by_length(trajectory, index, roots, budget)
        ]

    def export(self, folder: Path) -> None:
        """See `Policy.export`: model, generation config and tokenizer; the adapter, if any, in `adapter/`."""
        model = self.model.causal_lm
        folder.mkdir(parents=True, exist_ok=True)
        if lora_layers(model):
            model.save_pretrained(folder, state_dict=merged_state_dict(model))
            save_adapter(model, folder / "adapter")
        else:
            model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def set_version(self, version: int) -> None:
        """See `Policy.set_version`."""
        super().set_version(version)
        self.sampler.update_weights(version, [])
