"""The command line. Each command hands over to one function, imported when it runs, so that `--help` is instant.

Exit codes: 0 done, 1 a bug (with its traceback) or a rank that was lost (one message), 2 a mistake of the user (one
message), 3 weights or what they compute are not finite (one message), 75 told to stop by SIGTERM or SIGUSR1 and saved,
130 interrupted. The processes of one run all end with the same code, and one of them says why.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from modalities.errors import UserError
from uniml_rl import __version__
from uniml_rl.engines.endings import (
    DIVERGED,
    INTERRUPTED,
    MISTAKE,
    REQUEUE,
    DivergedError,
    EndedByAnotherRankError,
    LostRankError,
    StoppedError,
)
from uniml_rl.stopping import Stop

app = typer.Typer(
    name="uniml-rl",
    help="Reinforcement learning for any generative model: one policy interface, one trainer, one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The run's YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys to change, by dotted path; items of a list by name or index: stages.image-align.until.iterations=3",
        show_default=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the warnings and logs of the libraries below.")]

LIBRARIES = ("transformers", "diffusers", "peft", "huggingface_hub", "open_clip", "accelerate", "torch", "torchvision")


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    folder: Annotated[
        str | None, typer.Option(help="Where the run is written; instead of the config's `folder`.", show_default=False)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Train: stage by stage, as the YAML file says. The same command again continues an interrupted run.

    Example: [bold]uniml-rl train configs/quickstart.yaml seed=7 --folder runs/seed-7[/bold]
    """
    stop = Stop()
    with _well_behaved(verbose, interrupted="The same command continues from the last checkpoint."), stop.listening():
        from uniml_rl.run import train_from_yaml

        train_from_yaml(Path(config), overrides or [], None if folder is None else Path(folder), stop)


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Processes to plan for; by default as many as are started.", show_default=False),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Check a config without training: its keys, its data, its models' sizes and the memory that they need.

    Example: [bold]uniml-rl check configs/quickstart.yaml stages.image-align.group_size=8[/bold]
    """
    with _well_behaved(verbose), _first_of_ranks("check"):
        from uniml_rl.check import check_from_yaml

        check_from_yaml(Path(config), overrides or [], ranks)


@app.command()
def sample(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A run's folder, one of its checkpoints, or a model's folder.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys of the policy's `sampling` block to change: temperature=0.7",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given many times.", show_default=False)
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help="A text file with one prompt per line.", show_default=False)
    ] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Samples per prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the samples; by default inside the run's.", show_default=False)
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="Name of the policy; by default the one trained last.", show_default=False)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Sample from a trained policy.

    Example: [bold]uniml-rl sample runs/quickstart -p "a red apple" -p "a green frog" --number 4[/bold]
    """
    with _well_behaved(verbose), _first_of_ranks("sample", is_alone=True):
        prompts = [*(prompt or []), *_lines(prompts_file)]
        if not prompts:
            raise UserError("no prompts: give --prompt TEXT (as often as you like) or --prompts-file FILE.")
        from uniml_rl.saved import sample_from

        sample_from(source, prompts, number, seed, out, overrides or [], policy)


@app.command()
def eval(
    source: Annotated[
        str, typer.Argument(metavar="RUN_OR_CONFIG", help="A run's folder, or a YAML file.", show_default=False)
    ],
    overrides: Overrides = None,
    verbose: Verbose = False,
) -> None:
    """Evaluate on the held-out prompts: a run's trained policies, or a config's models before any training.

    Example: [bold]uniml-rl eval runs/quickstart[/bold]
    """
    with _well_behaved(verbose), _first_of_ranks("eval", is_alone=True):
        from uniml_rl.saved import evaluate_from

        evaluate_from(source, overrides or [])


