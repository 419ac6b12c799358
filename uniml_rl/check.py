"""Checks a configuration before anything trains: files, models, rewards, algorithms, memory."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from modalities.base import PolicySummary
from modalities.errors import UserError
from modalities.randomness import seeded_generator
from rewards.base import RewardConfig
from rewards.combine import RewardSet
from uniml_rl.algorithms.algorithm import AlgorithmSettings, sample_limit
from uniml_rl.build import EvaluationSettings, RunConfig, StageConfig, evaluation_sampling, inspect_policy, part_names
from uniml_rl.config import LoadedConfig, load_yaml, validate
from uniml_rl.data.prompts import FilePromptsConfig, PromptStream
from uniml_rl.engines.ranks import launched
from uniml_rl.memory import GIB, Known, describe, estimate, in_words
from uniml_rl.planner import available_memory, plan_rollouts
from uniml_rl.run_folder import check_folder, folder_of
from uniml_rl.yaml_files import KeyPath

Doubt = tuple[KeyPath, str]
"""What may be done and is hardly meant: the key that says so, within a block, and the reason."""

FIRST_RECORDS = 8
LONGEST_RECORDS = 16
GENERATED_RECORDS = 64


def preflight(config: RunConfig, loaded: LoadedConfig) -> Known:
    """What is known of the run without loading its policies.

    Raises UserError for anything that would stop a later stage: a device that is not there, missing data, a model
    folder that is incomplete or of the wrong kind, prompts that do not fit, a reward or an algorithm that does not fit
    the policy. Warns of what may be done and is hardly meant. No weights of policies are read.
    """
    with said_at(loaded, ("engine",)) as doubts:
        config.engine.require()
        device = config.engine.resolve_device()
        doubts += [((key,), doubt) for key, doubt in config.engine.doubts(launched().local_world_size)]
    with said_at(loaded, ("seed",)):
        seeded_generator(config.seed)
    summaries: dict[str, PolicySummary] = {}
    longest_prompts, reward_bytes = [], []
    for name in config.policies:
        with said_at(loaded, ("policies", name)):
            summaries[name] = inspect_policy(config, name, device)
            if summaries[name].weights.trainable == 0:
                raise UserError("nothing in it is trainable.")
            _check_tensor_parallel(config, name, summaries[name])
    for index, stage in enumerate(config.stages):
        place: KeyPath = ("stages", index)
        for key, owner in (((), stage), (("critic",), stage.critic)):
            if owner is not None:
                with said_at(loaded, (*place, *key, "optimizer")):
                    config.engine.require_optimizer(owner.optimizer)
        with said_at(loaded, place) as doubts:
            found = _check_stage(config, stage, summaries)
            doubts += found.doubts
        if stage.auxiliary is not None:
            with said_at(loaded, (*place, "auxiliary")):
                _check_records(stage.auxiliary.records, config.seed, summaries[stage.policy], stage.auxiliary.algorithm)
        if stage.evaluation is not None:
            with said_at(loaded, (*place, "evaluation")) as doubts:
                of_evaluation = _check_evaluation(config, stage, stage.evaluation, summaries)
                doubts += of_evaluation.doubts
                found.reward_bytes += of_evaluation.reward_bytes
        longest_prompts.append(found.longest_prompt)
        reward_bytes.append(found.reward_bytes)
    return Known(summaries, longest_prompts, reward_bytes)


def _check_tensor_parallel(config: RunConfig, name: str, summary: PolicySummary) -> None:
    ranks = getattr(config.engine, "tensor_parallel", 1)
    if ranks == 1 or part_names(config.policies[name]):  # the parts are policies themselves
        return
    try:
        summary.check_tensor_parallel(ranks)
    except UserError as error:
        message = f"engine.tensor_parallel: {ranks}: {error} Without it, shard: fsdp divides any model."
        raise UserError(message) from error


def check_shares(config: RunConfig, loaded: LoadedConfig, ranks: int) -> None:
    """Raises UserError if a stage gives some of the ranks nothing to sample or to read."""
    for index, stage in enumerate(config.stages):
        drawn: dict[KeyPath, tuple[str, int]] = {(): ("prompts_per_iteration", stage.prompts_per_iteration)}
        if stage.auxiliary is not None:
            drawn[("auxiliary",)] = ("records_per_step", stage.auxiliary.records_per_step)
        for place, (key, count) in drawn.items():
            if count < ranks:
                message = f"{count} cannot be shared by {ranks} processes; use at least {ranks}, or fewer processes."
                raise loaded.error(("stages", index, *place, key), message)


@contextmanager
def said_at(loaded: LoadedConfig, place: KeyPath) -> Iterator[list[Doubt]]:
    """Puts file, line and key before a mistake's message, and warns of the doubts that it was given."""
    doubts: list[Doubt] = []
    try:
        yield doubts
    except UserError as error:
        raise loaded.error(place, str(error)) from error
    for key, message in doubts:
        warnings.warn(str(loaded.error((*place, *key), message)), stacklevel=3)


