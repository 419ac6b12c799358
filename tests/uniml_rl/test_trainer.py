"""One iteration: cutting, ranks and failures change nothing that they should not; every number logged is defined."""

from __future__ import annotations

import ast
import itertools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_policy import LETTERS, ToyPolicy
from toy_runs import on_ranks, stage

from modalities.base import Request
from modalities.critic import Critic, ValueHead
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample, Text
from rewards.combine import RewardResult
from uniml_rl.build import StageConfig
from uniml_rl.data.prompts import DrawnPrompt
from uniml_rl.engines.base import Engine, StepReport
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.vocabulary import METRICS
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective
from uniml_rl.trainer import Trainer, requests_for

ROOT = Path(__file__).resolve().parents[2]
ONE_AT_A_TIME = threading.Lock()


class Letters:
    """Scores a text by its letters; `failing` says of which samples the score fails."""

    def __init__(self, failing: Any = lambda position: False) -> None:
        self.failing, self.texts = failing, list[str]()

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        texts = [sample.text for sample in samples if isinstance(sample, Text)]
        self.texts += texts
        scores = [
            sum(map(LETTERS.index, text)) / 28 + prompt.index for text, prompt in zip(texts, prompts, strict=True)
        ]
        total = torch.tensor([math.nan if self.failing(i) else score for i, score in enumerate(scores)])
        raw = {"letters": total}
        return RewardResult(total, total.isfinite(), raw, raw, {"letters": 1.0}, {"letters": {}})  # type: ignore[dict-item]


def make_trainer(folder: Path, engine: Engine, scores: Letters | None = None, seed: int = 0, **keys: Any) -> Trainer:
    config = StageConfig.model_validate(stage(folder, **keys))
    critic = None
    with ONE_AT_A_TIME:  # layers are initialised from the global generator, which threads share
        policy = ToyPolicy("letters")
        if config.critic is not None:
            critic = Critic(ValueHead(len(LETTERS), 4, seed=0), None, config.critic.trunk_gradient)
    objective = PolicyGradientObjective(config.algorithm, critic)
    optimizers = {"letters": (policy.trainable_modules(), config.optimizer)}
    if critic is not None and config.critic is not None:
        optimizers["critic"] = (critic.trainable_modules(), config.critic.optimizer)
    engine.attach(optimizers)
    policy.keep("reference")
    return Trainer(policy, config.prompts.build(seed), scores or Letters(), objective, engine, config, 0, seed)


def table(trainer: Trainer) -> Tensor:
    assert isinstance(trainer.policy, ToyPolicy)
    return trainer.policy.table.weight.detach().clone()


def recorded_requests(trainer: Trainer) -> list[Request]:
    """A list that fills with what the policy is asked for."""
    requests: list[Request] = []
    rollout = trainer.policy.rollout

    def recording(asked: Sequence[Request], sampling: Any = None) -> Any:
        requests.extend(asked)
        return rollout(asked, sampling)

    trainer.policy.rollout = recording  # type: ignore[method-assign]
    return requests


ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "epochs": 2}},
    "ppo": {"algorithm": {"name": "ppo", "epochs": 2}, "critic": {"trunk_gradient": True}},
    "ddpo": {"algorithm": {"name": "ddpo", "minibatches": 1, "surrogate": {"low": 0.2}}},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_depend_neither_on_the_micro_batch_nor_on_the_ranks(name: str, tmp_path: Path) -> None:
    """Two iterations with failures, in which momentum and running statistics would show a difference."""
    keys = ALGORITHMS[name] | {"prompts_per_iteration": 4, "optimizer": {"learning_rate": 0.05}}

    def train(engine: Engine, micro_batch: int) -> Tensor:
        size = 4 * 3 // engine.world_size
        failing = Letters(lambda position: position + engine.rank * size in (1, 2, 5))
        trainer = make_trainer(tmp_path, engine, failing, micro_batch=micro_batch, **keys)
        for iteration in range(2):
            trainer.iterate(iteration)
        return table(trainer)

    whole = train(TorchEngine("cpu"), 100)
    assert whole.abs().max() > 0.01
    for micro_batch in (1, 5):
        assert torch.allclose(train(TorchEngine("cpu"), micro_batch), whole, atol=1e-5)
    for weights in on_ranks(2, lambda engine: train(engine, 4)):
        assert torch.allclose(weights, whole, atol=1e-5)


