"""YAML to objects: the schema of a run, and what is built from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from modalities.base import Policy, PolicyConfig, PolicySummary
from modalities.critic import Critic, CriticSettings
from modalities.errors import did_you_mean
from modalities.forward_process import ForwardProcessSettings
from modalities.settings import Settings
from rewards.base import RewardConfig
from rewards.combine import RewardSet
from uniml_rl.algorithms.direct_settings import SupervisedSettings
from uniml_rl.algorithms.parts import AggregationSettings
from uniml_rl.algorithms.presets import merge_preset
from uniml_rl.algorithms.settings import AnyAlgorithm
from uniml_rl.config import overlay, validate
from uniml_rl.engines.base import PRECISIONS
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.families import OBJECTIVES, EngineBlock, PolicyBlock, PromptsBlock, RecordsBlock, RewardBlock
from uniml_rl.objectives.base import Objective
from uniml_rl.schema import mistake_at
from uniml_rl.until import UntilSettings

TOTAL = "total"
"""Name of the weighted sum of the rewards beside the single ones."""
CRITIC = "critic"
"""Name of the critic beside the policies, in files and metrics."""

AlgorithmBlock = Annotated[AnyAlgorithm, BeforeValidator(merge_preset)]


class EvaluationSettings(Settings):
    """Held-out prompts, sampled with fixed seeds: before the stage, every N iterations, and after it."""

    prompts: PromptsBlock
    """Held-out prompts."""
    count: int = Field(default=64, ge=1)
    """How many of them, from the first on."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Samples of each prompt."""
    every: int | None = Field(default=None, ge=1)
    """Iterations between evaluations within the stage; None evaluates only before and after it."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Keys of the policy's `sampling` block that evaluation replaces (a deterministic sampler, more steps ...)."""
    rewards: dict[str, RewardBlock] = Field(default_factory=dict)
    """Rewards that are measured here and never trained on: held-out judges."""
    rows_at_once: int = Field(default=64, ge=1)
    """Samples of one rollout of the evaluation: memory and speed, not the result."""
    seed: int = 1234
    """Seed of the evaluation's samples, the same at every evaluation."""


class CriticStageSettings(CriticSettings):
    """The critic of an algorithm that needs values."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-3)
    """The critic's own optimizer."""


class EmaSettings(Settings):
    """An exponential moving average of the trainable weights, evaluated beside them."""

    decay: float = Field(default=0.99, ge=0, lt=1)
    """Share of the old average that is kept per iteration."""


class AuxiliarySettings(Settings):
    """A supervised loss on given samples (pretraining data) beside the algorithm's own, against forgetting."""

    records: RecordsBlock
    """The samples."""
    records_per_step: int = Field(ge=1)
    """Records of one optimizer step, over all ranks."""
    weight: float = Field(gt=0)
    """Factor of the loss."""
    forward: ForwardProcessSettings = ForwardProcessSettings()
    """For denoising models: at which times of the forward process they are scored. Tokens do not read it."""
    aggregation: AggregationSettings = AggregationSettings()
    """From decisions to one number."""

    @property
    def algorithm(self) -> SupervisedSettings:
        """The loss, as the algorithm that it is."""
        return SupervisedSettings(name="auxiliary", forward=self.forward, aggregation=self.aggregation)


class RehearsalSettings(Settings):
    """A share of an earlier stage's prompts, scored by that stage's rewards, against forgetting."""

    stage: str
    """Name of the earlier stage; it must train the same policy."""
    share: float = Field(gt=0, lt=1)
    """Share of each iteration's prompts."""