@dataclass
class _Found:
    """What is learned of a stage or an evaluation by checking it."""

    doubts: list[Doubt]
    longest_prompt: int = 0
    reward_bytes: int = 0


def _check_stage(config: RunConfig, stage: StageConfig, summaries: Mapping[str, PolicySummary]) -> _Found:
    summary, algorithm = summaries[stage.policy], stage.algorithm
    doubts: list[Doubt] = [(("algorithm",), doubt) for kind, _ in summary.decisions for doubt in algorithm.doubts(kind)]
    doubts += _slow_starts(stage)
    if stage.prompts is None:
        _check_records(stage.records, config.seed, summary, algorithm)
        return _Found(doubts)
    if "scores" in dict(summary.decisions):
        raise UserError(
            f"prompts: policy {stage.policy!r} is a reward model and samples nothing; give `records` of `type: "
            "preferences`."
        )
    algorithm.check_policy(summary, stage.group_size)
    stream = stage.prompts.build(config.seed)
    reads, size = _check_rewards(stage.rewards, summaries, summary, stream, algorithm.follows_gradient)
    longest = summary.fit(_longest(stage.prompts, stream), summary.sampling)
    return _Found(doubts + _too_long(reads, longest, summary.sampling), longest, size)


def _slow_starts(stage: StageConfig) -> list[Doubt]:
    """Learning rates that are still rising when the stage ends."""
    owners: dict[KeyPath, Any] = {(): stage} if stage.critic is None else {(): stage, ("critic",): stage.critic}
    iterations = stage.until.iterations
    return [
        (
            (*place, "optimizer", "schedule", "warm_up_iterations"),
            f"{warm_up}: the stage ends after {iterations} iterations (until.iterations), so the learning rate never "
            "reaches its peak; give less.",
        )
        for place, owner in owners.items()
        if iterations and (warm_up := owner.optimizer.schedule.warm_up_iterations) >= iterations
    ]


def _check_rewards(
    blocks: Mapping[str, RewardConfig],
    summaries: Mapping[str, PolicySummary],
    summary: PolicySummary,
    stream: PromptStream,
    follows_gradient: bool = False,
) -> tuple[dict[str, int | None], int]:
    """By name, how many tokens of prompt and sample each reward reads; and the bytes of their models.

    Of reward models that the run has yet to train, only this and what they score is known.
    """
    reads: dict[str, int | None] = {}
    size = 0
    ready = {name: block for name, block in blocks.items() if block.policy is None}
    if ready:
        built = RewardSet.build(ready, "cpu")
        built.check(summary.sample_kind, stream.first(FIRST_RECORDS))
        if follows_gradient and any(block.weight != 0 for block in ready.values()):
            built.check_differentiable()
        reads |= built.reads()
        size = built.model_bytes()
    for name, block in blocks.items():
        if block.policy is not None:
            model = summaries[block.policy]
            if "scores" not in dict(model.decisions) or model.sample_kind != summary.sample_kind:
                raise UserError(
                    f"reward {name!r}: policy {block.policy!r} ({model.model}) is no reward model for "
                    f"{summary.sample_kind}; take one of type text_reward_model or image_text_reward_model."
                )
            reads[name] = model.reads
            size += model.weights.parameters * getattr(torch, getattr(block, "dtype", "float32")).itemsize
    return reads, size


def _too_long(reads: Mapping[str, int | None], prompt: int, sampling: Any) -> list[Doubt]:
    """Of rewards that may be given more tokens than they read: a prompt of `prompt` tokens and the longest sample."""
    new = sample_limit(sampling)
    return [
        (
            ("rewards", name),
            f"it reads at most {most} tokens, and a prompt of {prompt} with sampling.max_new_tokens: {new} can have "
            f"{prompt + new} (by the policy's tokenizer). Longer samples are left out and counted. Lower "
            "max_new_tokens, or take a model that reads more.",
        )
        for name, most in reads.items()
        if most is not None and new and prompt + new > most
    ]


def _check_records(block: Any, seed: int, summary: PolicySummary, algorithm: AlgorithmSettings) -> None:
    records = block.build(seed)
    records.check_kind(summary.sample_kind)
    samples = min(len(record.samples) for record in records.first(FIRST_RECORDS))
    algorithm.check_policy(summary, samples)
    algorithm.check_labels(records.labels)
    if records.kind == "text":
        longest = [(record.prompt, text) for record in records.longest(LONGEST_RECORDS) for text in record.samples]
        summary.fit_given(*zip(*longest, strict=True))