def test_ranks_sample_what_one_process_samples_in_the_same_groups(tmp_path: Path) -> None:
    def texts(engine: Engine) -> list[tuple[int, str]]:
        scores = Letters()
        trainer = make_trainer(tmp_path, engine, scores, prompts_per_iteration=4)
        requests = recorded_requests(trainer)
        trainer.iterate(0)
        return list(zip([request.group for request in requests], scores.texts, strict=True))

    alone = texts(TorchEngine("cpu"))
    assert [text for rank in on_ranks(2, texts) for text in rank] == alone
    assert len(set(alone)) > 8 and {group for group, _ in alone} == {0, 1, 2, 3}


@pytest.mark.parametrize("wrong", [False, True])
def test_the_replay_check_waits_for_a_decision_that_is_trained(wrong: bool, tmp_path: Path) -> None:
    """Rows 0 to 2 fill the first micro-batch and train nothing; then a whole rollout does not."""
    trainer = make_trainer(tmp_path, TorchEngine("cpu"), micro_batch=3)
    rollout, untrained = trainer.policy.rollout, [6, 3]

    def partly(requests: Any, sampling: Any = None) -> Any:
        trajectory = rollout(requests, sampling)
        trajectory.segments[0].trained_mask = trajectory.segments[0].trained_mask.clone()
        trajectory.segments[0].trained_mask[: untrained.pop(0)] = False
        trajectory.segments[0].rollout_log_probs = trajectory.segments[0].rollout_log_probs + 0.1 * wrong
        return trajectory

    trainer.policy.rollout = partly  # type: ignore[method-assign]
    trainer.iterate(0)
    if not wrong:
        trainer.iterate(1)
        return
    with pytest.raises(UserError, match=r"differ from the sampler's by 0\.1"):
        trainer.iterate(1)


def test_a_rollout_without_a_valid_reward_changes_nothing(tmp_path: Path) -> None:
    """Momentum and weight decay would move weights in a step without a gradient."""
    failed = [False]
    scores = Letters(lambda position: failed[0])
    optimizer = {"learning_rate": 0.1, "weight_decay": 0.5}
    trainer = make_trainer(tmp_path, TorchEngine("cpu"), scores, optimizer=optimizer)
    assert trainer.iterate(0).metrics["update/empty_steps"] == 0
    before, failed[0] = table(trainer), True
    report = trainer.iterate(1)
    assert torch.equal(table(trainer), before)
    assert math.isnan(report.reward_mean)
    assert report.metrics["update/empty_steps"] == 1
    assert not any(name.startswith("nonfinite/") for name in report.metrics)  # failed samples are masked, not dropped
    assert "reward/mean" not in report.metrics and all(map(math.isfinite, report.metrics.values()))
    assert trainer.optimizer_steps == 1
    failed[0] = False
    trainer.iterate(2)
    assert not torch.equal(table(trainer), before)


def test_requests_of_a_repeated_prompt_are_other_samples_of_other_groups() -> None:
    drawn = [DrawnPrompt("x", 7, repeat=0), DrawnPrompt("y", 3), DrawnPrompt("x", 7, repeat=1)]
    requests = requests_for(drawn, 2, first_group=10, key=SampleKey(5, 1, 4, 0, 0))
    assert [request.group for request in requests] == [10, 10, 11, 11, 12, 12]
    assert [(r.key.prompt, r.key.sample) for r in requests] == [(7, 0), (7, 1), (3, 0), (3, 1), (7, 2), (7, 3)]
    assert {(r.key.run_seed, r.key.stage, r.key.iteration) for r in requests} == {(5, 1, 4)}


