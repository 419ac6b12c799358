"""What a person sees while a run trains: bars on a terminal, one plain line per iteration elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich import progress
from rich.console import Console
from rich.text import Text


def make_console() -> Console:
    """A console on standard output that replaces what the output's encoding cannot express; NO_COLOR is respected."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console()


class Progress:
    """Shows where the run stands. A context manager; ranks other than 0 make it with `quiet=True`."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self._console = console or make_console()
        self._quiet = quiet
        self._bars: progress.Progress | None = None
        if not quiet and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bars = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(bar_width=20),
                progress.TextColumn("{task.fields[figures]}", markup=False),
                progress.TextColumn("{task.fields[activity]}", markup=False),
                console=self._console,
            )
        self._task: progress.TaskID | None = None
        self._stage = ""
        self._iterations: int | None = None
        self._last_advance: float | None = None
        self._durations: list[float] = []
        self._resumed = False

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start_stage(self, name: str, index: int, stages: int, iterations: int | None, done: int = 0) -> None:
        """Stage `index` (from 0) begins, or continues after `done` iterations.

        `iterations` is how many it has at most; None if only a condition ends it.
        """
        self.activity("")
        self._stage = f"{name} {index + 1}/{stages}"
        self._iterations = iterations
        self._last_advance, self._durations, self._resumed = None, [], done > 0
        if self._bars is not None:
            self._task = self._bars.add_task(
                self._stage, total=iterations, completed=done, figures=self._count(done), activity=""
            )
        else:
            self._print(f"{self._stage}: " + ("starts" if not done else f"continues after {self._count(done)}"))

    def activity(self, what: str) -> None:
        """What goes on right now (rollout, reward, update ...); shown beside the stage's bar on terminals only."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, activity=what)

    def advance(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """`iteration` iterations of the stage are done, the last with these metrics."""
        parts = [self._count(iteration), *_figures(metrics)]
        seconds_each = self._seconds_each(metrics)
        if self._iterations is not None and seconds_each is not None:
            parts.append(f"{_duration(seconds_each * (self._iterations - iteration))} left")
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=iteration, figures="  ".join(parts), activity="")
        else:
            self._print(f"{self._stage}: iteration " + "  ".join(parts))

    def note(self, message: str) -> None:
        """A line that stays, above the bars."""
        self._print(message)

    def _seconds_each(self, metrics: Mapping[str, float]) -> float | None:
        """Mean seconds of an iteration of this stage so far, with what happened between two of them.

        The first iteration after a resume starts processes and warms up; it says nothing of the others.
        """
        now = time.monotonic()
        if self._last_advance is not None:
            self._durations.append(now - self._last_advance)
        elif (
            "time/iteration" in metrics and not self._resumed
        ):  # before the first one lies the first evaluation, which does not come again
            self._durations.append(metrics["time/iteration"])
        self._last_advance = now
        return sum(self._durations) / len(self._durations) if self._durations else None

    def _count(self, iteration: int) -> str:
        return str(iteration) if self._iterations is None else f"{iteration}/{self._iterations}"

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(Text(line), soft_wrap=True)


_SHOWN = {
    "reward/mean": "reward {:.4g}",
    "supervised/log_prob": "log-prob {:.4g}",
    "preference/accuracy": "accuracy {:.0%}",
    "kl/reference": "KL {:.3g}",
    "throughput/samples_per_second": "{:.3g} samples/s",
}


def _figures(metrics: Mapping[str, float]) -> list[str]:
    """The iteration's main figures, and whatever went wrong in it."""
    shown = [pattern.format(metrics[name]) for name, pattern in _SHOWN.items() if name in metrics]
    for name, value in metrics.items():
        if name.startswith("nonfinite/"):
            shown.append(f"{value:.0f} non-finite in {name.removeprefix('nonfinite/')}")
        elif name.startswith("reward/") and name.endswith("/failures") and value:
            shown.append(f"{value:.0f} failures of {name.split('/')[1]}")
        elif name == "gradient/skipped_steps" and value:
            shown.append(f"{value:.0f} steps skipped")
    return shown


def _duration(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