@app.command()
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, or one of its checkpoints.", show_default=False)
    ],
    to: Annotated[Path, typer.Option(help="Folder to write the model to.", show_default=False)],
    policy: Annotated[
        str | None,
        typer.Option(help="Name of the policy; by default the one trained last.", show_default=False),
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Export a trained model as a folder that plain transformers or diffusers load with `from_pretrained`.

    Example: [bold]uniml-rl export runs/quickstart --policy painter --to models/aligned[/bold]
    """
    with _well_behaved(verbose), _first_of_ranks("export", is_alone=True):
        from uniml_rl.saved import export_from

        export_from(run, to, policy)


@app.command()
def selftest(
    algorithms: Annotated[
        list[str] | None,
        typer.Argument(metavar="ALGORITHM", help="Only these; by default all.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings per row; the worst of them counts.")] = 5,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write the table as a page of Markdown.", show_default=False)
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Prove that each algorithm optimises what it claims, on small problems whose answers are known exactly.

    Example: [bold]uniml-rl selftest grpo ppo --seeds 2[/bold]
    """
    with _well_behaved(verbose), _first_of_ranks("selftest", is_alone=True):
        from uniml_rl.selftest.report import selftest as prove

        if prove(algorithms or [], seeds, markdown):
            raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the versions that decide how a run comes out: this package, Python and the libraries below."""
    typer.echo(f"uniml-rl {__version__}\npython {sys.version.split()[0]}")
    for library in ("torch", "transformers", "diffusers", "peft", "accelerate", "open_clip_torch"):
        typer.echo(f"{library} {_installed(library)}")


def _installed(library: str) -> str:
    try:
        return version_of(library)
    except PackageNotFoundError:
        return "not installed"


def _lines(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts-file: cannot read {str(path)!r} as text: {error}") from None
    return [line for line in lines if line]


@contextmanager
def _well_behaved(verbose: bool, interrupted: str = "") -> Iterator[None]:
    """Turns a user's mistake into one red message and exit code 2, Ctrl-C into 130, and keeps the libraries quiet."""
    # A component of the user's own, `type: my_module:MyReward`, lies where the command is started; what is installed
    # comes first, so that nothing there can take the place of a library.
    sys.path.append(os.getcwd())
    if os.environ.get("RANK", "0") == "0":
        warnings.showwarning = lambda message, *_: _say(f"Warning: {message}", "yellow")
    else:  # rank 0 warns of the same
        warnings.showwarning = lambda *_: None
    if not verbose:
        _silence_libraries()
    try:
        yield
    except UserError as error:
        _say(f"Error: {error}", "bold red")
        raise typer.Exit(MISTAKE) from None
    except (DivergedError, FloatingPointError) as error:
        _say(f"Error: {error}", "bold red")
        raise typer.Exit(DIVERGED) from None
    except StoppedError as error:
        _say(str(error), "yellow")
        raise typer.Exit(REQUEUE) from None
    except LostRankError as error:
        _say(f"Error: {error}", "bold red")
        raise typer.Exit(1) from None
    except EndedByAnotherRankError as error:
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _say(f"Interrupted. {interrupted}".strip(), "yellow")
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _first_of_ranks(command: str, is_alone: bool = False) -> Iterator[None]:
    """Of several processes that a launcher has started only the first does what one does; the others end at once.

    With `is_alone` it is then a process of its own for everything below, which would wait for the others.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        if os.environ.get("RANK", "0") != "0":
            raise typer.Exit(0)
        if is_alone:
            started = os.environ.pop("WORLD_SIZE")
            _say(
                f"`{command}` is done by one process: rank 0 does it, the other {int(started) - 1} end here.", "yellow"
            )
    yield


def _say(message: str, style: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(message, style=style))


def _silence_libraries() -> None:
    """Their chatter drowns the progress bars. Set before they are imported; a variable that is already set stays."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for library in LIBRARIES:
        warnings.filterwarnings("ignore", module=rf"{library}(\.|$)")
    # Their bars over the tensors of a local file, not the hub's over a download; this imports only what comes anyway.
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def main() -> None:
    """The entry point of the `uniml-rl` command."""
    app()
