"""What is done with a run after (or while) it trains: sample from it, evaluate it, export its policies."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from modalities.base import Policy, Request
from modalities.errors import UserError, did_you_mean
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from rewards.combine import RewardSet
from uniml_rl.build import POLICIES, RunConfig, StageConfig, build_policy, evaluation_sampling, part_names
from uniml_rl.checkpoint import MANIFEST, CheckpointStore, load_checkpoint
from uniml_rl.config import TypedBlock, load_yaml, overlay, validate
from uniml_rl.evaluation import Evaluator, held_out_names, summary
from uniml_rl.export import export_policy
from uniml_rl.monitor.samples import save_samples
from uniml_rl.run import CONFIG_FILE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_MODEL_FILES = {"model_index.json": "image", "config.json": "text"}
_SEED_STAGE = -1


@dataclass(frozen=True)
class SavedRun:
    """A run's folder (or one of its checkpoints) with its configuration."""

    folder: Path
    config: RunConfig
    checkpoint: Path | None

    def policy_name(self, name: str | None) -> str:
        """The policy asked for, or the one that trained last. Raises UserError for an unknown name."""
        if name is None:
            return self.last_stage(None).policy
        if name not in self.config.policies:
            raise UserError(
                f"{self.folder} has no policy {name!r}; it has {sorted(self.config.policies)}"
                + did_you_mean(name, self.config.policies)
            )
        return name

    def last_stage(self, policy: str | None) -> StageConfig:
        """The last stage begun, of a policy or of any."""
        index = len(self.config.stages) - 1
        if self.checkpoint is not None:
            index = min(index, load_checkpoint(self.checkpoint).state["position"]["stage"])
        stages = [s for s in self.config.stages[: index + 1] if policy is None or s.policy == policy]
        return stages[-1] if stages else self.config.stages[0]

    def build(self, name: str) -> Policy:
        """The policy with its newest weights: from the checkpoint, else from the export of its last stage."""
        weights = load_checkpoint(self.checkpoint).weights if self.checkpoint is not None else {}
        parts = part_names(self.config.policies[name])
        if name in weights or (parts and weights.keys() >= set(parts)):
            policy = build_policy(self.config, name, DEVICE, built=self.build)
            if name in weights:
                policy.load_weight_state(weights[name])
            return policy
        exported = self.folder / "export" / name
        if exported.is_dir():
            folders = {part: exported / part for part in parts} or {name: exported}
            plain = {
                own: self.config.policies[own].model_copy(update={"model": str(folder), "lora": None})
                for own, folder in folders.items()
            }
            config = self.config.model_copy(update={"policies": {**self.config.policies, **plain}})
            return build_policy(config, name, DEVICE)
        raise UserError(f"{self.folder} holds no weights of policy {name!r} yet: no checkpoint and no export.")


def open_run(source: str | Path, overrides: Sequence[str] = ()) -> SavedRun:
    """A run's folder, or one checkpoint inside it, its configuration changed by `overrides`.

    Raises UserError that says what was found instead.
    """
    path = Path(source)
    if (path / MANIFEST).is_file():
        folder, checkpoint = path.parent.parent, path
    elif (path / CONFIG_FILE).is_file():
        folder, checkpoint = path, CheckpointStore(path / "checkpoints", keep=1).latest()
    else:
        siblings = [str(other) for other in path.parent.glob("*")] if path.parent.is_dir() else []
        state = f"has no {CONFIG_FILE} and no {MANIFEST}" if path.exists() else "does not exist"
        raise UserError(f"{path} {state}: expected a run's folder or a checkpoint" + did_you_mean(str(path), siblings))
    return SavedRun(folder, validate(RunConfig, load_yaml(folder / CONFIG_FILE, overrides)), checkpoint)


