"""The command line: its frozen shape, its exit codes, and what each command hands over."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest
import typer.main
from typer.testing import CliRunner

from modalities.errors import UserError
from uniml_rl import __version__, cli
from uniml_rl.config import load_yaml
from uniml_rl.engines.endings import DivergedError, StoppedError

INTERFACE = {
    "train": ["CONFIG", "[KEY=VALUE]", "--folder FOLDER", "--verbose/-v"],
    "check": ["CONFIG", "[KEY=VALUE]", "--ranks RANKS", "--verbose/-v"],
    "sample": [
        *("SOURCE", "[KEY=VALUE]", "--prompt/-p PROMPT...", "--prompts-file PROMPTS_FILE", "--number/-n NUMBER=1"),
        *("--seed SEED=0", "--out OUT", "--policy POLICY", "--verbose/-v"),
    ],
    "eval": ["RUN_OR_CONFIG", "[KEY=VALUE]", "--verbose/-v"],
    "export": ["RUN", "--to TO (required)", "--policy POLICY", "--verbose/-v"],
    "selftest": ["[ALGORITHM]", "--seeds SEEDS=5", "--markdown MARKDOWN", "--verbose/-v"],
    "version": [],
}


def shape(parameter: Any) -> str:
    """One argument or option as a line of the frozen interface."""
    if parameter.param_type_name == "argument":
        return parameter.metavar if parameter.required else f"[{parameter.metavar}]"
    names = "/".join(parameter.opts + parameter.secondary_opts)
    if parameter.is_flag:
        return names
    default = "" if parameter.default is None else f"={parameter.default}"
    many = "..." if parameter.multiple else ""
    return f"{names} {parameter.name.upper()}{many}{default}" + (" (required)" if parameter.required else "")


def test_the_command_line_has_exactly_this_shape() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    assert {name: [shape(parameter) for parameter in command.params] for name, command in commands.items()} == INTERFACE


HANDED_OVER = {
    "train a.yaml x.y=1 --folder out z=2": (
        *("run", "train_from_yaml"),
        (Path("a.yaml"), ["x.y=1", "z=2"], Path("out"), ANY),
    ),
    "train a.yaml": ("run", "train_from_yaml", (Path("a.yaml"), [], None, ANY)),
    "check a.yaml x=-1": ("check", "check_from_yaml", (Path("a.yaml"), ["x=-1"], None)),
    "check a.yaml --ranks 8": ("check", "check_from_yaml", (Path("a.yaml"), [], 8)),
    "sample runs/a -p one -p two -n 3 --seed 7 --out o x=1 --policy text": (
        "saved", "sample_from", ("runs/a", ["one", "two"], 3, 7, Path("o"), ["x=1"], "text"),
    ),
    "sample runs/a --prompts-file prompts.txt": (
        "saved", "sample_from", ("runs/a", ["a red apple", "ein grüner Frosch"], 1, 0, None, [], None),
    ),
    "eval runs/a x=1": ("saved", "evaluate_from", ("runs/a", ["x=1"])),
    "export runs/a --to out --policy image": ("saved", "export_from", ("runs/a", Path("out"), "image")),
    "selftest grpo ppo --seeds 2": ("selftest.report", "selftest", (["grpo", "ppo"], 2, None)),
    "selftest --markdown a.md": ("selftest.report", "selftest", ([], 5, Path("a.md"))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _process_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with warnings.catch_warnings():
        yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Puts a function in place of what a command hands over to, and returns the list of its calls."""

    def _stand_in(module: str, function: str, error: BaseException | None = None) -> list[Any]:
        calls: list[Any] = []

        def called(*arguments: Any) -> None:
            calls.append(arguments)
            if error is not None:
                raise error

        stub = ModuleType(f"uniml_rl.{module}")
        setattr(stub, function, called)
        monkeypatch.setitem(sys.modules, f"uniml_rl.{module}", stub)
        return calls

    return _stand_in


def run(line: str) -> Any:
    return CliRunner().invoke(cli.app, line.split())


@pytest.mark.parametrize("line", HANDED_OVER)
def test_each_command_hands_over_what_was_typed(stand_in: Callable[..., list[Any]], line: str) -> None:
    Path("prompts.txt").write_text("a red apple\n\n  ein grüner Frosch\n", encoding="utf-8")
    module, function, arguments = HANDED_OVER[line]
    calls = stand_in(module, function)
    result = run(line)
    assert result.exit_code == 0, result.output
    assert calls == [arguments]


def test_a_mistake_of_the_user_is_one_message_and_exit_code_2(stand_in: Callable[..., list[Any]]) -> None:
    stand_in("run", "train_from_yaml", UserError("a.yaml:3: key [B, T]: " + "long " * 60 + "message"))
    result = run("train a.yaml")
    assert result.exit_code == 2
    assert result.stderr == "Error: a.yaml:3: key [B, T]: " + "long " * 60 + "message\n"
    assert result.stdout == ""


