"""A run's figures on disk: metrics.jsonl is the truth, TensorBoard's events are made from it."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from modalities.errors import UserError
from uniml_rl.monitor.vocabulary import define


class MetricsWriter:
    """Appends one row per iteration to `metrics.jsonl` and `tensorboard/` in `folder`. Only rank 0 makes one.

    A row is `{"stage", "iteration", "global_iteration", "time", "metrics"}`; `time` is in Unix seconds. It is on the
    disk when `write` returns. A value that is not finite is null in the row and absent in TensorBoard, where a row's
    step is its global iteration.
    """

    def __init__(self, folder: Path) -> None:
        """Opens nothing yet. If `folder` holds rows already, `rewind` comes before the first `write`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._events_folder = folder / "tensorboard"
        self._events: EventFileWriter | None = None
        self._rewound = not self.path.exists()
        self._last: dict[str, Any] | None = None
        self._kept: tuple[str, int] | None = None

    def rewind(self, global_iteration: int) -> None:
        """Drops the rows after `global_iteration` (-1: all) and a torn last line, and makes TensorBoard equal again.

        The last row of a stage and the next stage's first evaluation (its iteration 0) share a global iteration, so a
        row may have been kept that the run is about to write again: writing the kept last row once more is ignored.
        Raises UserError for a damaged line before the last.
        """
        rows = [row for row in self.rows() if row["global_iteration"] <= global_iteration]
        aside = self.path.with_suffix(".writing")
        with aside.open("w", encoding="utf-8") as handle:
            handle.writelines(_line(row) for row in rows)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(aside, self.path)
        self.close()
        shutil.rmtree(self._events_folder, ignore_errors=True)
        self._add_events(rows)
        self._rewound = True
        self._last = rows[-1] if rows else None
        self._kept = (rows[-1]["stage"], rows[-1]["iteration"]) if rows else None

    def write(self, stage: str, iteration: int, global_iteration: int, metrics: Mapping[str, float]) -> None:
        """Adds a row. Raises ValueError for a metric that is not in the vocabulary, a row out of order or no `rewind`.

        Global iterations rise, except that the first row of another stage may repeat the last.
        """
        for name in metrics:
            define(name)
        if self._kept == (stage, iteration):
            self._kept = None
            return
        self._check_order(stage, iteration, global_iteration)
        row = {
            "stage": stage,
            "iteration": iteration,
            "global_iteration": global_iteration,
            "time": time.time(),
            "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
        }
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(_line(row))
            handle.flush()
            os.fsync(handle.fileno())
        self._add_events([row])
        self._last, self._kept = row, None

    def rows(self) -> list[dict[str, Any]]:
        """All whole rows on the disk, oldest first. Raises UserError for a damaged line before the last."""
        if not self.path.exists():
            return []
        *lines, _torn = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{self.path}:{number} is damaged ({error.msg}): {line[:60]!r}. Repair or remove the line; the run "
                    "itself continues from its checkpoint."
                ) from None
        return rows

    def close(self) -> None:
        """Flushes and closes TensorBoard's file; `write` opens a new one."""
        if self._events is not None:
            self._events.close()
            self._events = None

    def _check_order(self, stage: str, iteration: int, global_iteration: int) -> None:
        if not self._rewound:
            raise ValueError(f"{self.path} holds rows of an earlier process; rewind first.")
        if self._last is None:
            return
        last = self._last["global_iteration"]
        if global_iteration < last or (global_iteration == last and stage == self._last["stage"]):
            raise ValueError(
                f"{self.path}: a row of stage {stage!r}, iteration {iteration} (global {global_iteration}) cannot "
                f"follow global iteration {last} of stage {self._last['stage']!r}."
            )

    def _add_events(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if self._events is None:
                self._events = EventFileWriter(str(self._events_folder))
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in row["metrics"].items()
                if value is not None
            ]
            event = Event(wall_time=row["time"], step=row["global_iteration"], summary=Summary(value=values))
            self._events.add_event(event)
        if self._events is not None:
            self._events.flush()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
