"""Models that give a sample a number: a language model with a scalar head, and CLIP's scaled cosine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from modalities.chat import prompt_tokens
from modalities.clip import TransformersClip, load_transformers_clip
from modalities.errors import UserError
from modalities.lora import LoraSettings, attach_lora, lora_layers, merged_state_dict, save_adapter
from modalities.randomness import seeded_generator
from modalities.samples import Image, Prompt, Sample, Text
from modalities.sources import loading, resolve_model
from modalities.text import DEFAULT_LORA_TARGETS
from modalities.whole_models import load_tokenizer

LORA_TARGETS = (*DEFAULT_LORA_TARGETS, "query", "key", "value")  # and those of BERT


class ScorerInputs(NamedTuple):
    """What a scorer reads of B samples."""

    tokens: Tensor  # [B, L] int64: prompt and response, or the prompt of an image
    token_mask: Tensor  # [B, L] bool, padding on the right
    pixels: Tensor  # [B, 3, h, w] float32 as the model's processor makes them; [B, 0] for texts


class TooLongError(UserError):
    """A text has more tokens than the model reads."""


class Scorer(nn.Module, ABC):
    """A frozen or trainable model that scores samples; its dropout is off."""

    kind: Literal["text", "image"]
    model: PreTrainedModel
    reads: int | None = None
    """Tokens of prompt and sample together that it can read; None: any number."""

    @abstractmethod
    def inputs(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> ScorerInputs:
        """What `forward` reads of B samples, with the gradient to their pixels."""

    @abstractmethod
    def forward(self, inputs: ScorerInputs) -> Tensor:
        """[B] float32 scores."""

    @abstractmethod
    def adapt(self, lora: LoraSettings, seed: int) -> None:
        """Freezes all but the scalar head and adds an adapter."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes a folder that plain transformers loads, its adapter merged and also beside it."""


