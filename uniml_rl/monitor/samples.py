"""Samples for people: text tables, image grids, contact sheets of video, sound files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from modalities.samples import Prompt, Sample
from uniml_rl.monitor.metrics import Metrics


def save_samples(
    folder: Path,
    name: str,
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    scores: Mapping[str, Sequence[float]],
    title: str = "",
) -> Path:
    """Writes what one evaluation made and returns the file to look at.

    Consecutive samples with the same prompt index are one row. Text becomes `name.md`, images `name.png`, video a
    contact sheet `name.png`, sound `name.md` and one `.wav` per sample in `name/`. `scores` holds raw rewards by name, NaN for none.
    """
    raise NotImplementedError


def save_before_after(
    folder: Path,
    name: str,
    before: Sequence[Sample],
    after: Sequence[Sample],
    prompts: Sequence[Prompt],
    scores_before: Mapping[str, Sequence[float]],
    scores_after: Mapping[str, Sequence[float]],
) -> Path:
    """The same prompts and seeds before and after, side by side; files as in `save_samples`."""
    raise NotImplementedError


def log_samples(metrics: Metrics, samples: Sequence[Sample], groups: Sequence[int]) -> None:
    """Adds what can be said of samples without a reward (length, finished share, distinct-n of text) to `metrics`."""
    raise NotImplementedError