def test_a_warning_of_ours_is_one_plain_line(stand_in: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("s: {type: a, weight: 2}\n")
    stub = stand_in("check", "check_from_yaml")
    sys.modules["uniml_rl.check"].check_from_yaml = lambda path, keys, _: load_yaml(path, keys)  # type: ignore
    result = run("check a.yaml s.type=b")
    assert not stub and result.exit_code == 0
    assert result.stderr == (
        "Warning: s: type=b replaces the whole block of a.yaml:1, which gives weight too; what of these the new "
        "one shall have must be given with it.\n"
    )


def test_an_interruption_says_how_to_go_on_and_exits_with_130(stand_in: Callable[..., list[Any]]) -> None:
    stand_in("run", "train_from_yaml", KeyboardInterrupt())
    result = run("train a.yaml")
    assert result.exit_code == 130
    assert "same command continues" in result.stderr and "Traceback" not in result.output


def test_a_stopped_run_says_so_in_one_line_and_exits_with_75(stand_in: Callable[..., list[Any]]) -> None:
    stand_in("run", "train_from_yaml", StoppedError("Stopped by SIGTERM."))
    result = run("train a.yaml")
    assert (result.exit_code, result.stderr) == (75, "Stopped by SIGTERM.\n")


@pytest.mark.parametrize("error", [DivergedError("not finite."), FloatingPointError("not finite.")])
def test_what_is_not_finite_is_one_message_and_exit_code_3(
    stand_in: Callable[..., list[Any]], error: Exception
) -> None:
    stand_in("run", "train_from_yaml", error)
    result = run("train a.yaml")
    assert (result.exit_code, result.stderr) == (3, "Error: not finite.\n")


@pytest.mark.parametrize("line", [line for line in HANDED_OVER if not line.startswith("train")])
def test_of_several_processes_the_first_does_what_one_does(
    stand_in: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    Path("prompts.txt").write_text("a red apple\n\n  ein grüner Frosch\n", encoding="utf-8")
    module, function, arguments = HANDED_OVER[line]
    calls = stand_in(module, function)
    for rank, expected in (("1", []), ("0", [arguments])):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        result = run(line)
        assert (result.exit_code, result.stdout, calls) == (0, "", expected)
    command = line.split()[0]
    said = f"`{command}` is done by one process: rank 0 does it, the other 1 end here.\n" if command != "check" else ""
    assert result.stderr == said and ("WORLD_SIZE" in os.environ) == (command == "check")


def test_a_bug_keeps_its_traceback_and_exits_with_1(stand_in: Callable[..., list[Any]]) -> None:
    stand_in("check", "check_from_yaml", ZeroDivisionError("a bug"))
    result = run("check a.yaml")
    assert result.exit_code == 1
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sample runs/a", "--prompt"),
        ("sample runs/a --prompts-file missing.txt", "missing.txt"),
        ("sample runs/a -p x --number 0", "--number"),
        ("train", "CONFIG"),
        ("trian a.yaml", "trian"),
        ("export runs/a", "--to"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_names_what_is_wrong(line: str, message: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output


def test_the_libraries_are_quiet_unless_asked_and_our_own_warnings_are_not(stand_in: Callable[..., list[Any]]) -> None:
    def warns_from(module: str) -> bool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn_explicit("chatter", UserWarning, "file.py", 1, module=module)
        return bool(caught)

    for variable in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.pop(variable, None)
    stand_in("check", "check_from_yaml")
    run("check a.yaml --verbose")
    assert "TRANSFORMERS_VERBOSITY" not in os.environ and warns_from("transformers.utils")
    os.environ["DIFFUSERS_VERBOSITY"] = "info"
    run("check a.yaml")
    assert (os.environ["TRANSFORMERS_VERBOSITY"], os.environ["DIFFUSERS_VERBOSITY"]) == ("error", "info")
    assert not warns_from("transformers.utils") and not warns_from("diffusers")
    assert warns_from("modalities.lora") and warns_from("transformers_of_mine")


def test_a_component_beside_the_command_is_found_and_never_hides_an_installed_module(
    stand_in: Callable[..., list[Any]],
) -> None:
    Path("my_component.py").write_text("VALUE = 1\n")
    Path("yaml.py").write_text("raise AssertionError\n")
    stand_in("check", "check_from_yaml")
    run("check a.yaml")
    assert sys.path[-1] == str(Path.cwd())


def test_help_and_version_need_no_heavy_library() -> None:
    program = (
        "import sys\nfrom uniml_rl import cli\n"
        "for line in (['--help'], ['train', '--help'], ['version']):\n"
        "    sys.argv = ['uniml-rl', *line]\n"
        "    try: cli.main()\n"
        "    except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'diffusers', 'peft', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"uniml-rl {__version__}" in done.stdout and "Example: uniml-rl train" in done.stdout


def test_every_command_has_an_example_in_its_help() -> None:
    for command in INTERFACE:
        if command != "version":
            assert f"Example: uniml-rl {command} " in run(f"{command} --help").stdout