def _is_run(source: str) -> bool:
    return (Path(source) / CONFIG_FILE).is_file() or (Path(source) / MANIFEST).is_file()


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
    if _is_run(source):
        run = open_run(source)
        name = run.policy_name(policy)
        model, target = run.build(name), Path(out or run.folder / "samples" / "by_hand")
    else:
        model, target = _plain_model(source), Path(out or "samples")
    sampling = _override_sampling(model.sampling, overrides)
    chosen = [Prompt(text, index) for index, text in enumerate(prompts)]
    requests = [
        Request(prompt, prompt.index, SampleKey(seed, _SEED_STAGE, 0, prompt.index, sample))
        for prompt in chosen
        for sample in range(number)
    ]
    with torch.no_grad():
        samples = model.decode(model.rollout(requests, sampling))
    path = save_samples(target, f"seed-{seed}", samples, [r.prompt for r in requests], {})
    Console().print(f"{len(samples)} samples: [bold]{path}[/]")
    return path


def _plain_model(source: str) -> Policy:
    folder = Path(source)
    kinds = [kind for file, kind in _MODEL_FILES.items() if (folder / file).is_file()]
    if not kinds:
        raise UserError(
            f"{source} is neither a run, a checkpoint nor a model folder: it has none of {CONFIG_FILE}, {MANIFEST}, "
            f"{', '.join(_MODEL_FILES)}."
        )
    config = TypedBlock(POLICIES, "policy").import_class(kinds[0])(type=kinds[0], model=source)
    return config.build("sampled", DEVICE, 0)  # type: ignore[attr-defined]


def _override_sampling(sampling: Any, overrides: Sequence[str]) -> Any:
    if not overrides:
        return sampling
    return validate(type(sampling), overlay(sampling.model_dump(by_alias=True), overrides, "sampling"))


def evaluate_from(source: str, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Evaluates a run's newest weights (or the initial weights of a YAML file) on the held-out prompts of the last
    stage begun; prints and returns the mean of each reward."""
    if Path(source).is_file():
        config = validate(RunConfig, load_yaml(source, overrides))
        stage = next((s for s in reversed(config.stages) if s.evaluation is not None), config.stages[-1])
        policy = build_policy(config, stage.policy, DEVICE)
    else:
        run = open_run(source, overrides)
        config, stage = run.config, run.last_stage(None)
        policy = run.build(stage.policy)
    if stage.evaluation is None:
        raise UserError(
            f"{source}: stage {stage.name!r} has no `evaluation` block, so there is nothing to evaluate on."
        )
    evaluator = Evaluator(
        policy,
        stage.evaluation.prompts.build(config.seed).first(stage.evaluation.count),
        RewardSet.build(stage.rewards, DEVICE),
        RewardSet.build(stage.evaluation.rewards, DEVICE) if stage.evaluation.rewards else None,
        stage.evaluation,
        evaluation_sampling(config.policies[stage.policy], stage.evaluation),
        config.engine.build(),
        config.stages.index(stage),
    )
    means = summary(evaluator.run(iteration=10**9))
    table = Table(title=f"{source}: stage {stage.name}, {len(evaluator.prompts)} held-out prompts")
    table.add_column("reward")
    table.add_column("mean", justify="right")
    for name, mean in means.items():
        table.add_row(name + (" (held out)" if name in held_out_names(stage.evaluation) else ""), f"{mean:.4f}")
    Console().print(table)
    return dict(means)


def export_from(source: str, to: str | Path, policy: str | None = None) -> Path:
    """Writes a policy of a run as a plain model folder. Raises UserError if the target exists."""
    run, target = open_run(source), Path(to)
    if target.exists():
        raise UserError(f"{target} exists; remove it or name another folder.")
    name = run.policy_name(policy)
    exported = run.folder / "export" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if exported.is_dir() and run.checkpoint is not None and name not in load_checkpoint(run.checkpoint).weights:
        shutil.copytree(exported, target)
    else:
        export_policy(run.build(name), target)
    Console().print(f"exported policy {name!r} to [bold]{target}[/]")
    return target
