"""One row of the table, trained: the real trainer, objective and engine on a problem of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from modalities.base import Policy, summary_of
from modalities.critic import Critic, ValueHead
from modalities.samples import Prompt
from rewards.base import Reward, RewardConfig
from rewards.combine import RewardSet
from uniml_rl.build import CRITIC, StageConfig, build_objective
from uniml_rl.data.prompts import PromptStream
from uniml_rl.data.records import DrawnRecord, Record, RecordStream
from uniml_rl.data.streams import DrawnPrompt, RecordPromptStream
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.selftest.targets import DataKind, Target
from uniml_rl.trainer import Trainer

POLICY = "learner"
_ROWS_AT_ONCE = 1 << 16


class Problem(Protocol):
    """What a row needs of a problem whose answers are known."""

    @property
    def prompts(self) -> list[Prompt]: ...

    @property
    def reward(self) -> Reward: ...

    def records(self, kind: DataKind) -> list[Record]:
        """Given samples; empty if the problem has none of that kind."""
        ...

    def policy(self) -> Policy:
        """The untrained policy, which is the reference."""
        ...

    def distance(self, policy: Policy, target: Target) -> float:
        """How far from the target: 0 there, 1 where training began."""
        ...

    def expected_reward(self, policy: Policy) -> float:
        """Exact, without sampling."""
        ...

    def best_reward(self) -> float:
        """The largest that any policy of the class can expect."""
        ...


class KnownRecords(RecordStream):
    """Records that lie in memory, each epoch in a new order."""

    def __init__(self, kind: str, records: Sequence[Record], seed: int) -> None:
        self.kind, self.size = kind, len(records)  # type: ignore[assignment]
        self._records = records
        places = [Prompt("", place) for place in range(self.size)]
        self._order = RecordPromptStream(self.size, places.__getitem__, seed, True, "known", "known records")

    def _drawn(self, prompt: DrawnPrompt) -> DrawnRecord:
        record = self._records[prompt.index]
        return DrawnRecord(record.index, record.prompt, record.samples, record.labels, prompt.repeat)


def make_trainer(
    problem: Problem, policy: Policy, stage: Mapping[str, Any], data: DataKind | None, seed: int
) -> Trainer:
    """The trainer of a one-stage run on rollouts, or on given `data`, all of it in each iteration.

    UserError and ValidationError as for a stage of a YAML file.
    """
    prompts = problem.prompts
    records = problem.records(data) if data else []
    from_file = {"type": data or "file", "path": "not read"}
    defaults = {"name": "selftest", "policy": POLICY, "micro_batch": _ROWS_AT_ONCE, "until": {"iterations": 1}}
    source_keys = (
        {"records": from_file, "prompts_per_iteration": len(records)}
        if data
        else {
            "prompts": from_file,
            "prompts_per_iteration": len(prompts),
            "group_size": 16,
            "rewards": {"known": {"type": "regex", "pattern": "not read"}},
        }
    )
    config = StageConfig.model_validate({**defaults, **source_keys, **stage})
    group_size = len(records[0].samples) if data else config.group_size
    config.algorithm.check_policy(summary_of(policy), group_size)
    critic, optimizers = None, {POLICY: (policy.trainable_modules(), config.optimizer)}
    if config.critic is not None:
        critic = Critic(ValueHead(policy.feature_size, config.critic.hidden_size, seed), None, False)
        optimizers[CRITIC] = (critic.trainable_modules(), config.critic.optimizer)
    rewards = RewardSet({"known": (RewardConfig(micro_batch_size=_ROWS_AT_ONCE), problem.reward)})
    objective = build_objective(config.algorithm, critic, rewards)
    engine = TorchEngine("cpu")
    engine.attach(optimizers)
    objective.start(policy)
    source: PromptStream | RecordStream = (
        KnownRecords(policy.sample_kind, records, seed)
        if data
        else RecordPromptStream(len(prompts), prompts.__getitem__, seed, False, "known", "known prompts")
    )
    return Trainer(policy, source, rewards, objective, engine, config, 0, seed)


def train(problem: Problem, stage: Mapping[str, Any], iterations: int, data: DataKind | None, seed: int) -> Policy:
    """The policy after so many iterations."""
    policy = problem.policy()
    trainer = make_trainer(problem, policy, stage, data, seed)
    for iteration in range(iterations):
        trainer.iterate(iteration)
    return policy
