"""The mutants of a file: its module again and again, each time with one sign, mask, denominator or bound changed."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """One changed expression."""

    file: str
    lines: range
    words: str  # "a - b -> a + b"
    code: CodeType  # the whole changed module


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


def alternatives(node: ast.AST) -> Iterator[ast.expr | ast.AugAssign]:
    """What may stand in the place of an expression or of an `x += y`: the same with one thing wrong."""
    match node:
        case ast.AugAssign(target, operator, value) if type(operator) in SWAPPED_OPERATORS:
            yield ast.AugAssign(target, SWAPPED_OPERATORS[type(operator)](), value)
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
        self.found: list[ast.expr | ast.AugAssign] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
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
        if isinstance(node, ast.expr | ast.AugAssign):
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
            words = f"{ast.unparse(node)} -> {ast.unparse(other)}"
            ast.copy_location(other, node)
            changed = ast.fix_missing_locations(_Replace(node, other).visit(copy.copy(tree)))
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found.append(Mutant(file, lines, words, compile(changed, str(ROOT / file), "exec")))
            _Replace(other, node).visit(tree)
    return sorted(found, key=lambda mutant: mutant.lines.start)


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().generic_visit(node)
