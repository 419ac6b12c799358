"""Flips signs, masks, denominators, detaches and clip bounds in the parts of the algorithms: a test must notice each.

    python scripts/proofs/mutations.py --out docs/mutations.md --stale
    python scripts/proofs/mutations.py --files uniml_rl/algorithms/kl.py --sample 5

One mutant is one changed expression of one function, put in its place in a fork of this process, which has collected
the tests. A first fork runs all tests of the chosen files and notes how long each takes and which lines it executes; a
mutant meets the tests that execute its line, the quickest first, until one fails. A mutant that no test notices is
either listed in `EQUIVALENT` with the reason why it computes the same, or a hole in the tests, and the exit code is 1.

`--out` replaces the rows of the chosen files and keeps the others. A row's digest is that of the file's code without
its comments; `--stale` chooses the files whose row is missing, has another digest or a missed mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutants import ROOT, Mutant, mutants

TESTS = ROOT / "tests" / "uniml_rl"
ALGORITHMS = "uniml_rl/algorithms"
OBJECTIVES = "uniml_rl/objectives"
SETTINGS = ("test_algorithms_settings",)
LOSSES = ("test_objective_losses", "test_objective")
TOKENS = ("test_objective_token_rows", *LOSSES, "test_what_lives_on", "test_dynamic_sampling")
DENOISING = ("test_algorithms_denoising_surrogates", "test_objective_denoising", "test_objective_forward_process")
DIRECT = ("test_direct_losses", "test_direct_invariances")

TARGETS: dict[str, tuple[str, ...]] = {
    f"{ALGORITHMS}/advantage_settings.py": SETTINGS,
    f"{ALGORITHMS}/advantages.py": ("test_algorithms_advantages", *TOKENS),
    f"{ALGORITHMS}/aggregation.py": ("test_algorithms_aggregation", *LOSSES),
    f"{ALGORITHMS}/algorithm.py": SETTINGS,
    f"{ALGORITHMS}/controllers.py": ("test_algorithms_value", *LOSSES),
    f"{ALGORITHMS}/denoising_surrogates.py": DENOISING,
    f"{ALGORITHMS}/direct_settings.py": (*SETTINGS, "test_direct_losses"),
    f"{ALGORITHMS}/forward_process_settings.py": (*SETTINGS, "test_objective_forward_process"),
    f"{ALGORITHMS}/kl.py": ("test_algorithms_kl", *LOSSES),
    f"{ALGORITHMS}/matching.py": ("test_algorithms_matching", "test_objective_forward_process"),
    f"{ALGORITHMS}/mismatch.py": ("test_algorithms_surrogate", *LOSSES),
    f"{ALGORITHMS}/parts.py": (*SETTINGS, *TOKENS),
    f"{ALGORITHMS}/policy_gradient_settings.py": (*SETTINGS, "test_algorithms_denoising_surrogates", *TOKENS),
    f"{ALGORITHMS}/preference.py": ("test_algorithms_preference",),
    f"{ALGORITHMS}/presets.py": SETTINGS,
    f"{ALGORITHMS}/surrogate.py": ("test_algorithms_surrogate", *TOKENS),
    f"{ALGORITHMS}/token_surrogates.py": ("test_algorithms_surrogate", *SETTINGS, *TOKENS),
    f"{ALGORITHMS}/value.py": ("test_algorithms_value", *LOSSES),
    f"{OBJECTIVES}/base.py": LOSSES,
    f"{OBJECTIVES}/credit.py": TOKENS,
    f"{OBJECTIVES}/divergence.py": (*TOKENS, "test_objective_denoising"),
    f"{OBJECTIVES}/forward_process.py": ("test_objective_forward_process",),
    f"{OBJECTIVES}/kto.py": DIRECT,
    f"{OBJECTIVES}/likelihood.py": DIRECT,
    f"{OBJECTIVES}/policy_gradient.py": (*TOKENS, "test_objective_denoising"),
    f"{OBJECTIVES}/preference.py": DIRECT,
    f"{OBJECTIVES}/replay.py": TOKENS,
    f"{OBJECTIVES}/reward_gradient.py": DIRECT,
    f"{OBJECTIVES}/supervised.py": DIRECT,
}
"""The parts, and the test files that guard each."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        f"{ALGORITHMS}/denoising_surrogates.py",
        "advantages * (ratio - 1) -> advantages / (ratio - 1)",
    ): "only the sign is read; it differs at a ratio of exactly 1 alone",
    (
        f"{OBJECTIVES}/replay.py",
        "segment.groups + age * _GROUPS_PER_ROLLOUT -> segment.groups - age * _GROUPS_PER_ROLLOUT",
    ): "group numbers are compared for equality alone",
}
"""(file, mutant in words) -> why it computes the same numbers."""


def functions_of(file: str) -> list[FunctionType]:
    """The functions of a file, which is loaded if no test has done so yet."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    assert module.__file__ == str(ROOT / file)
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType) and each.__code__.co_filename == module.__file__
    ]


def put_in_place(mutant: Mutant, functions: Sequence[FunctionType]) -> None:
    """Gives the functions of the mutant's file the changed code."""
    changed = {_key(code): code for code in _functions_in(mutant.code)}
    for function in functions:
        function.__code__ = changed.get(_key(function.__code__), function.__code__)


def _functions_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions_in(constant)