class StageConfig(Settings):
    """One stage of the curriculum."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_-]+$")
    """Name of the stage, in file names and logs."""
    policy: str
    """Name of the policy, from `policies`, that this stage trains."""
    prompts: PromptsBlock | None = None
    """Training prompts, which the policy makes samples of."""
    records: RecordsBlock | None = None
    """Prompts with given samples, in place of `prompts`, for algorithms that learn from data."""
    prompts_per_iteration: int = Field(ge=1)
    """Prompts of one rollout, or records, over all ranks."""
    group_size: int | None = Field(default=None, ge=1)
    """Samples per prompt; given exactly when there are `prompts`."""
    rewards: dict[str, RewardBlock] = Field(default_factory=dict)
    """Rewards by name; the total is their weighted sum. Given exactly when there are `prompts`."""
    reward_control: Literal["none", "shuffle"] = "none"
    """`shuffle` permutes the total rewards among an iteration's samples: a control that must not learn."""
    algorithm: AlgorithmBlock
    """Name of an algorithm and overrides of its parts."""
    optimizer: OptimizerSettings
    """The policy's optimizer."""
    critic: CriticStageSettings | None = None
    """The critic; needed by algorithms with a value part, refused by others."""
    micro_batch: int = Field(default=8, ge=1)
    """Rows of one forward and backward pass. It changes memory and speed, not the gradient."""
    until: UntilSettings
    """When the stage ends."""
    evaluation: EvaluationSettings | None = None
    """Held-out evaluation."""
    ema: EmaSettings | None = None
    """Moving average of the weights."""
    auxiliary: AuxiliarySettings | None = None
    """A supervised loss beside the algorithm's own."""
    rehearsal: list[RehearsalSettings] = Field(default_factory=list)
    """Earlier stages to rehearse."""

    @model_validator(mode="after")
    def _fits(self) -> StageConfig:
        algorithm, name = self.algorithm, self.algorithm.name
        if (self.prompts is None) == (self.records is None):
            raise ValueError("give either `prompts` (the policy makes samples) or `records` (samples are given)")
        source = "prompts" if self.records is None else "records"
        if ("rollouts" if self.records is None else "records") not in algorithm.learns_from:
            other = "records (given samples)" if self.records is None else "prompts (samples of the policy's own)"
            raise ValueError(f"{source}: algorithm {name!r} learns from {other}; give those")
        for key, given in (("group_size", self.group_size is not None), ("rewards", bool(self.rewards))):
            if given != (self.records is None):
                problem = "is missing" if self.records is None else "is not read: records bring samples and labels"
                raise ValueError(f"{key}: {problem}")
        if self.records is not None:
            if self.until.iterations is None or self.until.reward or self.until.plateau:
                raise ValueError("until: records have no rewards to wait for; give `iterations` alone")
            if self.evaluation is not None and not self.evaluation.rewards:
                raise ValueError("evaluation.rewards: records have no rewards to evaluate with; name some here")
            if self.rehearsal or self.reward_control != "none":
                raise ValueError("rehearsal and reward_control are about rewards of rollouts; records have none")
        if algorithm.compares_groups and self.group_size is not None and self.group_size < 2:
            raise ValueError(
                f"group_size: {self.group_size} with algorithm {name!r}, which compares the samples of "
                "a prompt with each other: nothing could be learned; use at least 2"
            )
        if self.rewards and all(reward.weight == 0 for reward in self.rewards.values()):
            raise ValueError(f"rewards: {', '.join(self.rewards)}: every weight is 0, so none is trained on; give one")
        if algorithm.follows_gradient and self.reward_control == "shuffle":
            raise ValueError(
                f"reward_control: shuffle permutes numbers, and algorithm {name!r} follows the rewards' gradients, "
                "which no permutation reaches; remove it"
            )
        if algorithm.per_reward:
            compared = sorted(name for name, reward in self.rewards.items() if reward.weight != 0)
            if len(compared) < 2:
                raise ValueError(
                    "algorithm.advantage.normalisation: per_reward keeps rewards of unlike spread from drowning each "
                    f"other, and only {', '.join(compared) or 'none'} has a weight; use normalisation: total"
                )
            if self.reward_control == "shuffle":
                raise ValueError(
                    "reward_control: shuffle permutes the total of the rewards, which algorithm.advantage."
                    "normalisation: per_reward does not read; use normalisation: total for the control"
                )
        if algorithm.needs_critic != (self.critic is not None):
            problem = (
                "needs a `critic` block" if self.critic is None else "has no use for the `critic` block; remove it"
            )
            raise ValueError(f"algorithm {name!r} {problem}")
        rows = self.prompts_per_iteration * (self.group_size or 1)
        if algorithm.minibatches > rows:
            raise ValueError(
                f"algorithm.minibatches: {algorithm.minibatches} optimizer steps cannot share the {rows} "
                + ("samples of an iteration (prompts_per_iteration x group_size)" if self.prompts else "")
                + ("records of an iteration (prompts_per_iteration)" if self.records else "")
            )
        warm_up = algorithm.policy_waits
        if warm_up and self.until.iterations is not None and warm_up >= self.until.iterations:
            raise ValueError(
                f"algorithm.value.warm_up_iterations: {warm_up}: the critic alone learns in them, and the stage ends "
                f"after {self.until.iterations} (until.iterations), so the policy never would; give less"
            )
        if self.ema is not None and self.evaluation is None:
            raise ValueError("ema: only the evaluation uses the average; add an `evaluation` block or remove `ema`")
        return self

    @model_validator(mode="after")
    def _rewards_are_told_apart(self) -> StageConfig:
        judges = self.evaluation.rewards if self.evaluation is not None else {}
        for name in [*self.rewards, *judges]:
            if name == TOTAL or "/" in name:
                raise ValueError(f"reward {name!r}: names hold no '/', and {TOTAL!r} is the weighted sum's own name")
        if both := sorted(self.rewards.keys() & judges.keys()):
            raise ValueError(f"evaluation.rewards {both}: a reward of the stage has the same name, and is measured too")
        return self


