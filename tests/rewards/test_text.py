"""Rules over text, against other ways of counting and matching."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from modalities.samples import Prompt, Text
from rewards.base import RewardConfig
from rewards.text import DistinctNConfig, ExactMatchConfig, LengthConfig, RegexConfig, RepetitionConfig

SENTENCES = st.lists(st.sampled_from(["the", "cat", "dog", "The", "sat,", "on", "it's"]), max_size=12).map(" ".join)


def scores(block: RewardConfig, *texts: str, record: dict | None = None, tokens: int = 0) -> list[float]:
    samples = [Text(text, tokens, True) for text in texts]
    result = block.build("cpu").score(samples, [Prompt("p", 0, record=record or {})] * len(samples))
    assert result.dtype == torch.float32 and result.shape == (len(texts),)
    return result.tolist()


def test_exact_match_ignores_case_space_and_a_full_stop_unless_strict():
    texts = ("42", " 42.\n", "421", "The  Answer", "the answer")
    assert scores(ExactMatchConfig(), *texts, record={"answer": 42}) == [1, 1, 0, 0, 0]
    assert scores(ExactMatchConfig(), *texts, record={"answer": ["42", "The Answer"]}) == [1, 1, 0, 1, 1]
    assert scores(ExactMatchConfig(strict=True), *texts, record={"answer": "The  Answer"}) == [0, 0, 0, 1, 0]


def test_exact_match_contained_needs_whole_words():
    block = ExactMatchConfig(match="contained", field="city")
    texts = ("It is Paris.", "It is paris, of course", "Parisian", "a+b", "comparis")
    assert scores(block, *texts, record={"city": "Paris"}) == [1, 1, 0, 0, 0]
    assert scores(block, *texts, record={"city": "a+b"}) == [0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("extract", "text", "answer"),
    [
        (r"<answer>(.*?)</answer>", "<answer>1</answer> no:\n<answer>\n 2 </answer>", "2"),
        (r"-?\d+", "3 + 4 = 7, so -7", "-7"),
        (r"\\boxed\{(.*)\}", r"so \boxed{x}", "x"),
    ],
)
def test_exact_match_takes_the_last_match_of_the_pattern(extract, text, answer):
    block = ExactMatchConfig(extract=extract)
    assert scores(block, text, "nothing", record={"answer": answer}) == [1, 0]


@pytest.mark.parametrize("record", [{}, {"answer": None}, {"answer": []}])
def test_without_a_right_answer_there_is_nothing_to_score(record):
    assert all(math.isnan(score) for score in scores(ExactMatchConfig(), "42", "", record=record))


def test_regex_anywhere_or_as_a_whole():
    assert scores(RegexConfig(pattern="a.b"), "a\nb", "xaxbx", "ab") == [1, 1, 0]
    assert scores(RegexConfig(pattern="a.b", whole=True), "a\nb", "xaxbx", "a\nb\n") == [1, 0, 0]


@pytest.mark.parametrize("block", [{"pattern": "(a"}, {"pattern": "a", "extract": "x"}])
def test_a_pattern_that_does_not_compile_and_an_unknown_key_are_refused(block):
    with pytest.raises(ValidationError, match=r"not a regular expression|extract"):
        RegexConfig(**block)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(0, 40),
    minimum=st.none() | st.integers(0, 20),
    width=st.none() | st.integers(0, 10),
    falloff=st.floats(0.5, 20),
)
def test_length_is_zero_within_the_limits_and_falls_linearly_to_minus_one(length, minimum, width, falloff):
    if minimum is None and width is None:
        return
    maximum = None if width is None else (minimum or 0) + width
    block = LengthConfig(minimum=minimum, maximum=maximum, falloff=falloff)
    score = scores(block, " ".join(["word"] * length))[0]
    nearest_allowed = min(
        (allowed for allowed in range(100) if (minimum or 0) <= allowed <= (99 if maximum is None else maximum)),
        key=lambda allowed: abs(allowed - length),
    )
    assert score == pytest.approx(max(-1.0, -abs(nearest_allowed - length) / falloff), abs=1e-6)


def test_length_in_tokens_is_the_models_own_count():
    block = LengthConfig(unit="tokens", maximum=6, falloff=4)
    assert scores(block, "one two three four five six seven eight nine", tokens=6) == [0]
    assert scores(block, "", tokens=9) == [-0.75]


def test_length_needs_sensible_limits():
    with pytest.raises(ValidationError, match="minimum, maximum or both"):
        LengthConfig()
    with pytest.raises(ValidationError, match="minimum 4 exceeds maximum 3"):
        LengthConfig(minimum=4, maximum=3)


@settings(max_examples=60, deadline=None)
@given(text=SENTENCES, n=st.integers(1, 4))
def test_repetition_counts_every_ngram_but_its_first_occurrence(text, n):
    cleaned = "".join(letter if letter.isalnum() else " " for letter in text.lower()).split()
    counts = Counter(zip(*(cleaned[shift:] for shift in range(n)), strict=False))
    repeated, total = sum(count - 1 for count in counts.values()), sum(counts.values())
    assert scores(RepetitionConfig(n=n), text)[0] == pytest.approx(-repeated / total if total else 0.0, abs=1e-6)
    distinct = scores(DistinctNConfig(n=n), text)[0]
    assert math.isnan(distinct) if total == 0 else distinct == pytest.approx(len(counts) / total, abs=1e-6)


def test_a_stuck_text_scores_far_below_a_plain_one():
    stuck, plain = scores(RepetitionConfig(), "love filled " * 10, "A bright morning brings quiet joy to the old town.")
    assert stuck < -0.8 and plain == 0
