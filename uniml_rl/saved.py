"""What is done with a run after (or while) it trains: sample from it, evaluate it, export its policies."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from modalities.base import Policy, Request
from modalities.errors import UserError, did_you_mean
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Text
from modalities.sources import loading
from uniml_rl.build import (
    EvaluationSettings,
    RunConfig,
    StageConfig,
    build_policy,
    build_rewards,
    evaluation_sampling,
    part_names,
)
from uniml_rl.checkpoint import MANIFEST, Checkpoint, CheckpointStore, load_checkpoint
from uniml_rl.config import TypedBlock, load_yaml, overlay, validate
from uniml_rl.evaluation import Evaluator, held_out_names, summary
from uniml_rl.export import export_policy
from uniml_rl.families import POLICIES
from uniml_rl.monitor.progress import make_console
from uniml_rl.monitor.samples import save_each, save_samples, shown_text
from uniml_rl.monitor.tables import printable_lines
from uniml_rl.run_folder import CONFIG_FILE

_MODEL_FILES = {
    "model_index.json": ("_class_name", {"WanPipeline": "video"}, "image"),
    "config.json": ("model_type", {"musicgen": "audio"}, "text"),
}
"""By file: the key that says what the model is, the type of policy for its values, and for any other value."""
_SEED_STAGE = -1


@dataclass(frozen=True)
class SavedRun:
    """A run's folder (or one of its checkpoints) with its configuration."""

    folder: Path
    config: RunConfig
    checkpoint: Path | None
    device: str = "cpu"

    def policy_name(self, name: str | None) -> str:
        """The policy asked for, or the one that trained last. Raises UserError for an unknown name."""
        if name is None:
            return self.last_stage().policy
        if name not in self.config.policies:
            raise UserError(
                f"{self.folder} has no policy {name!r}; it has {sorted(self.config.policies)}"
                + did_you_mean(name, self.config.policies)
            )
        return name

    @cached_property
    def _saved(self) -> Checkpoint | None:
        return load_checkpoint(self.checkpoint) if self.checkpoint is not None else None

    def last_stage(self) -> StageConfig:
        """The last stage that has trained; the first one if there is no checkpoint to tell."""
        if self._saved is None:
            return self.config.stages[0]
        position = self._saved.state["position"]
        # Between two stages the position is the next one's, of which nothing has happened yet.
        return self.config.stages[max(0, position["stage"] - (position["iteration"] == 0))]

    def has_weights(self, name: str) -> bool:
        """Whether the checkpoint holds the policy's weights, its own or those of all its parts."""
        held = self._saved.weights.keys() if self._saved is not None else set()
        parts = part_names(self.config.policies[name])
        return name in held or bool(parts and held >= set(parts))

    def build(self, name: str) -> Policy:
        """The policy with its newest weights: from the checkpoint, else from the export of its last stage.

        Raises UserError if neither holds any.
        """
        if self._saved is not None and self.has_weights(name):
            policy = build_policy(self.config, name, self.device, built=self.build)
            if name in self._saved.weights:
                policy.load_weight_state(self._saved.weights[name])
            return policy
        exported = self.folder / "export" / name
        if exported.is_dir():
            folders = {part: exported / part for part in part_names(self.config.policies[name])} or {name: exported}
            plain = {own: self._exported(own, folder) for own, folder in folders.items()}
            config = self.config.model_copy(update={"policies": {**self.config.policies, **plain}})
            return build_policy(config, name, self.device)
        raise UserError(f"{self.folder} holds no weights of policy {name!r} yet: no checkpoint and no export.")

    def _exported(self, name: str, folder: Path) -> Any:
        """The policy's block with its exported folder as the model."""
        block = self.config.policies[name]
        keys = {"model": str(folder), "lora": None}
        if "model" not in type(block).model_fields:
            raise UserError(
                f"policy {name!r} is not in the checkpoint, and {type(block).__name__} has no key `model` by which its "
                f"export {folder} could be opened. Name a checkpoint that holds it."
            )
        return block.model_copy(update={key: value for key, value in keys.items() if key in type(block).model_fields})


