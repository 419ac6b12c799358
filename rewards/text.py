"""Rewards of text that are rules: right answers, patterns, length, repetition."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from modalities.samples import Prompt, Text
from rewards.base import Reward, RewardConfig
from rewards.diversity import ngrams, words


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


PatternString = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression of Python's `re`, checked when the configuration is read; `.` matches newlines too."""


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """The compiled pattern, or None for None."""
    return None if pattern is None else re.compile(pattern, re.DOTALL)


def extract_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The last match's first group (or the whole match), stripped; the stripped text without a pattern; None if nothing
    matches."""
    if pattern is None:
        return text.strip()
    last = deque(pattern.finditer(text), maxlen=1)
    return (last[0].group(1 if pattern.groups else 0) or "").strip() if last else None


def normalise_answer(text: str) -> str:
    """Case folded, white space collapsed, and without a full stop at the end."""
    return " ".join(text.casefold().split()).rstrip(".").rstrip()


class TextReward(Reward):
    """A reward that looks at one text at a time."""

    kinds = frozenset({"text"})

    @abstractmethod
    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """The score of one text; NaN where there is nothing to score against."""

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32."""
        scores = [self.score_text(sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)


class ExactMatchConfig(RewardConfig):
    """1 if the text's answer equals a field of the prompt's record, else 0."""

    type: Literal["exact_match"] = "exact_match"
    """Right answer or not."""
    timeout_seconds: float | None = Field(default=10.0, gt=0)
    """As for every reward; a pattern in `extract` can need very long on some texts."""
    field: str = "answer"
    """The field with the right answer, or a list of right answers. A record without it is left out, not scored 0."""
    match: Literal["whole", "contained"] = "whole"
    """`whole`: the two are equal. `contained`: the right answer stands in the text as whole words."""
    extract: PatternString | None = None
    """Regular expression whose last match is the answer (its first group, if it has one), such as
    `<answer>(.*?)</answer>` or `-?\\d+`; None takes the whole text. No match is a wrong answer."""
    strict: bool = False
    """Compare character by character. By default case, white space and a full stop at the end do not count."""

    def build(self, device: str) -> ExactMatch:
        """No model, so no device."""
        return ExactMatch(self)


class ExactMatch(TextReward):
    """See `ExactMatchConfig`."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config
        self._pattern = compile_pattern(config.extract)
        self.separate_process = config.extract is not None
        self.fields = frozenset({config.field})

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """1.0 or 0.0; NaN if the record has no right answer."""
        right = prompt.record.get(self._config.field)
        if right is None or right == []:
            return float("nan")
        answer = extract_answer(sample.text, self._pattern)
        if answer is None:
            return 0.0
        return float(any(self._matches(answer, str(one)) for one in (right if isinstance(right, list) else [right])))

    def _matches(self, answer: str, right: str) -> bool:
        if not self._config.strict:
            answer, right = normalise_answer(answer), normalise_answer(right)
        if self._config.match == "whole":
            return answer == right
        return re.search(rf"(?<!\w){re.escape(right)}(?!\w)", answer) is not None


class RegexConfig(RewardConfig):
    """1 if a regular expression matches the text, else 0; for formats that an answer must keep."""

    type: Literal["regex"] = "regex"
    """Format or keyword."""
    timeout_seconds: float | None = Field(default=10.0, gt=0)
    """As for every reward; a pattern with nested repetitions can need very long on some texts."""
    pattern: PatternString
    """The regular expression (Python's `re`; `.` matches newlines too)."""
    whole: bool = False
    """Whether it must match the whole text; otherwise anywhere in it."""

    def build(self, device: str) -> Regex:
        """No model, so no device."""
        return Regex(self)


class Regex(TextReward):
    """See `RegexConfig`."""

    separate_process = True

    def __init__(self, config: RegexConfig) -> None:
        pattern = re.compile(config.pattern, re.DOTALL)
        self._match = pattern.fullmatch if config.whole else pattern.search

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """1.0 or 0.0."""
        return float(self._match(sample.text) is not None)


class LengthConfig(RewardConfig):
    """0 within the limits, falling linearly to -1 outside: -min(1, distance to the limits / falloff).

    With `unit: tokens`, maximum L - c and falloff c this is DAPO's overlong penalty for the limit L (Yu et al. 2025).
    """

    type: Literal["length"] = "length"
    """Length limits; for a target set both limits to it."""
    unit: Literal["words", "tokens"] = "words"
    """`words`: runs of letters, digits and underscores. `tokens`: the model's own choices, an end of sequence too."""
    minimum: int | None = Field(default=None, ge=0)
    """Shortest length without penalty."""
    maximum: int | None = Field(default=None, ge=0)
    """Longest length without penalty."""
    falloff: float = Field(default=10.0, gt=0)
    """Distance from the limits at which the score reaches -1."""

    @model_validator(mode="after")
    def _has_limits(self) -> LengthConfig:
        if self.minimum is None and self.maximum is None:
            raise ValueError("a length reward needs minimum, maximum or both")
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} exceeds maximum {self.maximum}")
        return self

    def build(self, device: str) -> Length:
        """No model, so no device."""
        return Length(self)


class Length(TextReward):
    """See `LengthConfig`."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """In [-1, 0]."""
        length = sample.num_tokens if self._config.unit == "tokens" else len(words(sample.text))
        below = 0 if self._config.minimum is None else self._config.minimum - length
        above = 0 if self._config.maximum is None else length - self._config.maximum
        return -min(1.0, max(0, below, above) / self._config.falloff)


class RepetitionConfig(RewardConfig):
    """Minus the fraction of repeated n-grams of words: -(1 - distinct n-grams / n-grams), 0 for a text without n-grams.

    Words are case-folded runs of letters, digits and underscores. A text of fewer than `n` words repeats nothing; use a
    length reward beside it.
    """

    type: Literal["repetition"] = "repetition"
    """Penalty on repeated phrases."""
    n: int = Field(default=3, ge=1)
    """Words per n-gram."""

    def build(self, device: str) -> Repetition:
        """No model, so no device."""
        return Repetition(self)


class Repetition(TextReward):
    """See `RepetitionConfig`."""

    def __init__(self, config: RepetitionConfig) -> None:
        self._n = config.n

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """In (-1, 0]."""
        found = ngrams(sample.text, self._n)
        return len(set(found)) / len(found) - 1 if found else 0.0


class DistinctNConfig(RewardConfig):
    """Distinct n-grams / n-grams of words within each text (Li et al. 2016); a measure, best with weight 0.

    It cannot see that all texts are alike: `rewards.diversity.distinct_n` over a set of texts does.
    """

    type: Literal["distinct_n"] = "distinct_n"
    """Diversity within one text."""
    n: int = Field(default=2, ge=1)
    """Words per n-gram."""

    def build(self, device: str) -> DistinctN:
        """No model, so no device."""
        return DistinctN(self)


class DistinctN(TextReward):
    """See `DistinctNConfig`."""

    def __init__(self, config: DistinctNConfig) -> None:
        self._n = config.n

    def score_text(self, sample: Text, prompt: Prompt) -> float:
        """In (0, 1]; NaN for a text of fewer than n words."""
        found = ngrams(sample.text, self._n)
        return len(set(found)) / len(found) if found else float("nan")
