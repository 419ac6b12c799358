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
def test_every_part_has_mutants_that_parse_and_tests_that_guard_it(file: str) -> None:
    found = mutations.mutants(file)
    original = ast.unparse(ast.parse((ROOT / file).read_text()))
    assert found and mutations.test_files(file)
    for mutant in found:
        assert ast.unparse(ast.parse(mutant.source)) != original
    assert len({mutant.source for mutant in found}) >= 0.9 * len(found)


@pytest.mark.parametrize("file", EXPECTED)
def test_signs_bounds_detaches_and_denominators_are_among_them(file: str) -> None:
    words = [mutant.words for mutant in mutations.mutants(file)]
    assert set(EXPECTED[file]) <= set(words)


def test_no_part_of_an_algorithm_is_left_out() -> None:
    folder = ROOT / "uniml_rl" / "algorithms"
    parts = {str(path.relative_to(ROOT)) for path in folder.glob("*.py") if "settings" not in path.name}
    assert parts - {f"uniml_rl/algorithms/{name}.py" for name in ("__init__", "presets", "parts", "algorithm")} <= set(
        mutations.TARGETS
    )


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