def open_run(source: str | Path, overrides: Sequence[str] = ()) -> SavedRun:
    """A run's folder, or one checkpoint inside it, its configuration changed by `overrides`.

    Raises UserError that says what was found instead.
    """
    path, checkpoint = Path(source), None
    if (path / MANIFEST).is_file():
        folder, checkpoint = path.parent.parent, path
    elif (path / CONFIG_FILE).is_file():
        folder, checkpoint = path, CheckpointStore(path / "checkpoints", keep=1).latest()
    else:
        state = f"has no {CONFIG_FILE} and no {MANIFEST}" if path.exists() else "does not exist"
        raise UserError(f"{path} {state}: expected a run's folder or a checkpoint{_nearest_run(path)}")
    config = validate(RunConfig, load_yaml(folder / CONFIG_FILE, overrides))
    return SavedRun(folder, config, checkpoint, config.engine.resolve_device())


def _is_run(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() or (path / MANIFEST).is_file()


def _nearest_run(path: Path) -> str:
    siblings = path.parent.glob("*") if path.parent.is_dir() else []
    return did_you_mean(str(path), [str(other) for other in siblings if _is_run(other)])


def sample_from(
    source: str,
    prompts: Sequence[str],
    number: int,
    seed: int,
    out: str | Path | None,
    overrides: Sequence[str] = (),
    policy: str | None = None,
) -> Path:
    """Samples from a run, a checkpoint or a plain model folder, writes the samples and returns the file to look at.

    `overrides` are `key=value` of the policy's `sampling` block.
    """
    for position, text in enumerate(prompts):
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"prompt {position} must be a text that is not blank, but is {text!r}.")
    if out is not None and Path(out).exists() and not Path(out).is_dir():
        raise UserError(f"--out {out} is a file; name a folder for the samples.")
    if _is_run(Path(source)):
        run = open_run(source)
        name = run.policy_name(policy)
        model, target = run.build(name), Path(out or run.folder / "samples" / "by_hand")
    else:
        if policy is not None:
            raise UserError(f"--policy {policy}: {source} is no run, so it has no policies to choose from.")
        model, target = _plain_model(Path(source)), Path(out or "samples")
    sampling = _override_sampling(model.sampling, overrides)
    chosen = [Prompt(text, index) for index, text in enumerate(prompts)]
    requests = [
        Request(prompt, prompt.index, SampleKey(seed, _SEED_STAGE, 0, prompt.index, sample))
        for prompt in chosen
        for sample in range(number)
    ]
    with torch.no_grad():
        trajectory = model.rollout(requests, sampling)
        samples = model.decode(trajectory)
    prompts_of_samples = trajectory.leaf_prompts()
    each = _fresh_folder(target, f"seed-{seed}")
    save_each(each, samples, prompts_of_samples)
    path = save_samples(target, each.name, samples, prompts_of_samples, {}, rows=len(chosen))
    console = make_console()
    for prompt, drawn in zip(prompts_of_samples, samples, strict=True):
        if isinstance(drawn, Text):
            console.print(Styled("\n".join(printable_lines(prompt.text)), style="bold"), soft_wrap=True)
            console.print(Styled("\n".join(f"  {line}" for line in printable_lines(shown_text(drawn)))), soft_wrap=True)
    count = f"{len(samples)} sample{'s' * (len(samples) != 1)}"
    console.print(f"{count}: [bold]{path}[/], each by itself in {each}", soft_wrap=True)
    return path


def _fresh_folder(parent: Path, name: str) -> Path:
    """A new folder `name`, or `name-2` ... where files of an earlier call are."""
    numbered = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    files = ("", ".md", ".png")
    free = next(name for name in numbered if not any((parent / f"{name}{ending}").exists() for ending in files))
    (parent / free).mkdir(parents=True)
    return parent / free


