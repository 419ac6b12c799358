"""One run: a YAML file, a folder, and the curriculum in between. The same command again continues it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from modalities.errors import UserError
from uniml_rl.alike import check_alike
from uniml_rl.build import RunConfig
from uniml_rl.check import check_shares, preflight, said_at
from uniml_rl.checkpoint import environment_changes
from uniml_rl.config import LoadedConfig, load_yaml, resolved_dump, validate
from uniml_rl.curriculum import Curriculum
from uniml_rl.engines.base import Engine
from uniml_rl.engines.ranks import ending_together, launched
from uniml_rl.engines.settings import EngineSettings
from uniml_rl.full_disk import full_disk_is_a_mistake
from uniml_rl.memory import Known
from uniml_rl.monitor.progress import Progress
from uniml_rl.monitor.report import write_report
from uniml_rl.monitor.writer import MetricsWriter
from uniml_rl.planner import available_memory, plan_rollouts
from uniml_rl.run_folder import check_folder, engine_changes, folder_of, locked, save_config
from uniml_rl.stopping import Stop

_log = logging.getLogger(__name__)


def train_from_yaml(
    path: str | Path, overrides: Sequence[str] = (), folder: str | Path | None = None, stop: Stop | None = None
) -> None:
    """Trains what the file describes, from the beginning or from the folder's last checkpoint.

    Every process of a launcher calls it; `stop` is one that listens if signals are to save and end the run. Raises
    UserError for a wrong configuration, a folder of another configuration, or a folder in use, and StoppedError; on one
    rank that, and EndedByAnotherRankError on the others.
    """
    launch, stop = launched(), stop or Stop()
    engine, wrong = EngineSettings(), None
    try:
        loaded = load_yaml(path, overrides)
        config = validate(RunConfig, loaded)
        engine = config.engine
    except UserError as error:  # said once, when the ranks have met
        wrong = error
    with ending_together(launch, engine.start_timeout_seconds), stop.kept_at_the_end():
        if wrong is not None:
            raise wrong
        run_folder = folder_of(config, folder)
        with locked(run_folder) if launch.rank == 0 else nullcontext():
            if launch.rank == 0:
                check_folder(run_folder, config, loaded)
            with full_disk_is_a_mistake(run_folder):
                train(config, loaded, run_folder, stop)


def train(config: RunConfig, loaded: LoadedConfig, folder: Path, stop: Stop | None = None) -> None:
    """Runs or continues a validated configuration in its folder, and writes the report at the end."""
    with said_at(loaded, ("engine",)):
        engine = config.engine.build()
    with closing(engine):
        _train(config, loaded, folder, stop or Stop(), engine)


def _train(config: RunConfig, loaded: LoadedConfig, folder: Path, stop: Stop, engine: Engine) -> None:
    console = Console()
    check_shares(config, loaded, engine.world_size)
    check_alike(engine, "the configuration", resolved_dump(config))
    leads = engine.leads
    writer = MetricsWriter(folder) if leads else None
    with Progress(console, quiet=not leads) as progress:
        curriculum = Curriculum(config, folder, engine, config.engine.resolve_device(), writer, progress, stop)
        manifest = curriculum.restore()
        if curriculum.finished:
            progress.note(f"{folder}: this run is finished; nothing is left to train.")
        else:
            if manifest is not None:
                progress.note(f"{folder}: continuing after {curriculum.position.total_iterations} iterations.")
                for line in [*environment_changes(manifest), *engine_changes(folder, config)]:
                    progress.note(f"changed since the checkpoint, so bits may differ: {line}")
            progress.activity("checking the configuration")
            known = preflight(config, loaded)
            for line in filter(None, (_alone(config, loaded), _plan(config, known, engine))):
                progress.note(line)
            if leads:
                save_config(folder, config)
            curriculum.run()
    if writer is not None:
        writer.close()
        write_report(folder, config.name, curriculum.reports(), next_commands(config, folder), console)
    engine.wait()


def _alone(config: RunConfig, loaded: LoadedConfig) -> str:
    """Says that the engine's block is for several processes, if one was started; else empty."""
    fewest = config.engine.fewest_ranks
    if launched().world_size > 1 or fewest == 1:
        return ""
    return (
        f"one process was started, and the engine's block is for {fewest} or more: nothing is divided. For several, "
        f"`torchrun --nproc-per-node {fewest} -m uniml_rl train {loaded.path}`."
    )


def _plan(config: RunConfig, known: Known, engine: Engine) -> str:
    """Tells the engine how to sample with divided weights; the decision in words, empty if there was none to make."""
    launch = launched()
    available = available_memory(config.engine.resolve_device(), launch.local_world_size)
    plan = plan_rollouts(config, known, launch.world_size, available)
    if plan is None:
        return ""
    # Ranks may have less memory than others, and all must do the same.
    engine.gathered_rollouts = not engine.union_of_names([] if plan.gathered else ["sharded"])
    return f"rollout weights: {replace(plan, gathered=engine.gathered_rollouts).in_words()}"


def next_commands(config: RunConfig, folder: Path) -> list[str]:
    """Commands that a user may want to type after a run."""
    last = config.stages[-1].policy
    samples = [f"uniml-rl sample {folder} --prompt 'a prompt of your own'"] if config.stages[-1].prompts else []
    evaluates = [f"uniml-rl eval {folder}"] if any(stage.evaluation for stage in config.stages) else []
    return [
        *samples,
        *evaluates,
        f"uniml-rl export {folder} --policy {last} --to exported/{last}",
        f"tensorboard --logdir {folder}",
    ]
