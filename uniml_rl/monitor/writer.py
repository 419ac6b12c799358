"""A run's figures on disk: metrics.jsonl is the truth, TensorBoard's events are made from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class MetricsWriter:
    """Appends one row per iteration to `metrics.jsonl` and `tensorboard/` in `folder`. Only rank 0 makes one.

    A row is `{"stage", "iteration", "global_iteration", "time", "metrics"}`. It is on the disk when `write` returns.
    Call `rewind` once before the first `write` when the folder may hold rows of an earlier process.
    """

    def __init__(self, folder: Path) -> None:
        raise NotImplementedError

    def rewind(self, global_iteration: int) -> None:
        """Drops the rows after `global_iteration` (-1: all) and a torn last line, and makes TensorBoard equal again.

        The row at the end of a stage and the one of the next stage's first evaluation (iteration 0) share a global
        iteration. Both stay; writing the one that stayed last once more is then no second row.
        """
        raise NotImplementedError

    def write(self, stage: str, iteration: int, global_iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds a row. Raises ValueError for a metric that is not in the vocabulary, or a row out of order."""
        raise NotImplementedError

    def rows(self) -> list[dict]:
        """All rows on disk, oldest first."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the files."""
        raise NotImplementedError
