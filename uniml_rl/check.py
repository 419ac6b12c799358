"""Checks a configuration before anything trains: files, models, rewards, algorithms, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from modalities.errors import UserError
from rewards.combine import RewardSet
from uniml_rl.build import RunConfig, StageConfig, inspect_policy
from uniml_rl.config import LoadedConfig, load_yaml, validate

FIRST_RECORDS = 8


def preflight(config: RunConfig, loaded: LoadedConfig) -> None:
    """Raises UserError for anything that would stop a later stage: missing data, a model folder of the wrong kind, a
    reward that does not fit, an algorithm that does not fit the policy."""
    for index, stage in enumerate(config.stages):
        try:
            _check_stage(config, stage)
        except UserError as error:
            raise loaded.error(("stages", index), str(error)) from error


def _check_stage(config: RunConfig, stage: StageConfig) -> None:
    summary = inspect_policy(config, stage.policy)
    if summary.trainable_parameters == 0:
        raise UserError(f"policies.{stage.policy}: nothing in it is trainable.")
    group_size, rewards = stage.group_size, RewardSet.build(stage.rewards, "cpu") if stage.rewards else None
    if stage.prompts is not None and rewards is not None:
        rewards.check(summary.sample_kind, stage.prompts.build(config.seed).first(FIRST_RECORDS))
    else:
        assert stage.records is not None
        records = stage.records.build(config.seed)
        records.check_kind(summary.sample_kind)
        group_size = min(len(record.samples) for record in records.first(FIRST_RECORDS))
    for kind, unit in summary.decisions:
        stage.algorithm.check(group_size=group_size, log_prob_unit=unit, kind=kind)
    if stage.evaluation is not None:
        held_out = stage.evaluation.prompts.build(config.seed).first(FIRST_RECORDS)
        if rewards is not None:
            rewards.check(summary.sample_kind, held_out)
        if stage.evaluation.rewards:
            RewardSet.build(stage.evaluation.rewards, "cpu").check(summary.sample_kind, held_out)


def check_from_yaml(path: str | Path, overrides: Sequence[str] = ()) -> None:
    """Validates everything without training, and prints parameters, trainable shares and a memory estimate."""
    loaded = load_yaml(path, overrides)
    config = validate(RunConfig, loaded)
    preflight(config, loaded)
    console = Console()
    table = Table(title=f"{config.name}: policies")
    for column in ("policy", "model", "parameters", "trainable", "share", "weights + optimizer"):
        table.add_column(column, overflow="fold")
    for name in config.policies:
        summary = inspect_policy(config, name)
        share = summary.trainable_parameters / summary.parameters
        table.add_row(
            name,
            summary.model,
            f"{summary.parameters:,}",
            f"{summary.trainable_parameters:,}",
            f"{share:.2%}",
            _size(training_gib(summary.parameters, summary.trainable_parameters, summary.bytes_per_parameter)),
        )
    console.print(table)
    for index, stage in enumerate(config.stages):
        console.print(
            f"stage {index} [bold]{stage.name}[/]: {stage.algorithm.name} on {stage.policy}, {_learns_from(stage)}; "
            f"ends at {stage.until.in_words()}"
        )
    console.print("[green]the configuration is valid[/]")


def _learns_from(stage: StageConfig) -> str:
    if stage.group_size is None:
        return f"{stage.prompts_per_iteration} records per iteration"
    rows = stage.prompts_per_iteration * stage.group_size
    return (
        f"{stage.prompts_per_iteration} prompts x {stage.group_size} samples = {rows} per iteration, "
        f"rewards {', '.join(stage.rewards)}"
    )


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"


def training_gib(parameters: int, trainable: int, bytes_per_parameter: int) -> float:
    """GiB of weights, gradients, AdamW's two moments and one kept copy (reference) of the trainable part, all of which
    is float32; activations, KV cache and rewards' models come on top."""
    frozen = parameters - trainable
    return (frozen * bytes_per_parameter + trainable * 4 * 5) / 2**30
