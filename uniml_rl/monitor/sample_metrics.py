"""What can be said of samples and of how they were made, without a reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modalities.base import TokenSegment, Trajectory
from modalities.samples import Sample, Text
from uniml_rl.monitor.metrics import Metrics


def measure_samples(metrics: Metrics, samples: Sequence[Sample], groups: Sequence[int]) -> None:
    """Adds length, finished share and distinct-n of the texts among `samples` to `metrics`.

    `groups[i]` is the group of sample i; texts of one group are compared with one another, so that a policy which
    answers each prompt always alike is seen as well as one that repeats itself within an answer.
    """
    texts: dict[int, list[str]] = {}
    found = [(sample, group) for sample, group in zip(samples, groups, strict=True) if isinstance(sample, Text)]
    if found:
        metrics.mean("text/length_mean", [sample.num_tokens for sample, _ in found])
        metrics.share("text/finished_share", [sample.finished for sample, _ in found])
    for sample, group in found:
        texts.setdefault(group, []).append(sample.text)
    for group_texts in texts.values():
        for size in (1, 2):
            share = distinct_share(group_texts, size)
            if share is not None:
                metrics.mean(f"text/distinct_{size}", share)


def measure_rollout(metrics: Metrics, trajectory: Trajectory) -> None:
    """Adds the near-ties of token draws to `metrics`."""
    for segment in trajectory.segments:
        if isinstance(segment, TokenSegment):
            metrics.sum("rollout/near_ties", segment.near_ties)


def distinct_share(texts: Iterable[str], size: int) -> float | None:
    """Different n-grams of `size` words over all n-grams of the texts (distinct-n, Li et al. 2016); None without any.

    Words are split at white space and lower-cased; an n-gram never spans two texts.
    """
    grams = []
    for text in texts:
        words = text.lower().split()
        grams += [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(grams)) / len(grams) if grams else None
