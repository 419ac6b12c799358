"""Flips signs, masks, denominators, detaches and clip bounds in the parts of the algorithms: a test must notice each.

    python scripts/proofs/mutations.py --out docs/mutations.md
    python scripts/proofs/mutations.py --files uniml_rl/algorithms/kl.py --sample 5

One mutant is one changed expression of one file, in memory: a fork of this process imports the package with it and runs
the file's tests until one fails. A mutant that no test notices is either listed in `EQUIVALENT` with the reason why it
computes the same, or a hole in the tests, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "uniml_rl"
ALGORITHMS = "uniml_rl/algorithms"
OBJECTIVES = "uniml_rl/objectives"
LOSSES = ("test_objective_losses", "test_objective")
TOKENS = ("test_objective_token_rows", *LOSSES, "test_what_lives_on", "test_dynamic_sampling")
DENOISING = ("test_algorithms_denoising_surrogates", "test_objective_denoising", "test_objective_forward_process")
DIRECT = ("test_direct_losses", "test_direct_invariances", "test_direct_stages")

TARGETS: dict[str, tuple[str, ...]] = {
    f"{ALGORITHMS}/advantages.py": ("test_algorithms_advantages", *TOKENS),
    f"{ALGORITHMS}/aggregation.py": ("test_algorithms_aggregation", *LOSSES),
    f"{ALGORITHMS}/controllers.py": ("test_algorithms_value", *LOSSES),
    f"{ALGORITHMS}/denoising_surrogates.py": DENOISING,
    f"{ALGORITHMS}/kl.py": ("test_algorithms_kl", *LOSSES),
    f"{ALGORITHMS}/matching.py": DENOISING,
    f"{ALGORITHMS}/mismatch.py": ("test_algorithms_surrogate", *LOSSES),
    f"{ALGORITHMS}/preference.py": DIRECT,
    f"{ALGORITHMS}/surrogate.py": ("test_algorithms_surrogate", *TOKENS),
    f"{ALGORITHMS}/token_surrogates.py": ("test_algorithms_surrogate", "test_algorithms_settings", *TOKENS),
    f"{ALGORITHMS}/value.py": ("test_algorithms_value", *LOSSES),
    f"{OBJECTIVES}/base.py": (*LOSSES, *DIRECT),
    f"{OBJECTIVES}/credit.py": (*TOKENS,),
    f"{OBJECTIVES}/divergence.py": (*TOKENS, *DENOISING),
    f"{OBJECTIVES}/forward_process.py": DENOISING,
    f"{OBJECTIVES}/kto.py": DIRECT,
    f"{OBJECTIVES}/likelihood.py": DIRECT,
    f"{OBJECTIVES}/policy_gradient.py": (*TOKENS, *DENOISING),
    f"{OBJECTIVES}/preference.py": DIRECT,
    f"{OBJECTIVES}/reward_gradient.py": DIRECT,
    f"{OBJECTIVES}/supervised.py": DIRECT,
}
"""The parts, and the test files that guard each, the quickest first."""

EQUIVALENT: dict[tuple[str, str], str] = {
    (
        f"{ALGORITHMS}/denoising_surrogates.py",
        "advantages * (ratio - 1) -> advantages / (ratio - 1)",
    ): "only the sign is read; it differs at a ratio of exactly 1 alone",
}
"""(file, mutant in words) -> why it computes the same numbers."""

SECONDS = 240.0
"""A mutant that hangs its tests for so long is noticed too."""


@dataclass(frozen=True)
class Mutant:
    """One changed expression."""

    file: str
    line: int
    words: str  # "a - b -> a + b"
    source: str  # the whole changed module


SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
SWAPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
SWAPPED_NAMES = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "mean": "sum", "sum": "mean"}
SWAPPED_NAMES |= {"amax": "amin", "amin": "amax", "argmax": "argmin", "argmin": "argmax", "any": "all"}
DROPPED_CALLS = ("detach", "clamp", "clamp_min", "clamp_max", "abs", "square", "sqrt", "exp")


def alternatives(node: ast.AST) -> Iterator[ast.expr]:
    """What may stand in the place of an expression: the same with one thing wrong."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED_OPERATORS:
            if not isinstance(left, ast.Constant | ast.JoinedStr) or not isinstance(left.value, str):
                yield ast.BinOp(left, SWAPPED_OPERATORS[type(operator)](), right)
        case ast.UnaryOp(ast.USub() | ast.Invert() | ast.Not(), operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.Compare(left, [operator], comparators) if type(operator) in SWAPPED_COMPARISONS:
            yield ast.Compare(left, [SWAPPED_COMPARISONS[type(operator)]()], comparators)
        case ast.Call(ast.Attribute(receiver, "where"), [condition, first, second]) if _is_torch(receiver):
            yield ast.Call(node.func, [condition, second, first], [])
        case ast.Call(ast.Attribute(receiver, name), arguments, keywords) if not _is_torch(receiver):
            if name in DROPPED_CALLS:
                yield receiver
            if name in SWAPPED_NAMES:
                yield ast.Call(ast.Attribute(receiver, SWAPPED_NAMES[name], ast.Load()), arguments, keywords)
        case ast.Call(ast.Attribute(receiver, name), arguments, keywords) if name in SWAPPED_NAMES:
            yield ast.Call(ast.Attribute(receiver, SWAPPED_NAMES[name], ast.Load()), arguments, keywords)
        case ast.Call(ast.Name(("max" | "min") as name), arguments, keywords) if len(arguments) > 1:
            yield ast.Call(ast.Name(SWAPPED_NAMES[name], ast.Load()), arguments, keywords)
        case ast.Constant(int() | float() as value) if not isinstance(value, bool) and value in (0.5, 2, 2.0):
            yield ast.Constant(value * 2)
        case ast.IfExp(test, body, orelse):
            yield ast.IfExp(test, orelse, body)


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


class _Places(ast.NodeVisitor):
    """Every expression that computes: not in annotations, defaults, decorators, docstrings, messages or logging."""

    def __init__(self) -> None:
        self.found: list[ast.expr] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not isinstance(node.target, ast.Name):
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)  # an index is not a formula

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_logging(node.value):
            self.generic_visit(node)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.found.append(node)
        super().visit(node)