def _check_evaluation(
    config: RunConfig, stage: StageConfig, evaluation: EvaluationSettings, summaries: Mapping[str, PolicySummary]
) -> _Found:
    summary = summaries[stage.policy]
    if "scores" in dict(summary.decisions):
        raise UserError(
            f"policy {stage.policy!r} is a reward model and samples nothing to evaluate; remove the block. "
            "`preference/accuracy` of the training says how well it orders pairs that it has not seen yet."
        )
    seeded_generator(evaluation.seed)
    stream = evaluation.prompts.build(config.seed)
    _check_rewards(stage.rewards, summaries, summary, stream)
    reads, size = _check_rewards(evaluation.rewards, summaries, summary, stream)
    sampling = evaluation_sampling(config.policies[stage.policy], evaluation)
    doubts = _too_long(reads, summary.fit(_longest(evaluation.prompts, stream), sampling), sampling)
    if stream.size is not None and stream.size < evaluation.count:
        doubts.append(
            (
                ("count",),
                f"{evaluation.count} held-out prompts are asked for, but there are only {stream.size}; all of them are "
                "used.",
            )
        )
    return _Found(doubts, reward_bytes=size)


def _longest(block: Any, stream: PromptStream) -> list[Any]:
    """The longest prompts: of a file's all, of a generator's the first ones."""
    is_file = isinstance(block, FilePromptsConfig) and stream.size is not None
    seen = stream.first(stream.size if is_file else GENERATED_RECORDS)  # type: ignore[arg-type]
    return heapq.nlargest(LONGEST_RECORDS, seen, key=lambda prompt: len(prompt.text))


def check_from_yaml(path: str | Path, overrides: Sequence[str] = (), ranks: int | None = None) -> None:
    """Validates everything without training, and prints parameters, trainable shares and a memory estimate.

    Raises UserError for what `train` would refuse, the run's folder included.

    `ranks` is the number of processes to plan for; None is as many as a launcher has started.
    """
    loaded = load_yaml(path, overrides)
    config = validate(RunConfig, loaded)
    launch = launched()
    ranks = launch.world_size if ranks is None else ranks
    on_node = launch.local_world_size if ranks == launch.world_size else ranks
    with said_at(loaded, ("engine",)):
        config.engine.splits(ranks)
    check_shares(config, loaded, max(1, ranks // getattr(config.engine, "tensor_parallel", 1)))
    known = preflight(config, loaded)
    available = available_memory(config.engine.resolve_device(), on_node)
    plan = plan_rollouts(config, known, ranks, available)
    console = Console()
    table = Table(title=f"{config.name}: policies")
    for column in ("policy", "model", "parameters", "trainable", "share", "attention"):
        table.add_column(column, overflow="fold")
    for name, summary in known.summaries.items():
        weights = summary.weights
        share = f"{weights.trainable / weights.parameters:.2%}"
        table.add_row(
            name, summary.model, f"{weights.parameters:,}", f"{weights.trainable:,}", share, summary.attention
        )
    console.print(table)
    for index, stage in enumerate(config.stages):
        sizes = estimate(config, index, known, ranks, gathered=plan is None or plan.gathered)
        console.print(
            f"stage {index + 1} [bold]{stage.name}[/]: {stage.algorithm.name} on {stage.policy}, {_learns_from(stage)}"
            f"; ends at {stage.until.in_words()}"
        )
        unknown = "" if known.summaries[stage.policy].rows else "; cache and activations of this policy are not known"
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        console.print(f"  memory about {in_words(sizes['peak'])}{each}: {describe(sizes)}{unknown}")
    if plan is not None:
        console.print(f"rollout weights: {plan.in_words()}")
    console.print(f"memory of a process here: {in_words(available / GIB)}")
    fewest = config.engine.fewest_ranks
    if ranks < fewest:
        console.print(
            f"checked for {ranks} process{'es' * (ranks > 1)}; the engine's block is for {fewest} or more: `--ranks "
            f"{fewest}` checks for those, `torchrun --nproc-per-node {fewest} -m uniml_rl train {path}` starts them"
        )
    check_folder(folder_of(config), config, loaded)
    console.print("[green]the configuration is valid[/]")


def _learns_from(stage: StageConfig) -> str:
    if stage.group_size is None:
        return f"{stage.prompts_per_iteration} records per iteration"
    rows = stage.prompts_per_iteration * stage.group_size
    return (
        f"{stage.prompts_per_iteration} prompts x {stage.group_size} samples = {rows} per iteration, "
        f"rewards {', '.join(stage.rewards)}"
    )