def _key(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def test_files(file: str) -> list[str]:
    """The paths of the tests that guard a file."""
    return [str(TESTS / f"{name}.py") for name in TARGETS[file]]


def in_a_fork(work: Callable[[], Any], seconds: float | None = None) -> Any:
    """What `work` returns, in a process of its own; None if that died or took longer."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            answer = work()
        except Exception as error:
            answer = error
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        received = pipe.read() if select.select([pipe], [], [], seconds)[0] else b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answer = pickle.loads(received) if received else None
    if isinstance(answer, Exception):
        raise answer
    return answer


def failures(items: Sequence[pytest.Item]) -> Iterator[str]:
    """Runs one test after the other: how each fails, "" if it passes."""
    for item, following in zip_longest(items, items[1:]):
        reports = runtestprotocol(item, log=False, nextitem=following)
        yield next((f"{item.nodeid}\n{report.longreprtext}" for report in reports if report.failed), "")


@dataclass
class Measured:
    """A test's processor time in seconds, and the (path, line) that it executes of the chosen files."""

    seconds: float
    lines: set[tuple[str, int]]


def measure(items: Sequence[pytest.Item], paths: set[str]) -> list[Measured]:
    """Of each test; an error if one fails."""
    lines: set[tuple[str, int]] = set()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local if frame.f_code.co_filename in paths else None

    threading.settrace(trace)
    sys.settrace(trace)
    found, started = [], time.process_time()
    for failure in failures(items):
        if failure:
            raise RuntimeError(f"a test fails without a mutation: {failure}")
        found.append(Measured(time.process_time() - started, set(lines)))
        lines.clear()
        started = time.process_time()
    return found


class Trial:
    """As a plugin of pytest: tries mutants in place of running the collected tests."""

    def __init__(self, chosen: dict[str, list[Mutant]], page: Path | None) -> None:
        self.chosen = chosen
        self.digests = {file: digest(file) for file in chosen}
        self.page = page
        self.missed = 0

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        measured = in_a_fork(lambda: measure(session.items, {str(ROOT / file) for file in self.chosen}))
        pairs = sorted(zip(session.items, measured, strict=True), key=lambda pair: pair[1].seconds)
        for file, found in self.chosen.items():
            own, functions = test_files(file), functions_of(file)
            guards = [pair for pair in pairs if str(pair[0].path) in own]
            different = [mutant for mutant in found if (file, mutant.words) not in EQUIVALENT]
            missed = [mutant for mutant in different if not noticed(mutant, guards, functions)]
            for mutant in missed:
                print(f"MISSED {file}:{mutant.lines.start}: {mutant.words}", flush=True)
            print(f"{file}: {len(found)} mutants", flush=True)
            self.missed += len(missed)
            if self.page:
                counts = len(found), len(different) - len(missed), len(found) - len(different), len(missed)
                write(self.page, file, [*map(str, counts), self.digests[file]])
        return True


def noticed(mutant: Mutant, guards: Sequence[tuple[pytest.Item, Measured]], functions: Sequence[FunctionType]) -> bool:
    """Whether a test fails on it, or hangs."""
    path = str(ROOT / mutant.file)
    met = [(item, each) for item, each in guards if any((path, line) in each.lines for line in mutant.lines)]

    def passes() -> bool:
        put_in_place(mutant, functions)
        return not any(failures([item for item, _ in met]))

    return not in_a_fork(passes, seconds=60 + 30 * sum(each.seconds for _, each in met))


def digest(file: str) -> str:
    """Of a file's code, without its comments."""
    code = ast.unparse(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return hashlib.sha256(code.encode()).hexdigest()[:8]


def rows_in(page: Path) -> dict[str, str]:
    """The table's row of each file, where the page has one."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    return {file: rows[file] for file in TARGETS if file in rows}


def write(page: Path, file: str, cells: Sequence[str]) -> None:
    """Replaces one file's row of the page."""
    rows = rows_in(page) | {file: f"| `{file}` | {' | '.join(cells)} |"}
    lines = [
        "# Mutations",
        "",
        "Made by `python scripts/proofs/mutations.py --out docs/mutations.md`: one sign, mask, denominator, detach,",
        "clip bound or comparison of the algorithms' parts is changed at a time, and a test must fail. The digest is",
        "that of the code that the row is about; `--stale` runs the files that have changed since.",
        "",
        "| file | mutants | noticed | equivalent | missed | digest |",
        "|---|---|---|---|---|---|",
        *(rows[file] for file in TARGETS if file in rows),
        "",
        "## Equivalent",
        "",
        *(f"* `{file}`: `{words}`: {reason}" for (file, words), reason in EQUIVALENT.items()),
        "",
    ]
    page.write_text("\n".join(lines), encoding="utf-8")


def main() -> None:
    """Tries every mutant, or some of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", choices=TARGETS, default=list(TARGETS), metavar="FILE")
    parser.add_argument("--sample", type=int, help="so many mutants of each file, drawn at random; not with --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the page whose rows are replaced")
    parser.add_argument("--stale", action="store_true", help="only files whose row in --out does not hold")
    arguments = parser.parse_args()
    if arguments.sample if arguments.out else arguments.stale:
        parser.error("--stale needs --out, and --sample does not go with it")
    files = arguments.files
    if arguments.stale:
        rows = rows_in(arguments.out)
        files = [file for file in files if not rows.get(file, "").endswith(f"| 0 | {digest(file)} |")]
    chosen = {file: mutants(file) for file in files}
    if arguments.sample is not None:
        chance = random.Random(arguments.seed)
        chosen = {file: chance.sample(found, min(arguments.sample, len(found))) for file, found in chosen.items()}
    if not chosen:
        return
    trial = Trial(chosen, arguments.out and arguments.out.resolve())
    tests = sorted({path for file in files for path in test_files(file)})
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        code = pytest.main(["-s", "-p", "no:cacheprovider", "--basetemp", folder, *tests], plugins=[trial])
    if code or trial.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
