"""Before and after: paired differences on held-out prompts with their 95 % intervals, and the page that shows them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from uniml_rl.monitor.progress import make_console
from uniml_rl.monitor.tables import markdown_table

CONFIDENCE = 0.95
_HEADINGS = ("reward", "before", "after", "difference", "95 % interval", "prompts")
_EXPLANATION = (
    "Scores are raw rewards: the mean over prompts of the mean over a prompt's valid samples. The difference is paired "
    "by prompt, and its interval is Student's t-interval over the prompts' differences. *Held out* marks rewards that "
    "were only measured, never trained on."
)


@dataclass(frozen=True)
class PairedDifference:
    """One reward before and after, on the same prompts; NaN where there is nothing to compute it from."""

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
    """Compares scores [P, S_before] and [P, S_after] of P prompts; row p of both is the same prompt.

    With x_p the mean over a prompt's valid (finite) samples and d_p = after_p - before_p over the n prompts that have
    both, the interval is mean(d) ± t(0.975; n - 1) · std(d; ddof 1) / √n. In float64.
    """
    means = [_prompt_means(scores) for scores in (before, after)]
    both = means[0].isfinite() & means[1].isfinite()
    first, second = (mean[both] for mean in means)
    difference = second - first
    count = len(difference)
    half = math.nan
    if count > 1:
        half = student_quantile(CONFIDENCE, count - 1) * difference.std().item() / math.sqrt(count)
    middle = difference.mean().item()
    return PairedDifference(
        first.mean().item(), second.mean().item(), middle, middle - half, middle + half, count, len(both) - count
    )


def _prompt_means(scores: Tensor) -> Tensor:
    """[P] float64 means over the finite entries of [P, S]; NaN for a row without any."""
    valid = scores.isfinite()
    return torch.where(valid, scores.double(), 0.0).sum(dim=1) / valid.sum(dim=1)


def student_quantile(confidence: float, degrees: int) -> float:
    """t with P(|T| ≤ t) = `confidence` for Student's T with an integer number of degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_probability(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _student_probability(angle: float, degrees: int) -> float:
    """P(|T| ≤ √degrees · tan(angle)): the finite series of Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for step in range(1, degrees // 2 + 1):
        total += term
        term *= cosine**2 * ((2 * step) / (2 * step + 1) if odd else (2 * step - 1) / (2 * step))
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def write_report(
    folder: Path, run: str, stages: Sequence[StageReport], next_commands: Sequence[str], console: Console | None = None
) -> Path:
    """Prints the report and saves it as `report.md` in `folder`; the paths in it are relative to `folder`."""
    lines = [f"# {run}: before and after", "", _EXPLANATION, ""]
    for report in stages:
        lines += [f"## Stage {report.stage}", ""]
        lines += [line for note in report.notes for line in (note, "")]
        lines += [*markdown_table(_HEADINGS, _cells(report)), ""]
        for grid in report.grids:
            link = Path(os.path.relpath(grid, folder)).as_posix()
            lines += [f"{'!' if grid.suffix == '.png' else ''}[{link}](<{link}>)", ""]
    if next_commands:
        lines += ["## Next", "", "```bash", *next_commands, "```", ""]
    path = folder / "report.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    _print(console or make_console(), stages, next_commands, path)
    return path


def _print(console: Console, stages: Sequence[StageReport], next_commands: Sequence[str], path: Path) -> None:
    for report in stages:
        table = Table(title=Text(f"Stage {report.stage}: before and after"), title_justify="left")
        for column, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if column == 0 else "right")
        for cells in _cells(report):
            table.add_row(*(Text(cell) for cell in cells))
        console.print(table)
        for line in [*report.notes, *(f"samples: {grid}" for grid in report.grids)]:
            console.print(Text(line), soft_wrap=True)
    console.print(Text(f"report: {path}"), soft_wrap=True)
    if next_commands:
        console.print(Text("next:"))
        for command in next_commands:
            console.print(Text(f"  {command}"), soft_wrap=True)


def _cells(report: StageReport) -> list[list[str]]:
    """One line of the table per reward."""
    lines = []
    for name, paired in report.rewards.items():
        prompts = str(paired.prompts) + (f" ({paired.dropped} left out)" if paired.dropped else "")
        interval = "n/a" if math.isnan(paired.low) else f"{paired.low:+.4f} to {paired.high:+.4f}"
        figures = [
            _number(paired.before, ".4f"),
            _number(paired.after, ".4f"),
            _number(paired.difference, "+.4f"),
            interval,
        ]
        lines.append([name + (" (held out)" if name in report.held_out else ""), *figures, prompts])
    return lines


def _number(value: float, pattern: str) -> str:
    return "n/a" if math.isnan(value) else format(value, pattern)
