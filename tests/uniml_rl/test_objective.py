"""What an objective does with failed rewards, several ranks, a sampler that differs, and a critic that warms up."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.harness import make_trainer
from torch import Tensor
from toy_policy import LENGTH, LETTERS, ToyPolicy
from toy_runs import on_ranks
from toy_world import (
    ROWS,
    accumulated,
    decisions,
    log_probs,
    make_world,
    moved,
    prepared,
    scored,
)

from modalities.base import Segment, Trajectory
from modalities.critic import Critic, ValueHead
from modalities.errors import UserError
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience, Minibatch, to_segment
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "ddpo"])
def test_nothing_is_learnt_from_a_rollout_whose_rewards_all_failed(algorithm: str) -> None:
    world = make_world()
    world.rewards = scored(torch.full((ROWS,), math.nan))
    settings = resolve_algorithm(algorithm)
    critic = Critic(ValueHead(len(LETTERS), 4, seed=0), None, True) if settings.value else None
    objective, metrics = PolicyGradientObjective(settings, critic), Metrics()
    experience = prepared(objective, world, metrics=metrics)
    assert not experience.segments[0].mask.any()
    assert torch.equal(experience.segments[0].advantages, torch.zeros(ROWS, LENGTH))
    minibatch = objective.minibatch(experience, torch.arange(ROWS), TorchEngine("cpu"))
    assert minibatch.trained_decisions == 0
    loss, (gradient,) = accumulated(objective, world, experience, torch.arange(ROWS), 4, [world.policy.table.weight])
    assert loss == 0 and torch.equal(gradient, torch.zeros_like(gradient))
    objective.finish_iteration(world.policy, experience, 0, TorchEngine("cpu"), metrics)
    assert not any(name.startswith("nonfinite/") for name in metrics.reduce())


ADAPTIVE = {"name": "grpo", "kl": {"adaptive": {"target": 0.05, "horizon": 40}}}


def test_the_kl_controller_sees_the_samples_that_were_trained_and_no_others() -> None:
    world = make_world()
    objective = PolicyGradientObjective(resolve_algorithm(ADAPTIVE), None)
    experience = prepared(objective, world)
    estimate = [
        float(sum(experience.segments[0].old_log_probs[row, t] for t in steps))
        - float(sum(experience.segments[0].reference_log_probs[row, t] for t in steps))  # type: ignore[index]
        for row, steps in decisions(world, torch.arange(ROWS)).items()
    ]
    error = min(max(sum(estimate) / len(estimate) / 0.05 - 1, -0.2), 0.2)
    objective.finish_iteration(world.policy, experience, 0, TorchEngine("cpu"), metrics := Metrics())
    assert metrics.reduce()["kl/coefficient"] == pytest.approx(0.04)
    assert objective.divergence is not None
    assert objective.divergence.controller.coefficient == pytest.approx(0.04 * (1 + error * len(estimate) / 40))
    assert 0 < len(estimate) < ROWS
    world.rewards = scored(torch.full((ROWS,), math.nan))
    before = objective.divergence.controller.coefficient
    objective.finish_iteration(world.policy, prepared(objective, world), 0, TorchEngine("cpu"), Metrics())
    assert objective.divergence.controller.coefficient == before


ON_RANKS = [
    ADAPTIVE,
    {"name": "ddpo", "advantage": {"min_count": 6}},
    {"name": "ppo"},
    {"name": "grpo", "advantage": {"scale": "batch_std"}},
    {"name": "grpo", "advantage": {"type": "batch"}},
    {"name": "grpo", "aggregation": {"mode": "prompt_mean"}},
]


@pytest.mark.parametrize("block", ON_RANKS)
def test_ranks_agree_with_one_process(block: dict[str, Any]) -> None:
    """Advantages, denominators, statistics and the KL's coefficient of three ranks with a group each."""

    def work(engine: Engine) -> tuple[Tensor, list[float], Any]:
        world = make_world()
        size = ROWS // engine.world_size
        own = torch.arange(engine.rank * size, (engine.rank + 1) * size)
        segment = world.segment
        names = ("group", "rollout_log_probs", "trained_mask", "length_mask", "context_mask", "tokens")
        world.trajectory.segments[0] = replace(segment, **{name: getattr(segment, name)[own] for name in names})
        world.trajectory.requests = [world.trajectory.requests[row] for row in own.tolist()]
        world.rewards = scored(world.rewards.total[own])
        settings = resolve_algorithm(block)
        critic = Critic(ValueHead(len(LETTERS), 4, seed=0), None, False) if settings.value else None
        objective = PolicyGradientObjective(settings, critic)
        for _ in range(2):
            experience = prepared(objective, world, engine)
        minibatch = objective.minibatch(experience, torch.arange(size), engine)
        objective.finish_iteration(world.policy, experience, 0, engine, Metrics())
        numbers = [float(minibatch.denominators[0]), float(minibatch.trained_decisions)]
        return experience.segments[0].advantages, numbers, objective.state_dict()

    alone = work(TorchEngine("cpu"))
    together = on_ranks(3, work)
    assert alone[0].abs().max() > 0.1
    assert alone[1][1] == make_world().mask.sum()
    assert torch.allclose(torch.cat([advantages for advantages, _, _ in together]), alone[0], atol=1e-6)
    for _, numbers, state in together:
        assert numbers == alone[1]
        assert state["kl_controller"] == pytest.approx(alone[2]["kl_controller"])
        for segment, statistics in alone[2]["running_statistics"].items():
            assert all(torch.equal(state["running_statistics"][segment][key], statistics[key]) for key in statistics)