def _plain_model(folder: Path) -> Policy:
    kind = _kind_of_model(folder)
    if kind is None:
        state = f"has none of {CONFIG_FILE}, {MANIFEST}, {', '.join(_MODEL_FILES)}"
        raise UserError(
            f"{folder} {state if folder.exists() else 'does not exist'}: expected a run's folder, a checkpoint or a "
            f"model's folder{_nearest_run(folder)}"
        )
    config = TypedBlock(POLICIES, "policy").import_class(kind).model_validate({"type": kind, "model": str(folder)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return config.build("sampled", device, 0)  # type: ignore[attr-defined]


def _kind_of_model(folder: Path) -> str | None:
    """The type of the policy that a model's folder is for, by what its configuration says of it."""
    for file, (key, kinds, otherwise) in _MODEL_FILES.items():
        if (folder / file).is_file():
            with loading(str(folder)):
                stated = json.loads((folder / file).read_text(encoding="utf-8")).get(key)
            return kinds.get(str(stated), otherwise)
    return None


def _override_sampling(sampling: Any, overrides: Sequence[str]) -> Any:
    if not overrides:
        return sampling
    if sampling is None:
        raise UserError(f"{', '.join(overrides)}: this policy has no sampling settings to change.")
    return validate(type(sampling), overlay(sampling.model_dump(by_alias=True), overrides, "sampling"))


def evaluate_from(source: str, overrides: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Evaluates a run's newest weights (or the initial weights of a YAML file) on the held-out prompts of every stage
    begun; prints and returns the mean of each reward, by stage. A stage that cannot be evaluated is named.

    Raises UserError if there is none that can.
    """
    if Path(source).is_file():
        config = validate(RunConfig, load_yaml(source, overrides))
        begun = config.stages
        build: Callable[[str], Policy] = partial(build_policy, config, device=config.engine.resolve_device())
    else:
        run = open_run(source, overrides)
        config, build = run.config, run.build
        begun = config.stages[: config.stages.index(run.last_stage()) + 1]
    console, means, problems = make_console(), dict[str, dict[str, float]](), list[str]()
    for stage in begun:
        try:
            if stage.evaluation is None:
                raise UserError(f"stage {stage.name!r} has no `evaluation` block, so there is nothing to evaluate on.")
            policy = build(stage.policy)
            means[stage.name] = _evaluate_stage(source, config, stage, stage.evaluation, policy, console)
        except UserError as error:
            problems.append(str(error))
    if not means:
        raise UserError(f"{source}: {' '.join(problems)}")
    for problem in problems:
        console.print(Styled(f"not evaluated: {problem}", style="yellow"), soft_wrap=True)
    return means


def _evaluate_stage(
    source: str,
    config: RunConfig,
    stage: StageConfig,
    settings: EvaluationSettings,
    policy: Policy,
    console: Console,
) -> dict[str, float]:
    device = config.engine.resolve_device()
    evaluator = Evaluator(
        policy,
        settings.prompts.build(config.seed).first(settings.count),
        build_rewards(stage.rewards, device, Path(source)),
        build_rewards(settings.rewards, device, Path(source)),
        settings,
        evaluation_sampling(config.policies[stage.policy], settings),
        config.engine.build(),
        config.stages.index(stage),
    )
    means = summary(evaluator.run())
    if evaluator.rewards is not None:
        evaluator.rewards.close()
    evaluator.close()
    table = Table(title=f"{source}: stage {stage.name}, {len(evaluator.prompts)} held-out prompts")
    table.add_column("reward")
    table.add_column("mean", justify="right")
    for name, mean in means.items():
        table.add_row(name + (" (held out)" if name in held_out_names(settings) else ""), f"{mean:.4f}")
    console.print(table)
    return dict(means)


def export_from(source: str, to: str | Path, policy: str | None = None) -> Path:
    """Writes a policy of a run as a plain model folder. Raises UserError if the target exists."""
    run, target = open_run(source), Path(to)
    if target.exists():
        raise UserError(f"{target} exists; remove it or name another folder.")
    name = run.policy_name(policy)
    exported = run.folder / "export" / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}. Choose another folder.") from None
    if exported.is_dir() and not run.has_weights(name):
        shutil.copytree(exported, target)
    else:
        export_policy(run.build(name), target)
    Console().print(f"exported policy {name!r} to [bold]{target}[/]")
    return target
