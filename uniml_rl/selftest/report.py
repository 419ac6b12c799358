"""The table of claims as a person reads it: each row is trained with several seeds and held against its bound."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from modalities.errors import UserError, did_you_mean
from uniml_rl.monitor.tables import Markup, markdown_table
from uniml_rl.selftest.claims import ROWS, Row

HEADINGS = ("row", "claim", "measured", "tolerance", "pass", "seconds")
LEGEND = (
    "measured: of the expected reward the rise, as a share of what is possible; else the distance that is left, as a "
    "share of that from the reference (0 is the answer itself). The worst of {seeds} seeds."
)
PAGE = """\
# What each algorithm optimises, proved

`uniml-rl selftest` trains every algorithm with the real trainer on small problems whose answers are known exactly: a
table of logits over all sequences of a few tokens, and a denoiser that is affine at each noise level, for Gaussian data
and a quadratic reward. This page is written by `uniml-rl selftest --markdown docs/selftest.md`.

* `raises_expected_reward`: the rise of the exact expected reward as a share of what is possible; the smallest of
  {seeds} seeds.
* The other claims name what training ends at. Measured is the distance that is left, as a share of the distance from
  the reference: sqrt(KL(answer || trained) / KL(answer || reference)), and for a denoiser that imitates the root of the
  ratio of excess errors; the largest of {seeds} seeds. 0 is the answer itself.
* A KL of each decision is another objective than the KL of the whole sample; r is the reward, A the advantage.

Why a row can claim what it does, and the settings of each, stand in
[`uniml_rl/selftest/claims.py`](../uniml_rl/selftest/claims.py).

{table}

Seconds are those of one seed on one core.
"""


@dataclass(frozen=True)
class Outcome:
    """What training a row with several seeds came to."""

    row: Row
    measured: list[float]
    """One value per seed."""
    seconds: float
    """Per seed."""

    @property
    def passed(self) -> bool:
        return all(self.row.passes(value) for value in self.measured)

    def cells(self) -> tuple[str, ...]:
        """Under `HEADINGS`."""
        row = self.row
        bound = f"{'≥' if row.target is None else '≤'} {row.bound:g}"
        worst = f"{row.worst(self.measured):.3f}"
        return (row.name, row.claim, worst, bound, "yes" if self.passed else "NO", f"{self.seconds:.1f}")


def check(row: Row, seeds: int) -> Outcome:
    """Trains a row with the seeds 0 ... `seeds` - 1."""
    started = time.perf_counter()
    measured = [row.measure(seed) for seed in range(seeds)]
    return Outcome(row, measured, (time.perf_counter() - started) / seeds)


def chosen_rows(algorithms: Sequence[str]) -> list[Row]:
    """The rows of these presets, or all. Raises UserError for a preset without a row."""
    known = list(dict.fromkeys(row.algorithm for row in ROWS))
    for name in algorithms:
        if name not in known:
            raise UserError(f"algorithm {name!r}: allowed are {', '.join(sorted(known))}{did_you_mean(name, known)}")
    return [row for row in ROWS if not algorithms or row.algorithm in algorithms]


def selftest(algorithms: Sequence[str], seeds: int, markdown: Path | None) -> list[str]:
    """Prints the table row by row, writes it if asked to, and returns the names of the rows that failed."""
    rows = chosen_rows(algorithms)
    torch.set_num_threads(1)  # tensors of a few numbers: more threads only wait for each other
    console, table = Console(), Table()
    for heading in HEADINGS:
        table.add_column(heading, overflow="fold", no_wrap=heading not in ("row", "claim"))
    outcomes = []
    with Live(table, console=console) as live:
        for row in rows:
            outcomes.append(check(row, seeds))
            name, claim, *numbers = map(escape, outcomes[-1].cells())
            words = claim.replace("_", " ")  # a line of a narrow table breaks between words
            table.add_row(name, words, *numbers, style=None if outcomes[-1].passed else "bold red")
            live.refresh()
    if not console.is_terminal:
        console.line()  # a live table ends its last line only on a terminal
    console.print(LEGEND.format(seeds=seeds), highlight=False)
    if markdown is not None:
        markdown.write_text(page(outcomes, seeds), encoding="utf-8")
    return [outcome.row.name for outcome in outcomes if not outcome.passed]


def page(outcomes: Iterable[Outcome], seeds: int) -> str:
    """The page of the docs."""
    # None of these cells holds markup, and escaped they would be hard to read in the file.
    lines = markdown_table(HEADINGS, (list(map(Markup, outcome.cells())) for outcome in outcomes))
    return PAGE.format(seeds=seeds, table="\n".join(lines))