@pytest.mark.parametrize(("mode", "together"), [("prompt_mean", True), ("token_mean", False)])
def test_a_mean_over_prompts_finds_a_prompts_samples_in_one_optimizer_step(
    mode: str, together: bool, tmp_path: Path
) -> None:
    algorithm = {"name": "grpo", "aggregation": {"mode": mode}, "minibatches": 2}
    trainer = make_trainer(ToyPolicy("letters"), algorithm, TorchEngine("cpu"), tmp_path)
    steps, minibatch = list[set[int]](), trainer.objective.minibatch

    def recording(experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        steps.append(set(experience.segments[0].groups[roots].tolist()))
        return minibatch(experience, roots, engine)

    trainer.objective.minibatch = recording  # type: ignore[method-assign]
    for iteration in range(3):
        trainer.iterate(iteration)
    assert len(steps) == 6
    assert together == all(first.isdisjoint(second) for first, second in zip(steps[::2], steps[1::2], strict=True))


# -- replay, reference, critic --------


def test_a_replay_that_scores_something_else_is_an_error_a_warning_or_ignored(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    world.segment.trained_mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    world.segment.trained_mask[0, 1] = False  # a cut of which not all is trained
    cut = world.policy.plan(world.trajectory, torch.arange(ROWS), 4)[0]

    def check(**keys: Any) -> None:
        objective = PolicyGradientObjective(resolve_algorithm({"name": "grpo", **keys}), None)
        objective.check_replay(world.policy, world.trajectory, cut, "fp32")

    check()
    world.segment.rollout_log_probs = world.segment.rollout_log_probs + 1e-3
    with pytest.raises(UserError, match=r"differ from the sampler's by 0\.001 on average, more than 2e-05"):
        check()
    check(replay_tolerance=2e-3)
    check(replay_check="off")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check(replay_check="warn")
    assert "would optimise the wrong ratio" in caplog.text
    world.segment.rollout_log_probs[0, 0] = math.nan
    with pytest.raises(UserError, match="by nan"):
        check(replay_tolerance=1e9)


@pytest.mark.parametrize(
    "keys", [{"replay_check": "off"}, {"replay_check": "warn"}, {"mismatch": {"type": "truncate"}}]
)
def test_a_sampler_that_may_differ_does_not_give_the_old_log_probs(keys: dict[str, Any]) -> None:
    world = make_world()
    truth = log_probs(world.policy.table.weight.detach(), world.tokens)
    world.segment.rollout_log_probs = truth + 0.1
    objective = PolicyGradientObjective(resolve_algorithm({"name": "ddpo", **keys}), None)
    metrics = Metrics()
    experience = prepared(objective, world, metrics=metrics)
    assert torch.allclose(experience.segments[0].old_log_probs, truth)
    assert metrics.reduce()["rollout/mismatch"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "dtype", "exact"),
    [("fp32", torch.float32, True), ("bf16", torch.float32, False), ("fp32", torch.bfloat16, False)],
)
def test_where_rounding_depends_on_the_cut_the_samplers_log_probs_are_not_the_old_ones(
    precision: str, dtype: torch.dtype, exact: bool
) -> None:
    world = make_world()
    world.policy.dtype = dtype
    truth = log_probs(world.policy.table.weight.detach(), world.tokens)
    world.segment.rollout_log_probs = truth + 0.1
    objective = PolicyGradientObjective(resolve_algorithm("ddpo"), None)
    old = prepared(objective, world, TorchEngine("cpu", precision)).segments[0].old_log_probs
    assert torch.allclose(old, truth + 0.1 if exact else truth)


def test_while_the_critic_warms_up_the_policy_has_no_gradient_through_its_features_either() -> None:
    world = make_world()
    head = ValueHead(len(LETTERS), 4, seed=0)
    moved(head.layers[3].weight, 7)
    algorithm = {"name": "ppo", "value": {"warm_up_iterations": 2}, "entropy_coefficient": 0.1}
    objective = PolicyGradientObjective(resolve_algorithm(algorithm), Critic(head, None, trunk_gradient=True))
    experience = prepared(objective, world)
    parameters = [world.policy.table.weight, head.layers[3].weight]
    everything = torch.arange(ROWS)
    for iteration, trains in ((0, False), (1, False), (2, True)):
        _, (policy, critic) = accumulated(objective, world, experience, everything, 4, parameters, iteration)
        assert policy.any() == trains
        assert critic.any()


def test_what_lives_from_one_iteration_to_the_next_is_restored() -> None:
    world = make_world()
    for block in (ADAPTIVE, {"name": "ddpo", "advantage": {"min_count": 6}}):
        settings = resolve_algorithm(block)
        first, second, never = (PolicyGradientObjective(settings, None) for _ in range(3))
        first.finish_iteration(world.policy, prepared(first, world), 0, TorchEngine("cpu"), Metrics())
        fresh = prepared(never, world).segments[0].advantages
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        expected, found = (prepared(each, world).segments[0].advantages for each in (first, second))
        assert torch.equal(found, expected)
        if block is not ADAPTIVE:
            assert not torch.equal(found, fresh)
        else:
            assert vars(second.divergence.controller) == vars(first.divergence.controller)


def test_a_row_gets_the_mean_of_its_valid_leaves() -> None:
    """Segment 0 has rows 0, 1, 2; their texts continue in segment 1; segment 2 are the samples that were scored."""
    segment = make_world().segment

    def with_rows(count: int, parent: list[int] | None) -> Segment:
        return replace(
            segment,
            rollout_log_probs=torch.zeros(count, LENGTH),
            parent=None if parent is None else torch.tensor(parent),
        )

    trajectory = Trajectory([with_rows(3, None), with_rows(4, [0, 0, 1, 2]), with_rows(5, [0, 1, 1, 2, 3])], [])
    rewards, valid = torch.tensor([1.0, 2.0, 5.0, math.nan, 7.0]), torch.tensor([True, True, True, False, True])
    for index, values, known in (
        (0, [8 / 3, 0.0, 7.0], [True, False, True]),
        (1, [1.0, 3.5, 0.0, 7.0], [True, True, False, True]),
        (2, [1.0, 2.0, 5.0, 0.0, 7.0], [True, True, True, False, True]),
    ):
        means, found = to_segment(trajectory, rewards, valid, index)
        assert torch.allclose(means, torch.tensor(values)) and found.tolist() == known