class CheckpointSettings(Settings):
    """When checkpoints are written and how many are kept."""

    every: int = Field(default=5, ge=1)
    """Iterations between checkpoints; the end of a stage always writes one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints to keep."""
    asynchronous: bool = False
    """Write them beside the next iteration, from a copy of weights and moments in the CPU's memory; a checkpoint counts
    when that iteration ends."""


class RunConfig(Settings):
    """A whole run: policies and the stages that train them."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the run."""
    folder: str | None = None
    """Where everything is written; None is `runs/<name>`."""
    seed: int = 0
    """Seed of everything random."""
    policies: dict[str, PolicyBlock] = Field(min_length=1)
    """The models, by name."""
    stages: list[StageConfig] = Field(min_length=1)
    """The curriculum, in order."""
    engine: EngineBlock = Field(default_factory=lambda: {"type": "torch"})
    """Who computes: device, precision, sharding."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""

    @field_validator("policies")
    @classmethod
    def _policies_have_files(cls, policies: dict[str, Any]) -> dict[str, Any]:
        for name in policies:
            if name == CRITIC or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(
                    f"policy {name!r}: a name is also that of files, so it is made of letters, digits, '_' and '-'; "
                    f"{CRITIC!r} is the critic's own"
                )
        return policies

    @field_validator("stages")
    @classmethod
    def _names_fit(cls, stages: list[StageConfig], info: ValidationInfo) -> list[StageConfig]:
        policies = info.data.get("policies", {})
        seen: dict[str, StageConfig] = {}
        for index, stage in enumerate(stages):
            if stage.name in seen:
                raise mistake_at((index, "name"), "another stage has this name; names are unique", stage.name)
            if policies and stage.policy not in policies:
                message = f"must be one of the policies {sorted(policies)}{did_you_mean(stage.policy, policies)}"
                raise mistake_at((index, "policy"), message, stage.policy)
            for number, rehearsal in enumerate(stage.rehearsal):
                earlier = seen.get(rehearsal.stage)
                if earlier is None or earlier.policy != stage.policy or earlier.prompts is None:
                    message = (
                        f"must be an earlier stage of policy {stage.policy!r} that has prompts"
                        f"{did_you_mean(rehearsal.stage, seen.keys() - {rehearsal.stage})}"
                    )
                    raise mistake_at((index, "rehearsal", number, "stage"), message, rehearsal.stage)
            shares = [rehearsal.share for rehearsal in stage.rehearsal]
            if sum(shares) >= 1:
                raise mistake_at((index, "rehearsal"), "the shares add up to 1 or more", shares)
            seen[stage.name] = stage
        return stages

    @model_validator(mode="after")
    def _reward_models_come_first(self) -> RunConfig:
        trained: list[str] = []
        for index, stage in enumerate(self.stages):
            judges = stage.evaluation.rewards if stage.evaluation is not None else {}
            for place, blocks in ((("rewards",), stage.rewards), (("evaluation", "rewards"), judges)):
                for name, block in blocks.items():
                    if block.policy is not None and block.policy not in trained:
                        message = (
                            f"must be a reward model that an earlier stage trains; there are {trained or 'none'}"
                            f"{did_you_mean(block.policy, trained)}"
                        )
                        raise mistake_at(("stages", index, *place, name, "model"), message, block.policy)
            trained.append(stage.policy)
        return self

    @model_validator(mode="after")
    def _policies_are_used(self) -> RunConfig:
        for name, block in self.policies.items():
            for number, part in enumerate(part_names(block)):
                if part not in self.policies:
                    message = f"must be one of the policies {sorted(self.policies)}{did_you_mean(part, self.policies)}"
                    raise mistake_at(("policies", name, "parts", number), message, part)
        unused = sorted(set(self.policies) - policies_of(self, self.stages))
        if unused:
            raise mistake_at(
                ("policies", unused[0]), "no stage trains this policy; remove it", self.policies[unused[0]]
            )
        for index, stage in enumerate(self.stages):
            if stage.evaluation is not None:
                try:
                    evaluation_sampling(self.policies[stage.policy], stage.evaluation)
                except ValueError as error:
                    message = str(error).removeprefix("evaluation.sampling: ")
                    raise mistake_at(("stages", index, "evaluation", "sampling"), message, {}) from None
        return self


def part_names(policy_config: Any) -> list[str]:
    """The policies that a policy is made of, by name; usually none."""
    return list(getattr(policy_config, "parts", []))


def policies_of(config: RunConfig, stages: Sequence[StageConfig]) -> set[str]:
    """The policies that these stages train, and the parts of those."""
    trained = {stage.policy for stage in stages}
    return trained | {part for name in trained for part in part_names(config.policies[name])}


EXPORTS = "export"
"""Folder of a run that holds every trained model, by the policy's name."""


