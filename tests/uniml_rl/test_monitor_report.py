"""The report: intervals as scipy computes them, and a page that no name or text can break."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from uniml_rl.monitor.report import PairedDifference, StageReport, paired_difference, student_quantile, write_report
from uniml_rl.monitor.tables import Markup, escape, markdown_table


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 63, 64, 1000, 5001])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_the_quantile_is_students(degrees: int, confidence: float) -> None:
    expected = scipy.stats.t.ppf((1 + confidence) / 2, degrees)
    assert student_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 20), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_the_interval_is_that_of_a_paired_t_test(prompts: int, first: int, second: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.randn(prompts, first, generator=generator), torch.randn(prompts, second, generator=generator)
    paired = paired_difference(before, after)
    a, b = before.double().mean(1).numpy(), after.double().mean(1).numpy()
    expected = scipy.stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (paired.low, paired.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert (paired.before, paired.after, paired.difference) == pytest.approx((a.mean(), b.mean(), (b - a).mean()))
    assert (paired.prompts, paired.dropped) == (prompts, 0)


def test_failed_samples_leave_their_prompts_mean_and_prompts_without_a_pair_are_dropped() -> None:
    nan = math.nan
    before = torch.tensor([[1.0, nan], [2.0, 2.0], [nan, nan], [4.0, 0.0]])
    after = torch.tensor([[3.0, 5.0], [2.0, 4.0], [9.0, 9.0], [nan, nan]])
    paired = paired_difference(before, after)
    assert (paired.before, paired.after, paired.difference) == (1.5, 3.5, 2.0)
    assert (paired.prompts, paired.dropped) == (2, 2)
    expected = scipy.stats.t.interval(0.95, 1, loc=2.0, scale=scipy.stats.sem([3.0, 1.0]))
    assert (paired.low, paired.high) == pytest.approx(expected)


def test_too_few_prompts_have_no_interval() -> None:
    one = paired_difference(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    assert one.difference == 1.0 and math.isnan(one.low) and math.isnan(one.high)
    none = paired_difference(torch.full((2, 1), math.nan), torch.ones(2, 1))
    assert math.isnan(none.difference) and (none.prompts, none.dropped) == (0, 2)


HOSTILE = st.text("ab |`*_<>[]\\&~#-\n\r\t\x00\x1b\u2028\xa0é中\ud800", max_size=20)


@settings(max_examples=60, deadline=None)
@given(HOSTILE, HOSTILE)
def test_no_text_breaks_a_table(first: str, second: str) -> None:
    lines = markdown_table(["a", "b"], [[first, second]])
    assert len(lines) == 3 and all(line.count("|") == 3 for line in lines)
    assert lines[2].isprintable() and not set("`*_[]") & set(lines[2]) and "<" not in lines[2].replace("<br>", "")
    "\n".join(lines).encode()


def test_escaped_text_keeps_what_it_said() -> None:
    assert escape("a|b\nc") == "a&#124;b<br>c"
    assert escape("tab\there \x1b[31m") == "tab\\there \\x1b&#91;31m"
    assert escape("x" * 2500).startswith("x" * 2000) and escape("x" * 2500).endswith("(500 characters more)")
    assert markdown_table(["a"], [[Markup("[x](y)")]])[2] == "| [x](y) |"


def report(**changes) -> StageReport:
    rewards = {
        "brevity": PairedDifference(0.1, 0.4, 0.3, 0.2, 0.4, 64, 0),
        "ju|dge [b]": PairedDifference(0.5, 0.4, -0.1, math.nan, math.nan, 1, 3),
    }
    return StageReport("text-align", rewards, held_out=frozenset({"ju|dge [b]"}), **changes)


def test_the_page_shows_every_reward_grid_and_command(tmp_path: Path) -> None:
    grids = [tmp_path / "samples" / "after.png", tmp_path / "samples" / "table.md"]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    path = write_report(
        tmp_path, "quickstart", [report(grids=grids, notes=["30 iterations"])], ["uniml-rl eval x"], console
    )
    page = path.read_text(encoding="utf-8")
    assert "| brevity | 0.1000 | 0.4000 | +0.3000 | +0.2000 to +0.4000 | 64 |" in page
    assert "| ju&#124;dge &#91;b&#93; (held out) | 0.5000 | 0.4000 | -0.1000 | n/a | 1 (3 left out) |" in page
    assert "![samples/after.png](<samples/after.png>)" in page and "\n[samples/table.md](<samples/table.md>)" in page
    assert "uniml-rl eval x" in page and "30 iterations" in page
    printed = console.export_text()
    for expected in ("ju|dge [b] (held out)", "+0.2000 to +0.4000", "uniml-rl eval x", "30 iterations", str(grids[0])):
        assert expected in printed


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_does_not_break_the_report(tmp_path: Path, width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    write_report(tmp_path, "run", [report()], ["uniml-rl eval a/very/long/path"], console)
    assert "  uniml-rl eval a/very/long/path\n" in console.export_text(), "commands are never broken over lines"
