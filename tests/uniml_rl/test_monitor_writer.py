"""The writer: rows on disk and TensorBoard's events are the same figures, whatever moment the process died at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from modalities.errors import UserError
from uniml_rl.monitor.writer import MetricsWriter


def write_iterations(writer: MetricsWriter, start: int, stop: int, stage: str = "a") -> None:
    for iteration in range(start, stop):
        writer.write(stage, iteration, iteration, {"reward/mean": iteration / 3, "loss/policy": -float(iteration)})


def in_tensorboard(folder: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every scalar, in the order of writing."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]


def in_rows(folder: Path) -> list[tuple[str, int, float]]:
    return [
        (name, row["global_iteration"], value)
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        for name, value in row["metrics"].items()
        if value is not None
    ]


def assert_equal_figures(folder: Path) -> None:
    rows, events = sorted(in_rows(folder)), sorted(in_tensorboard(folder))
    assert [(tag, step) for tag, step, _ in events] == [(tag, step) for tag, step, _ in rows]
    assert [value for *_, value in events] == pytest.approx([value for *_, value in rows], rel=1e-6)


def iterations(folder: Path) -> list[tuple[str, int]]:
    return [(row["stage"], row["iteration"]) for row in MetricsWriter(folder).rows()]


def test_tensorboard_equals_the_rows(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    write_iterations(writer, 0, 5)
    assert_equal_figures(tmp_path)  # already before close: a killed process has shown everything it wrote
    writer.close()
    assert_equal_figures(tmp_path)
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[3])
    assert row.pop("time") > 1.7e9
    metrics = {"reward/mean": 1.0, "loss/policy": -3.0}
    assert row == {"stage": "a", "iteration": 3, "global_iteration": 3, "metrics": metrics}


@settings(max_examples=12, deadline=None)
@given(written=st.integers(0, 5), checkpoint=st.integers(-1, 6), torn=st.integers(0, 60))
def test_a_resumed_run_has_no_double_and_no_missing_rows(
    tmp_path_factory, written: int, checkpoint: int, torn: int
) -> None:
    """A process dies after `written` rows and in the middle of the next; the run goes on from `checkpoint`."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint = min(checkpoint, written - 1)
    first = MetricsWriter(folder)
    write_iterations(first, 0, written)
    with (folder / "metrics.jsonl").open("a") as handle:
        handle.write('{"stage": "a", "iteration": 99, "global_iteration": 99, "metrics'[:torn])
    second = MetricsWriter(folder)
    second.rewind(checkpoint)
    write_iterations(second, checkpoint + 1, 7)
    second.close()
    assert iterations(folder) == [("a", iteration) for iteration in range(7)]
    assert_equal_figures(folder)
    first.close()


def test_a_whole_last_line_without_its_newline_is_torn_too(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    write_iterations(writer, 0, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    writer = MetricsWriter(tmp_path)
    writer.rewind(2)
    assert iterations(tmp_path) == [("a", 0), ("a", 1)]
    assert_equal_figures(tmp_path)


def test_the_row_between_two_stages_is_there_once_whatever_the_checkpoint_knew(tmp_path: Path) -> None:
    """The end of stage a and the first evaluation of stage b share global iteration 2."""
    for already_evaluated in (False, True):
        folder = tmp_path / str(already_evaluated)
        writer = MetricsWriter(folder)
        write_iterations(writer, 0, 3)
        writer.write("b", 0, 2, {"eval/x/mean": 0.5})
        writer = MetricsWriter(folder)
        writer.rewind(2)
        if not already_evaluated:
            writer.write("b", 0, 2, {"eval/x/mean": 0.5})
        writer.write("b", 1, 3, {"reward/mean": 1.0})
        assert iterations(folder) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
        assert_equal_figures(folder)


def test_rows_out_of_order_and_unknown_metrics_are_errors(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    write_iterations(writer, 0, 3)
    for stage, global_iteration in (("a", 2), ("a", 1), ("b", 1)):
        with pytest.raises(ValueError, match="cannot follow"):
            writer.write(stage, 9, global_iteration, {})
    with pytest.raises(ValueError, match="'reward/men'"):
        writer.write("a", 3, 3, {"reward/men": 1.0})
    with pytest.raises(ValueError, match="rewind first"):
        write_iterations(MetricsWriter(tmp_path), 3, 4)
    assert len(writer.rows()) == 3


def test_what_is_no_number_is_null_and_leaves_valid_json(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write("a", 0, 0, {"reward/mean": float("nan"), "loss/policy": float("inf"), "kl/reference": 0.5})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["metrics"] == {"reward/mean": None, "loss/policy": None, "kl/reference": 0.5}
    assert in_tensorboard(tmp_path) == [("kl/reference", 0, 0.5)]


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    write_iterations(writer, 0, 3)
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    damaged = "".join([lines[0], lines[1][:20] + "\n", lines[2]])
    path.write_text(damaged)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2 is damaged"):
        MetricsWriter(tmp_path).rewind(1)
    assert path.read_text() == damaged
