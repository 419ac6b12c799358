"""Before and after: paired differences on held-out prompts with their 95 % intervals, and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import Tensor


@dataclass(frozen=True)
class PairedDifference:
    """One reward before and after, on the same prompts."""

    before: float  # mean over prompts of the mean over a prompt's valid samples
    after: float
    difference: float
    low: float  # ends of the 95 % t-interval of the difference; NaN with fewer than two prompts
    high: float
    prompts: int  # prompts with a valid sample before and after
    dropped: int  # the others


@dataclass(frozen=True)
class StageReport:
    """What one stage changed."""

    stage: str
    rewards: Mapping[str, PairedDifference]
    held_out: frozenset[str] = frozenset()
    """Rewards that were only measured, never trained on."""
    grids: Sequence[Path] = ()
    """Files with samples to look at."""
    notes: Sequence[str] = ()
    """Lines such as why the stage ended."""


def paired_difference(before: Tensor, after: Tensor) -> PairedDifference:
    """Compares scores [P, S] of P prompts x S samples; row p of both is the same prompt. NaN is a sample without score."""
    raise NotImplementedError


def write_report(
    folder: Path, run: str, stages: Sequence[StageReport], next_commands: Sequence[str], console: Console | None = None
) -> Path:
    """Prints the report and saves it as `report.md` in `folder`; paths in it are relative to `folder`."""
    raise NotImplementedError
