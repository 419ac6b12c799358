"""What a person sees while a run trains: bars on a terminal, one plain line per iteration elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console


class Progress:
    """Shows where the run stands. Use as a context manager on rank 0; other ranks pass `quiet=True`."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        raise NotImplementedError

    def __enter__(self) -> Progress:
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def start_stage(self, name: str, index: int, stages: int, iterations: int | None, done: int = 0) -> None:
        """A stage begins (or continues after `done` iterations); `iterations` is None if only a condition ends it."""
        raise NotImplementedError

    def activity(self, what: str) -> None:
        """What goes on right now (rollout, reward, update ...)."""
        raise NotImplementedError

    def advance(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Iteration `iteration` (from 1) of the stage is done; shows reward, KL, samples/s and the time left."""
        raise NotImplementedError

    def note(self, message: str) -> None:
        """A line that stays, above the bars."""
        raise NotImplementedError
