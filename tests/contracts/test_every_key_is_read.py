"""Every key of the YAML file is read by something that acts on it, not only accepted and checked.

By names alone: a key counts as read where code outside the validators reads an attribute of its name (or spells it in
a function with a computed `getattr`): in the module that declares its block, or a base of the block with that key, in
one that imports from it, or in one that imports from those. So a key is overlooked if its name is read for another
reason there; one whose name nothing reads is not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("uniml_rl", "modalities", "rewards")


@dataclass(frozen=True)
class Block:
    """A settings class: its module, the names of its bases and the keys that it declares."""

    module: str
    name: str
    bases: tuple[str, ...]
    keys: tuple[str, ...]


def unread(sources: Mapping[str, str]) -> list[str]:
    """`module.Class.key` of each key that no module of `sources` (name -> text) reads."""
    trees = {module: ast.parse(text) for module, text in sources.items()}
    blocks = _settings([block for module, tree in trees.items() for block in _classes(module, tree)])
    reads = {module: set(_reads(tree)) for module, tree in trees.items()}
    imports = {module: {module, *_imports(tree, sources)} for module, tree in trees.items()}
    near = {module: set[str]().union(*(imports[other] for other in imports[module] & set(trees))) for module in trees}
    return [
        f"{block.module}.{block.name}.{key}"
        for block in blocks
        for key in block.keys
        if not any(key in reads[module] and _homes(block, key, blocks) & near[module] for module in trees)
    ]


def _homes(block: Block, key: str, blocks: list[Block]) -> set[str]:
    """The modules that declare the key: the block's own and those of its bases that have it too."""
    bases = [base for base in blocks if base.name in block.bases and base != block]
    own = {block.module} if key in block.keys else set[str]()
    return own.union(*(_homes(base, key, blocks) for base in bases))


def _classes(module: str, tree: ast.Module) -> Iterator[Block]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases)
            fields = [
                item
                for item in node.body
                if isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).startswith("ClassVar")
            ]
            keys = [ast.unparse(item.target) for item in fields if not _selects_the_class(item)]
            yield Block(module, node.name, bases, tuple(key for key in keys if not key.startswith("_")))


def _selects_the_class(item: ast.AnnAssign) -> bool:
    """Whether a field is `type: Literal["one"]`: it is read when its block is chosen."""
    annotation = item.annotation
    if ast.unparse(item.target) != "type" or not isinstance(annotation, ast.Subscript):
        return False
    return ast.unparse(annotation.value).endswith("Literal") and isinstance(annotation.slice, ast.Constant)


def _settings(classes: list[Block]) -> list[Block]:
    """The classes that derive from `Settings`, through whatever lies between."""
    names = {"Settings"}
    while True:
        more = {block.name for block in classes if names & set(block.bases)}
        if more <= names:
            return [block for block in classes if names & set(block.bases)]
        names |= more


def _reads(node: ast.AST) -> Iterator[str]:
    """Names of the attributes that are read, those in validators left out."""
    if isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(item) for item in node.decorator_list):
        return
    if isinstance(node, ast.FunctionDef) and any(map(_is_computed_getattr, ast.walk(node))):
        yield from (str(item.value) for item in ast.walk(node) if isinstance(item, ast.Constant))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr
    if isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs
    for child in ast.iter_child_nodes(node):
        yield from _reads(child)


def _is_computed_getattr(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and not isinstance(node.args[1], ast.Constant)
    )


def _imports(tree: ast.Module, known: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in known)


def package_sources() -> dict[str, str]:
    """Module name -> text of everything that is installed."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return {name: path.read_text(encoding="utf-8") for name, path in zip(names, paths, strict=True)}


DECLARES = """
class Base(Settings):
    shared: int = 1

class Block(Base):
    type: Literal["block"] = "block"
    mode: Literal["a", "b"] = "a"
    used: int = 1
    built: int = 1
    matched: int = 1
    only_checked: int = 1
    computed: int = 1
    unused: int = 1
    _private: int = 1

    @model_validator(mode="after")
    def _fits(self):
        if self.only_checked > 1:
            raise ValueError(self.only_checked)
        return self

    def build(self):
        return self.built

class Other:
    unused_too: int = 1
"""
READS = """
from declares import Block

def act(block):
    block.unused = 3
    for key in ("computed", "built"):
        getattr(block, key)
    match block:
        case Block(matched=1):
            return block.used + block.shared
"""
ELSEWHERE = "def act(other): return other.unused, other.mode"


def test_the_search_tells_read_keys_from_unread_ones() -> None:
    found = unread({"declares": DECLARES, "reads": READS, "elsewhere": ELSEWHERE})
    assert found == ["declares.Block.mode", "declares.Block.only_checked", "declares.Block.unused"]


def test_every_key_is_read() -> None:
    sources = package_sources()
    assert not unread(sources), "these keys are accepted and then ignored: " + ", ".join(unread(sources))
