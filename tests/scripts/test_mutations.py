"""The mutation script makes the mutants that it promises, and its verdicts are true."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "proofs"))

import mutations  # noqa: E402
from mutants import mutants  # noqa: E402

EXPECTED = {
    "uniml_rl/algorithms/value.py": ["(values - returns).square() / 2 -> (values - returns).square() * 2"],
    "uniml_rl/algorithms/surrogate.py": [
        "1 - low -> 1 + low",
        "torch.maximum(free, bounded) -> torch.minimum(free, bounded)",
    ],
    "uniml_rl/algorithms/kl.py": ["reference_log_prob.detach() -> reference_log_prob"],
    "uniml_rl/algorithms/aggregation.py": ["mask.sum(1, keepdim=True) -> mask.mean(1, keepdim=True)"],
}


@pytest.mark.parametrize("file", mutations.TARGETS)
def test_every_part_has_mutants_that_differ_from_it_and_tests_that_guard_it(file: str) -> None:
    path = ROOT / file
    original = compile(ast.parse(path.read_text()), str(path), "exec")
    found = mutants(file)
    assert found and all(Path(path).exists() for path in mutations.test_files(file))
    assert all(mutant.code != original for mutant in found)
    assert len({mutant.code for mutant in found}) >= 0.9 * len(found)


@pytest.mark.parametrize("file", EXPECTED)
def test_signs_bounds_detaches_and_denominators_are_among_them(file: str) -> None:
    words = [mutant.words for mutant in mutants(file)]
    assert set(EXPECTED[file]) <= set(words)


def test_no_part_of_an_algorithm_is_left_out() -> None:
    files = [path for folder in ("algorithms", "objectives") for path in (ROOT / "uniml_rl" / folder).glob("*.py")]
    parts = {str(path.relative_to(ROOT)) for path in files}
    assert {file for file in parts if mutants(file)} == set(mutations.TARGETS)


def test_the_page_has_a_row_for_every_part_and_no_mutant_was_missed() -> None:
    rows = mutations.rows_in(ROOT / "docs" / "mutations.md")
    assert set(rows) == set(mutations.TARGETS)
    for row in rows.values():
        total, noticed, equivalent, missed = (int(cell) for cell in row.split("|")[2:6])
        assert missed == 0 and total == noticed + equivalent


def test_what_is_called_equivalent_is_a_mutant() -> None:
    for file, words in mutations.EQUIVALENT:
        assert words in [mutant.words for mutant in mutants(file)]


def test_a_run_replaces_the_rows_of_its_files_and_keeps_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    first, second = list(mutations.TARGETS)[:2]
    for file, cells in ((second, ["3"]), (first, ["1"]), (second, ["2"])):
        mutations.write(page, file, cells)
    assert list(mutations.rows_in(page).values()) == [f"| `{first}` | 1 |", f"| `{second}` | 2 |"]


def test_a_sample_is_noticed_from_the_command_line() -> None:
    command = [
        sys.executable,
        "scripts/proofs/mutations.py",
        "--files",
        "uniml_rl/algorithms/value.py",
        "--sample",
        "2",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
