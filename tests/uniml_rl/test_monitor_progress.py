"""Progress: on any terminal or none, every iteration is shown and nothing fails."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from uniml_rl.monitor.progress import Progress, _duration, make_console

METRICS = {
    "reward/mean": 0.8123,
    "kl/reference": 0.01234,
    "throughput/samples_per_second": 5.25,
    "time/iteration": 30.0,
}


def show(console: Console, quiet: bool = False) -> str:
    with Progress(console, quiet) as progress:
        progress.activity("opening")
        progress.start_stage("text-align", 0, 2, iterations=3)
        progress.activity("rollout")
        for iteration in (1, 2, 3):
            progress.advance(iteration, METRICS)
        progress.note("[red]checkpoint[/red] é written")
        progress.start_stage("image-align", 1, 2, iterations=None, done=4)
        progress.advance(5, {"nonfinite/loss/policy": 2.0, "reward/judge/failures": 1.0, "gradient/skipped_steps": 1.0})
    console.file.flush()
    return console.file.getvalue() if isinstance(console.file, io.StringIO) else ""


def test_without_a_terminal_there_is_one_plain_line_per_iteration() -> None:
    lines = show(Console(file=io.StringIO(), width=20)).splitlines()
    assert lines[0] == "text-align 1/2: starts"
    assert re.fullmatch(
        r"text-align 1/2: iteration 1/3  reward 0\.8123  KL 0\.0123  5\.25 samples/s  1:00 left", lines[1]
    )
    assert lines[3].startswith("text-align 1/2: iteration 3/3") and lines[3].endswith("0:00 left")
    assert lines[4] == "[red]checkpoint[/red] é written", "a message is no markup"
    assert lines[5] == "image-align 2/2: continues after 4"
    assert lines[6] == (
        "image-align 2/2: iteration 5  2 non-finite in loss/policy  1 failures of judge  1 steps skipped"
    )
    assert len(lines) == 7


def test_stages_without_a_reward_show_what_they_raise() -> None:
    with Progress(Console(file=io.StringIO())) as progress:
        progress.start_stage("imitate", 0, 1, iterations=2)
        progress.advance(1, {"supervised/log_prob": -1.25})
        progress.advance(2, {"preference/accuracy": 0.625})
    lines = progress._console.file.getvalue().splitlines()
    assert "log-prob -1.25" in lines[1] and "accuracy 62%" in lines[2]


@pytest.mark.parametrize("width", [1, 5, 30, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_any_terminal_works(width: int, environment: dict[str, str]) -> None:
    console = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        height=10,
        _environ={"TERM": "xterm-256color", **environment},
    )
    shown = show(console)
    if environment.get("TERM") == "dumb":
        assert "\x1b" not in shown and "iteration 3/3  reward 0.8123" in shown
    if "NO_COLOR" in environment:
        assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38)[;m]", shown)
    if width == 200:
        assert "reward 0.8123" in shown


def test_quiet_ranks_print_nothing() -> None:
    assert show(Console(file=io.StringIO()), quiet=True) == ""


def test_an_output_that_knows_only_ascii_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    show(make_console())
    assert b"\\xe9 written" in written.getvalue()


def test_an_error_inside_passes_through_and_the_bars_stop() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = Progress(console)
    with pytest.raises(KeyError), progress:
        progress.start_stage("a", 0, 1, 5)
        raise KeyError
    with Progress(console):
        pass  # a second display would fail if the first were still live


def test_after_a_resume_the_time_left_waits_for_an_iteration_that_says_something() -> None:
    console = Console(file=io.StringIO(), width=200)
    with Progress(console) as progress:
        progress.start_stage("a", 0, 1, iterations=9, done=4)
        progress.advance(5, METRICS)
        progress.advance(6, METRICS)
    first, second = console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    assert "left" not in first and second.endswith("0:00 left")


def test_durations() -> None:
    assert [_duration(s) for s in (-3, 0.4, 61, 3599.6, 36061)] == ["0:00", "0:00", "1:01", "1:00:00", "10:01:01"]