def _is_logging(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("metrics", "_log", "warnings")
    )


def mutants(file: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    places = _Places()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            places.visit(statement)
    found = []
    for node in places.found:
        for other in alternatives(node):
            ast.copy_location(other, node)
            changed = _Replace(node, other).visit(copy.copy(tree))
            words = f"{ast.unparse(node)} -> {ast.unparse(other)}"
            found.append(Mutant(file, node.lineno, words, ast.unparse(ast.fix_missing_locations(changed))))
            _Replace(other, node).visit(tree)
    return sorted(found, key=lambda mutant: mutant.line)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)


class _Loader(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.file.removesuffix(".py").replace("/", ".")
        self.mutant = mutant

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(ROOT / self.mutant.file))

    def get_source(self, fullname: str) -> str:
        return self.mutant.source


def test_files(file: str) -> list[str]:
    """The paths of the tests that guard a file; those that do not exist are left out."""
    return [str(path) for name in TARGETS[file] if (path := TESTS / f"{name}.py").exists()]


def noticed(mutant: Mutant) -> bool:
    """Whether a test fails on it, in a fork that has the heavy libraries already."""
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.meta_path.insert(0, _Loader(mutant))
        import pytest

        # One file after the other: most mutants fall in the first, and the others need not even be collected.
        passed = (pytest.main(["-x", "-q", "-p", "no:cacheprovider", path]) == 0 for path in test_files(mutant.file))
        os._exit(0 if all(passed) else 1)
    started = time.monotonic()
    while time.monotonic() - started < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def import_heavy_libraries() -> None:
    """Once, before the forks; nothing of the package itself."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import diffusers  # noqa: F401
    import hypothesis  # noqa: F401
    import peft  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)


def table(results: dict[str, list[tuple[Mutant, str]]]) -> list[str]:
    """The page."""
    lines = [
        "# Mutations",
        "",
        "Made by `scripts/proofs/mutations.py`: one sign, mask, denominator, detach, clip bound or comparison of the",
        "algorithms' parts is changed at a time, and the tests that guard the file must fail.",
        "",
        "| file | mutants | noticed | equivalent | missed |",
        "|---|---|---|---|---|",
    ]
    for file, found in results.items():
        counts = [sum(verdict == kind for _, verdict in found) for kind in ("noticed", "equivalent", "missed")]
        lines.append(f"| `{file}` | {len(found)} | {counts[0]} | {counts[1]} | {counts[2]} |")
    for kind, title in (("equivalent", "Equivalent"), ("missed", "Missed")):
        rows = [mutant for found in results.values() for mutant, verdict in found if verdict == kind]
        if rows:
            lines += ["", f"## {title}", ""]
        for mutant in rows:
            reason = EQUIVALENT.get((mutant.file, mutant.words), "")
            lines.append(f"* `{mutant.file}`: `{mutant.words}`{': ' if reason else ''}{reason}")
    return [*lines, ""]


def main() -> None:
    """Tries every mutant, or some of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=[file for file in TARGETS if (ROOT / file).exists()])
    parser.add_argument("--sample", type=int, help="so many mutants of each file, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the table is written")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.chdir(ROOT)
    import_heavy_libraries()
    chance = random.Random(arguments.seed)
    results: dict[str, list[tuple[Mutant, str]]] = {}
    for file in arguments.files:
        chosen = mutants(file)
        if arguments.sample is not None:
            chosen = chance.sample(chosen, min(arguments.sample, len(chosen)))
        unchanged = Mutant(file, 0, "nothing", (ROOT / file).read_text(encoding="utf-8"))
        if noticed(unchanged):
            raise SystemExit(f"{file}: its tests fail without a mutation: {', '.join(test_files(file))}")
        results[file] = []
        for mutant in chosen:
            equivalent = (file, mutant.words) in EQUIVALENT
            verdict = "equivalent" if equivalent else "noticed" if noticed(mutant) else "missed"
            results[file].append((mutant, verdict))
            if verdict == "missed":
                print(f"MISSED {file}:{mutant.line}: {mutant.words}", flush=True)
        print(f"{file}: {len(chosen)} mutants", flush=True)
    if arguments.out:
        arguments.out.write_text("\n".join(table(results)), encoding="utf-8")
    if any(verdict == "missed" for found in results.values() for _, verdict in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
