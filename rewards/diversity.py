"""How different the samples of a set are: measures that show a collapse which every single sample's reward misses."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def words(text: str) -> list[str]:
    """The text's case-folded runs of letters, digits and underscores."""
    return re.findall(r"\w+", text.casefold())


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    """The text's n-grams of words, in order."""
    found = words(text)
    return [tuple(found[start : start + n]) for start in range(len(found) - n + 1)]


def distinct_n(texts: Iterable[str], n: int) -> float:
    """Distinct n-grams / n-grams over all texts together (Li et al. 2016), in (0, 1]; NaN without any n-gram.

    It falls with the number of texts, so compare sets of equal size. No n-gram crosses from one text into the next.
    """
    found = [ngram for text in texts for ngram in ngrams(text, n)]
    return len(set(found)) / len(found) if found else float("nan")


def group_distinct_n(texts: Sequence[str], groups: Sequence[int], n: int) -> float:
    """Mean of `distinct_n` over the groups of samples of one prompt; groups without any n-gram are left out."""
    members: dict[int, list[str]] = defaultdict(list)
    for text, group in zip(texts, groups, strict=True):
        members[group].append(text)
    values = torch.tensor([distinct_n(group, n) for group in members.values()], dtype=torch.float64)
    return float(values.nanmean())


def mean_pairwise_distance(features_BD: Tensor) -> float:
    """Mean of 1 - cosine over all pairs of different rows of [B, D], in [0, 2]; NaN with fewer than two rows.

    For embeddings of any kind of sample (a scorer's image features, a text encoder's).
    """
    count = len(features_BD)
    if count < 2:
        return float("nan")
    unit_BD = torch.nn.functional.normalize(features_BD.double(), dim=-1)
    sum_of_cosines = unit_BD.sum(dim=0).square().sum() - unit_BD.square().sum()
    return float(1 - sum_of_cosines / (count * (count - 1)))
