"""Imports run one way, foreign packages of our names are told apart, and optional packages stay optional."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("uniml_rl", "modalities", "rewards")
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

ROOMS = {
    "config": ("uniml_rl.config", "uniml_rl.schema", "uniml_rl.yaml_files"),
    "algorithms": ("uniml_rl.algorithms",),
    "engines": ("uniml_rl.engines",),
    "data": ("uniml_rl.data",),
    "monitor": ("uniml_rl.monitor",),
}
SHARED = ("uniml_rl.experience", "uniml_rl.__version__")
FORBIDDEN = {"modalities": ("uniml_rl", "rewards"), "rewards": ("uniml_rl",)}
OPTIONAL = ("xformers", "flash_attn", "bitsandbytes", "deepspeed")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(text: str, module: str) -> Iterator[str]:
    """The modules that a module imports anywhere, functions and `TYPE_CHECKING` included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join([*module.split(".")[: -node.level], node.module or ""]) if node.level else node.module
            yield from (f"{package}.{alias.name}" for alias in node.names)


def lies_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def room_of(module: str) -> str | None:
    return next((room for room, parts in ROOMS.items() if any(lies_in(module, part) for part in parts)), None)


def test_the_search_sees_imports_of_every_form() -> None:
    text = "import a.b\nfrom c import d\nfrom . import e\ndef f():\n    from ..g import h\n"
    assert list(imported(text, "pack.sub.mod")) == ["a.b", "c.d", "pack.sub..e", "pack.g.h"]


def test_imports_run_one_way_and_rooms_do_not_know_each_other() -> None:
    """A room never imports another one, nor the trainer, the curriculum, `build` or anything else that stands on it."""
    wrong = []
    for path in MODULES:
        module = name_of(path)
        room = ROOMS.get(room_of(module) or "")
        for other in imported(path.read_text(encoding="utf-8"), module):
            forbidden = any(lies_in(other, package) for package in FORBIDDEN.get(module.split(".")[0], ()))
            outside = room and lies_in(other, "uniml_rl") and not any(lies_in(other, part) for part in (*room, *SHARED))
            if forbidden or outside:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def run(program: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT.anchor
    )


@pytest.mark.parametrize("package", ["modalities", "rewards"])
def test_a_foreign_package_of_our_name_is_refused_in_one_sentence(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("VERSION = 'something else'\n")
    for command in ("import uniml_rl", "from uniml_rl.cli import main; main()"):
        done = run(command, tmp_path)
        *_, complaint = done.stderr.strip().splitlines()
        assert done.returncode != 0
        assert complaint.startswith("ImportError: ") and complaint.count(". ") == 0 and complaint.endswith(".")
        assert str(tmp_path / package) in complaint and f"pip uninstall {package}" in complaint


def test_every_module_imports_without_the_optional_packages() -> None:
    names = [name for name in map(name_of, MODULES) if not name.endswith("__main__")]
    program = f"""
import importlib
from importlib.machinery import PathFinder
find_spec = PathFinder.find_spec
def hiding(name, *more):
    return None if name.split(".")[0] in {OPTIONAL!r} else find_spec(name, *more)
PathFinder.find_spec = staticmethod(hiding)  # dill calls it on an instance
assert all(importlib.util.find_spec(name) is None for name in {OPTIONAL!r})
for name in {names!r}:
    importlib.import_module(name)
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_an_installed_deepspeed_says_nothing_of_the_machine_on_its_own() -> None:
    code = "import modalities, deepspeed.accelerator as a; a.get_accelerator()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0 and found.stdout == "", found.stderr