def test_random_numbers_are_of_the_run_the_stage_and_the_iteration(tmp_path: Path) -> None:
    keys: list[SampleKey] = []
    for run_seed, stage_index in ((5, 0), (6, 0), (5, 1)):
        trainer = make_trainer(tmp_path, TorchEngine("cpu"), seed=run_seed)
        trainer.stage_index = stage_index
        requests = recorded_requests(trainer)
        for iteration in range(2):
            trainer.iterate(iteration)
        keys += [request.key for request in requests]
    assert {(key.run_seed, key.stage, key.iteration) for key in keys} == {
        (run_seed, stage_index, iteration) for run_seed, stage_index in ((5, 0), (6, 0), (5, 1)) for iteration in (0, 1)
    }
    assert len(set(keys)) == len(keys) == 3 * 2 * 6


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "epochs": 2, "minibatches": 4}
    trainer = make_trainer(tmp_path, TorchEngine("cpu"), algorithm=algorithm)
    visited: list[list[int]] = []
    original = trainer.objective.minibatch

    def recording(experience: Any, roots: Tensor, engine: Engine) -> Any:
        visited.append(roots.tolist())
        return original(experience, roots, engine)

    trainer.objective.minibatch = recording  # type: ignore[method-assign]
    for iteration in range(2):
        trainer.iterate(iteration)
    epochs = [[row for part in visited[start : start + 4] for row in part] for start in range(0, 16, 4)]
    assert len(visited) == 16 and trainer.optimizer_steps == 16 and trainer.policy.version == 16
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_skipped_step_makes_no_new_version_of_the_weights(tmp_path: Path) -> None:
    class Skipping(TorchEngine):
        def step(self, iteration: int) -> StepReport:
            return StepReport({"letters": math.inf}, {}, skipped=True)

    trainer = make_trainer(tmp_path, Skipping("cpu"))
    report = trainer.iterate(0)
    assert report.metrics["gradient/skipped_steps"] == 1
    assert (trainer.optimizer_steps, trainer.policy.version) == (0, 0)


def test_the_schedule_counts_iterations_of_the_stage(tmp_path: Path) -> None:
    optimizer = {"learning_rate": 0.4, "schedule": {"type": "linear", "warm_up_iterations": 1, "decay_iterations": 2}}
    trainer = make_trainer(tmp_path, TorchEngine("cpu"), optimizer=optimizer, algorithm={"name": "grpo", "epochs": 3})
    rates, tables = [], [table(trainer)]
    for iteration in range(4):
        rates.append(trainer.iterate(iteration).metrics["learning_rate/letters"])
        tables.append(table(trainer))
    assert rates == pytest.approx([0.2, 0.4, 0.2, 0.0])
    assert [torch.equal(before, after) for before, after in itertools.pairwise(tables)] == [False, False, False, True]


def test_the_first_update_has_ratio_one_and_the_second_has_not(tmp_path: Path) -> None:
    one, two = (
        make_trainer(tmp_path, TorchEngine("cpu"), algorithm={"name": "grpo", "epochs": epochs}).iterate(0).metrics
        for epochs in (1, 2)
    )
    assert one["policy/ratio_max_deviation"] <= 1e-6 and one["policy/clip_share"] == 0
    assert two["policy/ratio_max_deviation"] > 1e-3


def test_what_a_toy_run_logs(tmp_path: Path) -> None:
    """Exactly these; a metric outside of the vocabulary, or with another reduction, raises where it is logged."""
    always = {
        *("group/without_signal_share", "policy/clip_share", "policy/ratio_max_deviation", "policy/ratio_mean"),
        *("reward/mean", "reward/std", "reward/letters/raw_mean", "reward/letters/weighted_mean"),
        *("reward/letters/weight", "reward/letters/failures", "policy/entropy", "loss/total", "loss/policy"),
        *("kl/coefficient", "kl/reference", "rollout/mismatch", "rollout/near_ties", "update/empty_steps"),
        *("gradient/norm/letters", "gradient/skipped_steps", "update/weight_ratio/letters", "learning_rate/letters"),
        *("time/rollout", "time/decode", "time/reward", "time/replay", "time/update", "time/iteration"),
        *("throughput/samples_per_second", "throughput/decisions_per_second", "memory/peak_gib"),
        *("text/length_mean", "text/finished_share", "text/distinct_1"),
    }
    ppo = {"value/explained_variance", "loss/value", "gradient/norm/critic", "update/weight_ratio/critic"}
    expected = {
        "grpo": always | {"loss/kl"},
        "ppo": (always | ppo | {"learning_rate/critic"}) - {"group/without_signal_share"},
    }
    for name, names in expected.items():
        trainer = make_trainer(tmp_path, TorchEngine("cpu"), **ALGORITHMS[name])
        assert set(trainer.iterate(0).metrics) == names


def test_every_metric_of_the_vocabulary_is_logged_somewhere() -> None:
    """By its literal name, or by the literal beginning of an f-string."""
    written: set[str] = set()
    for path in (ROOT / "uniml_rl").rglob("*.py"):
        if path.name == "vocabulary.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                written.add(node.value)
    for name in METRICS:
        if name.startswith(("eval/", "eval_ema/")):
            continue
        parts = [part for part in name.replace("{", "\0").replace("}", "\0").split("\0")[::2] if part]
        if name.startswith("text/distinct_"):
            parts = ["text/distinct_"]
        assert all(part in written for part in parts), name