def build_rewards(blocks: Mapping[str, RewardConfig], device: str, run: Path) -> RewardSet | None:
    """The rewards of a stage, None without any; reward models that the run has trained come from its exports."""
    if not blocks:
        return None
    trained = {
        name: block if block.policy is None else block.with_model(run / EXPORTS / block.policy)
        for name, block in blocks.items()
    }
    return RewardSet.build(trained, device)


def build_objective(settings: AnyAlgorithm, critic: Critic | None, rewards: RewardSet | None) -> Objective:
    """The objective of an algorithm; it takes of critic and rewards what it uses."""
    module, _, name = OBJECTIVES[settings.objective].partition(":")
    objective: Objective = getattr(import_module(module), name).build(settings, critic, rewards)
    return objective


def build_policy(config: RunConfig, name: str, device: str, built: Callable[[str], Policy] | None = None) -> Policy:
    """The policy `name`; the parts that it is made of are taken from `built`, or built too."""
    block = config.policies[name]
    parts = [built(part) if built else build_policy(config, part, device) for part in part_names(block)]
    if parts:
        policy: Policy = block.join(name, parts)
        return policy
    return _settled(config, name, device).build(name, device, config.seed)


def _settled(config: RunConfig, name: str, device: str) -> PolicyConfig:
    block: PolicyConfig = config.policies[name]
    return block.settled(device, PRECISIONS[getattr(config.engine, "precision", "fp32")])


def inspect_policy(config: RunConfig, name: str, device: str = "cpu") -> PolicySummary:
    """What `PolicyConfig.inspect` says of the policy `name` on `device`, made of its parts or not."""
    block = config.policies[name]
    parts = [inspect_policy(config, part, device) for part in part_names(block)]
    summary: PolicySummary = block.join_summaries(parts) if parts else _settled(config, name, device).inspect()
    return summary


def evaluation_sampling(policy_config: Any, evaluation: EvaluationSettings) -> Any:
    """The policy's sampling settings with the evaluation's overrides, validated by the policy's own schema."""
    sampling = policy_config.sampling
    if sampling is None:
        if evaluation.sampling:
            raise ValueError(f"evaluation.sampling {sorted(evaluation.sampling)}: this policy has no sampling settings")
        return None
    changed = {**sampling.model_dump(by_alias=True), **evaluation.sampling}
    return validate(type(sampling), overlay(changed, (), "evaluation.sampling"))