class TextScorer(Scorer):
    """transformers' sequence classification with one label: a scalar head on the last token of prompt and response.

    The prompt is read as a text policy reads it (in the chat template, if there is one), then the response, then the
    end token of a finished one. The last token is the last that is not the padding token: where the tokenizer pads with
    its end token, the score is read just before that.
    """

    kind = "text"

    def __init__(self, model: PreTrainedModel, tokenizer: Any, chat_template: bool | None, source: str) -> None:
        super().__init__()
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise UserError(f"model {source!r}: its tokenizer names neither a padding token nor an end token.")
            tokenizer.pad_token = tokenizer.eos_token
        if chat_template is False:
            tokenizer.chat_template = None  # in the export too, so that others read prompts as they were trained
        elif chat_template and tokenizer.chat_template is None:
            raise UserError(f"model {source!r}: chat_template is set, but the tokenizer has no chat template.")
        tokenizer.padding_side = "right"
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = tokenizer.pad_token_id
            config.use_cache = False  # with it, layers that are computed again would see their own keys twice
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.reads = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._source = source
        self._end = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), None)
        for head in heads(self.model).values():  # a float32 head on a trunk in another dtype
            head.register_forward_pre_hook(_in_own_dtype)

    def inputs(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> ScorerInputs:
        """See `Scorer.inputs`. Raises TooLongError for a text that is longer than the model reads."""
        rows = [self._tokens(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
        tokens = pad_sequence(rows, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        return ScorerInputs(tokens, mask, torch.empty(len(rows), 0))

    def _tokens(self, prompt: Prompt, sample: Sample) -> Tensor:
        if not isinstance(sample, Text):
            raise TypeError(f"a reward model of text was given a sample of {sample.kind}.")
        tokens = prompt_tokens(self.tokenizer, prompt.text, None, None, f"model {self._source!r}")
        tokens += self.tokenizer(sample.text, add_special_tokens=False).input_ids
        if sample.finished and self._end is not None:
            tokens.append(self._end)
        if not 0 < len(tokens) <= (self.reads or len(tokens)):
            raise TooLongError(
                f"model {self._source!r} reads 1 to {self.reads or 'any number of'} tokens, but prompt {prompt.index} "
                f"({prompt.text[:40]!r} ...) and its sample have {len(tokens)}; leave it out of the data."
            )
        return torch.tensor(tokens)

    def forward(self, inputs: ScorerInputs) -> Tensor:
        """See `Scorer.forward`."""
        width = int(inputs.token_mask.sum(1).max())
        tokens, mask = (value[:, :width].to(self.model.device) for value in inputs[:2])
        tokens = tokens.masked_fill(~mask, self.tokenizer.pad_token_id)  # by which the model finds the last token
        scores: Tensor = self.model(input_ids=tokens, attention_mask=mask.long()).logits[:, 0]
        return scores.float()

    def adapt(self, lora: LoraSettings, seed: int) -> None:
        """See `Scorer.adapt`."""
        attach_lora(self.model.base_model, lora, LORA_TARGETS, seed)
        for head in heads(self.model).values():
            head.float().requires_grad_(True)

    def save(self, folder: Path) -> None:
        """See `Scorer.save`; plain `AutoModelForSequenceClassification` loads it."""
        _save(self.model, folder, f"{self.model.base_model_prefix}.", heads(self.model))
        self.tokenizer.save_pretrained(folder)


class ClipScorer(Scorer):
    """CLIP's own logit: exp(logit_scale) times the cosine of image and prompt (Radford et al. 2021; PickScore)."""

    kind = "image"

    def __init__(self, clip: TransformersClip) -> None:
        super().__init__()
        self.model = clip.model
        self.clip = clip

    def inputs(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> ScorerInputs:
        """See `Scorer.inputs`; prompts are cut at the model's length."""
        images = [sample for sample in samples if isinstance(sample, Image)]
        if len(images) != len(prompts):
            raise TypeError(f"a reward model of images was given {len(images)} images for {len(prompts)} prompts.")
        tokens, mask = self.clip.tokenize([prompt.text for prompt in prompts])
        pixels = torch.stack([self.clip.preprocessing(image.unit()) for image in images])
        return ScorerInputs(tokens, mask.bool(), pixels)

    def forward(self, inputs: ScorerInputs) -> Tensor:
        """See `Scorer.forward`."""
        text_BD = self.clip.text_features(inputs.tokens, inputs.token_mask.long())
        image_BD = self.clip.image_features(inputs.pixels)
        scale = self.clip.model.logit_scale.float().exp()
        scores: Tensor = scale * (image_BD * text_BD).sum(-1)
        return scores

    def adapt(self, lora: LoraSettings, seed: int) -> None:
        """See `Scorer.adapt`; there is no head."""
        attach_lora(self.model, lora, LORA_TARGETS, seed)

    def save(self, folder: Path) -> None:
        """See `Scorer.save`; plain `CLIPModel` loads it."""
        _save(self.model, folder, "", {})
        self.clip.tokenizer.save_pretrained(folder)
        self.clip.processor.save_pretrained(folder)


def load_text_scorer(
    source: str,
    dtype: torch.dtype = torch.float32,
    *,
    head_seed: int | None = None,
    chat_template: bool | None = None,
    trust_remote_code: bool = False,
    meta: bool = False,
) -> TextScorer:
    """A scalar head on a language model or classifier from any source that `resolve_model` knows.

    `head_seed` draws the weights of a head that the model lacks, normal with variance 1 / (width + 1) (Stiennon et al.
    2020); None refuses a model without one. `meta` is that of `load_model`. Raises UserError.
    """
    folder = resolve_model(source, kind="transformers")
    tokenizer = load_tokenizer(AutoTokenizer, folder, source, trust_remote_code=trust_remote_code)
    with loading(source), _without_report():
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **({"device_map": "meta"} if meta else {}),
        )
    model, report = loaded
    lacking = {key if isinstance(key, str) else key[0] for key in (*report["missing_keys"], *report["mismatched_keys"])}
    lost = sorted(key for key in lacking if key.split(".")[0] not in heads(model))
    if lost:
        raise UserError(
            f"model {source!r} holds no weights for {len(lost)} tensors of {type(model).__name__}, for example "
            f"{lost[0]!r}; they would be random."
        )
    if lacking and head_seed is None:
        raise UserError(
            f"model {source!r} is no reward model: it holds no head with one output ({', '.join(sorted(lacking))}). "
            "Train one in a stage whose policy is a text_reward_model, and name what that exports."
        )
    generator = seeded_generator(head_seed or 0)
    for name, parameter in model.named_parameters():
        if name in lacking:
            values = torch.zeros(parameter.shape)
            if parameter.ndim > 1:
                values.normal_(std=(parameter.shape[1] + 1) ** -0.5, generator=generator)
            parameter.data.copy_(values)
    return TextScorer(model, tokenizer, chat_template, source)


def load_clip_scorer(source: str, dtype: torch.dtype = torch.float32, *, meta: bool = False) -> ClipScorer:
    """CLIP from any source that `resolve_model` knows. Raises UserError."""
    if (found := _model_type(source)) != "clip":
        raise UserError(f"model {source!r} is a {found!r} model; an image-text reward model is a CLIP model ('clip').")
    return ClipScorer(load_transformers_clip(resolve_model(source, kind="transformers"), dtype, meta=meta))


def load_scorer(source: str, dtype: torch.dtype = torch.float32) -> Scorer:
    """A trained reward model: CLIP if its configuration says so, else a language model with a scalar head."""
    return load_clip_scorer(source, dtype) if _model_type(source) == "clip" else load_text_scorer(source, dtype)


def _model_type(source: str) -> str:
    folder = resolve_model(source, kind="transformers")
    with loading(source):
        return str(AutoConfig.from_pretrained(folder).model_type)


def heads(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The parts with weights that a classifier puts on its base model, by name."""
    return {
        name: child
        for name, child in model.named_children()
        if name != model.base_model_prefix and any(True for _ in child.parameters())
    }


@contextmanager
def _without_report() -> Iterator[None]:
    """Missing and unexpected weights are judged here; transformers' table of them would only alarm."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _in_own_dtype(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dtype = next(module.parameters()).dtype
    return tuple(value.to(dtype) for value in args)


def _save(model: PreTrainedModel, folder: Path, prefix: str, whole: dict[str, nn.Module]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not lora_layers(model):
        model.save_pretrained(folder)
        return
    model.save_pretrained(folder, state_dict=merged_state_dict(model))
    save_adapter(model.base_model, folder / "adapter", prefix, whole)
