"""What an algorithm keeps from iteration to iteration: recent experience, a moving reference, a KL coefficient, a
critic that learned before the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.catalog import POLICY, run_config
from contracts.harness import make_trainer
from torch import Tensor
from toy_policy import LENGTH, LETTERS, ToyPolicy
from toy_runs import interrupt, rows_of, stage, weights_of, write_run
from toy_world import ROWS, World, accumulated, log_probs, make_world, moved, prepared, scored

from modalities.base import Trajectory
from modalities.critic import Critic, ValueHead
from modalities.weights import WeightSets
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import build_policy
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective
from uniml_rl.objectives.replay import concatenate_experience
from uniml_rl.run import train_from_yaml

# -- recent experience ------------------------------------------------------------------------------------------------

REPLAYED = {"name": "reinforce", "surrogate": {"type": "cispo", "high": 2.0}, "replay": {"iterations": 2}}


def rollouts(objective: PolicyGradientObjective, count: int) -> list[tuple[World, Experience]]:
    """That many iterations of one policy, which moves between them."""
    found, world = [], make_world()
    for iteration in range(count):
        requests = [
            replace(request, key=replace(request.key, iteration=iteration)) for request in world.trajectory.requests
        ]
        ragged = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(iteration)) < 0.7
        world.trajectory = world.policy.rollout(requests)
        world.segment.trained_mask = ragged
        world.rewards = scored(torch.rand(ROWS, generator=torch.Generator().manual_seed(90 + iteration)))
        experience = prepared(objective, world)
        found.append((replace(world), experience))
        objective.finish_iteration(world.policy, experience, iteration, TorchEngine("cpu"), Metrics())
        moved(world.policy.table.weight, 60 + iteration)
    return found


def test_recent_experience_is_trained_beside_the_new_one_with_what_it_had() -> None:
    """Advantages, old log-probs and masks stay; the ratio is to the policy that sampled it; the oldest leaves."""
    alone = rollouts(PolicyGradientObjective(resolve_algorithm(REPLAYED | {"replay": None}), None), 4)
    objective = PolicyGradientObjective(resolve_algorithm(REPLAYED), None)
    together = rollouts(objective, 4)
    for now, kept in ((0, [0]), (1, [1, 0]), (2, [2, 1, 0]), (3, [3, 2, 1])):
        segment = together[now][1].segments[0]
        for name in ("mask", "old_log_probs", "advantages"):
            expected = torch.cat([getattr(alone[then][1].segments[0], name) for then in kept])
            assert torch.equal(getattr(segment, name), expected)
        assert len(segment.groups.unique()) == 3 * len(kept)
        assert torch.equal(segment.groups, together[now][1].trajectory.segments[0].group)

    world, experience = together[3]
    weights = world.policy.table.weight
    joined = replace(world, trajectory=experience.trajectory)
    roots = torch.arange(len(joined.tokens))
    loss, (gradient,) = accumulated(objective, joined, experience, roots, 7, [weights])
    new, terms, samples = log_probs(weights, joined.tokens), [], 0
    for then, (_, own) in enumerate([alone[3], alone[2], alone[1]]):
        part = own.segments[0]
        for row in range(ROWS):
            steps = part.mask[row].nonzero().flatten().tolist()
            samples += bool(steps)
            for t in steps:
                log_prob = new[then * ROWS + row, t]
                weight = min(float((log_prob.detach() - part.old_log_probs[row, t]).exp()), 2.0)
                terms.append(-weight * part.advantages[row, t] * log_prob)
    expected = torch.stack(terms).sum() / samples
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(gradient, torch.autograd.grad(expected, weights)[0], atol=1e-5)


def test_kept_experience_is_restored_bit_for_bit() -> None:
    first, second = (PolicyGradientObjective(resolve_algorithm(REPLAYED), None) for _ in range(2))
    (*_, (world, _)) = rollouts(first, 3)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    expected, found = (prepared(each, world) for each in (first, second))
    for name in ("mask", "old_log_probs", "advantages", "groups"):
        assert torch.equal(getattr(expected.segments[0], name), getattr(found.segments[0], name))
    assert found.trajectory.requests == expected.trajectory.requests
    assert torch.equal(found.trajectory.segments[0].tokens, expected.trajectory.segments[0].tokens)  # type: ignore[attr-defined]


def test_experience_of_unequal_length_is_padded_whatever_the_shape_of_its_parts() -> None:
    world = make_world()
    objective = PolicyGradientObjective(resolve_algorithm("grpo"), None)

    def experience(length: int) -> Experience:
        segment = world.segment
        names = ("rollout_log_probs", "trained_mask", "length_mask", "context_mask", "tokens")
        segment = replace(segment, **{name: getattr(segment, name)[:, :length] for name in names})
        cut = replace(world, trajectory=replace(world.trajectory, segments=[segment]))
        part = prepared(objective, cut)
        part.segments[0].old = {"mean": torch.rand(ROWS, length, 3), "std": torch.rand(ROWS, length)}
        return part

    short, whole = experience(2), experience(LENGTH)
    joined = concatenate_experience([short, whole]).segments[0]
    for name in ("mean", "std"):
        found = joined.old[name]  # type: ignore[index]
        assert torch.equal(found[:ROWS, :2], short.segments[0].old[name])  # type: ignore[index]
        assert torch.equal(found[ROWS:], whole.segments[0].old[name])  # type: ignore[index]
        assert not found[:ROWS, 2:].any()
    assert joined.mask.shape == (2 * ROWS, LENGTH)


KEEPING: list[dict[str, Any]] = [
    REPLAYED | {"minibatches": 2},
    {"name": "grpo", "kl": {"reference": {"type": "refreshed", "every": 2}}},
    {"name": "grpo", "kl": {"reference": {"type": "moving_average", "decay": 0.6}}},
    {"name": "dapo", "overlong": {"maximum": 4, "buffer": 2}, "dynamic_sampling": {"rounds": 2}},
]


@pytest.mark.parametrize("algorithm", KEEPING, ids=lambda block: str(block["name"]))
def test_a_run_that_stops_and_starts_again_ends_as_one_that_did_not(algorithm: dict[str, Any], tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path, algorithm=algorithm, until={"iterations": 5}), checkpoint={"every": 1})
    train_from_yaml(config, [], tmp_path / "whole")
    interrupt(config, tmp_path / "parts", (0, 2), (0, 4))
    train_from_yaml(config, [], tmp_path / "parts")
    assert torch.equal(weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole"))
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


# -- the reference ----------------------------------------------------------------------------------------------------


def averaged(history: list[Tensor], decay: float) -> Tensor:
    value = history[0]
    for current in history[1:]:
        value = decay * value + (1 - decay) * current
    return value


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ({"type": "fixed"}, lambda history: history[0]),
        ({"type": "refreshed", "every": 2}, lambda history: history[(len(history) - 1) // 2 * 2]),
        ({"type": "refreshed", "every": 3}, lambda history: history[(len(history) - 1) // 3 * 3]),
        ({"type": "moving_average", "decay": 0.7}, lambda history: averaged(history, 0.7)),
        ({"type": "moving_average", "decay": 0.7, "every": 2}, lambda history: averaged(history[::2], 0.7)),
    ],
)
def test_the_reference_follows_the_policy(
    reference: dict[str, Any], expected: Callable[[list[Tensor]], Tensor], tmp_path: Path
) -> None:
    policy = ToyPolicy("letters")
    algorithm = {"name": "grpo", "kl": {"reference": reference}}
    trainer = make_trainer(policy, algorithm, TorchEngine("cpu"), tmp_path, optimizer={"learning_rate": 0.1})
    history = [policy.table.weight.detach().clone()]
    for iteration in range(5):
        trainer.iterate(iteration)
        history.append(policy.table.weight.detach().clone())
        with policy.using("reference"):
            assert torch.allclose(policy.table.weight, expected(history), atol=1e-6)
    assert not torch.equal(history[-1], history[0])


def test_the_reference_of_an_adapter_follows_it_too(tmp_path: Path) -> None:
    """It begins as the adapter switched off, which is no copy, and becomes one as soon as it moves."""
    policy = build_policy(run_config("gpt2-lora", tmp_path), POLICY, "cpu")
    sets: WeightSets = policy.weight_sets
    policy.keep("reference")
    assert "reference" not in sets._sets
    start = {name: value.detach().clone() for name, value in sets.parameters().items()}
    for parameter in sets.parameters().values():
        moved(parameter, 3, scale=0.1)
    moved_to = {name: value.detach().clone() for name, value in sets.parameters().items()}
    average, refreshed = (
        resolve_algorithm({"name": "grpo", "kl": {"reference": block}}).kl.reference
        for block in ({"type": "moving_average", "decay": 0.75}, {"type": "refreshed", "every": 3})
    )
    average.follow(policy, 1)
    with policy.using("reference"):
        for name, value in sets.parameters().items():
            before = start[name] if "lora_B" in name else moved_to[name]  # switched off is B = 0, whatever A is
            assert torch.allclose(value, 0.75 * before + 0.25 * moved_to[name], atol=1e-6)
    for finished, same in ((1, False), (2, False), (3, True)):
        refreshed.follow(policy, finished)
        with policy.using("reference"):
            values = {name: value.detach().clone() for name, value in sets.parameters().items()}
        assert all(torch.equal(values[name], moved_to[name]) for name in values) == same


# -- the coefficient of the KL ----------------------------------------------------------------------------------------

ADAPTIVE = {"adaptive": {"target": 1e-3, "horizon": 20}}


def test_the_controller_stands_still_while_only_the_critic_learns() -> None:
    """The policy has not moved then, and a coefficient that sinks meanwhile would let it go."""
    world = make_world()
    algorithm = {"name": "ppo", "kl": ADAPTIVE, "value": {"warm_up_iterations": 2}}
    objective = PolicyGradientObjective(
        resolve_algorithm(algorithm), Critic(ValueHead(len(LETTERS), 4, seed=0), None, False)
    )
    assert objective.divergence is not None
    for iteration, still in ((0, True), (1, True), (2, False)):
        experience = prepared(objective, world)
        objective.finish_iteration(world.policy, experience, iteration, TorchEngine("cpu"), Metrics())
        assert (objective.divergence.controller.coefficient == 0.05) == still


def test_the_controller_counts_samples_and_not_the_segments_that_made_them() -> None:
    """Two texts that were continued three times each are six samples; the KL of a text counts for each of them."""
    world, objective = make_world(), PolicyGradientObjective(resolve_algorithm({"name": "grpo", "kl": ADAPTIVE}), None)
    experience = prepared(objective, world)
    segment, part = world.segment, experience.segments[0]
    parent = torch.tensor([0, 0, 0, 3, 3, 3])

    def rows(indices: Tensor, kl: float) -> Any:
        mask = torch.ones(len(indices), LENGTH, dtype=torch.bool)
        old = torch.zeros(len(indices), LENGTH)
        return replace(part, mask=mask, old_log_probs=old, reference_log_probs=old - kl / LENGTH)

    first = replace(segment, rollout_log_probs=torch.zeros(4, LENGTH))
    last = replace(segment, rollout_log_probs=torch.zeros(6, LENGTH), parent=parent)
    chained = Experience(Trajectory([first, last], []), [rows(torch.arange(4), 1e-3), rows(parent, 1.1e-3 - 1e-3)])
    assert objective.divergence is not None
    objective.divergence.finish_iteration(chained, TorchEngine("cpu"), Metrics())
    # the KL per sample is 1.1e-3, a tenth above the target; six samples of a horizon of twenty
    assert objective.divergence.controller.coefficient == pytest.approx(0.04 * (1 + 0.1 * 6 / 20), rel=1e-4)


# -- the critic -------------------------------------------------------------------------------------------------------


def test_the_critic_learns_before_the_policy_does(tmp_path: Path) -> None:
    """Passes over the first rollout: the policy stays, the critic explains the returns; then both learn from them."""

    def first_iteration(passes: int) -> tuple[float, int]:
        policy = ToyPolicy("letters")
        seen = list[Tensor]()
        trainer = make_trainer(
            policy,
            {"name": "ppo", "epochs": 1, "kl": None, "value": {"pretraining_epochs": passes, "clip": None}},
            TorchEngine("cpu"),
            tmp_path,
            group_size=8,
            critic={"optimizer": {"learning_rate": 0.05}},
        )
        prepare = trainer.objective.prepare

        def recording(*arguments: Any) -> Experience:
            seen.append(policy.table.weight.detach().clone())
            return prepare(*arguments)

        trainer.objective.prepare = recording  # type: ignore[method-assign]
        metrics = trainer.iterate(0).metrics
        assert len(seen) == passes + 1
        assert all(torch.equal(before, torch.zeros(1, len(LETTERS))) for before in seen)
        assert policy.table.weight.abs().max() > 0
        trainer.iterate(1)
        assert len(seen) == passes + 2, "only the first rollout is for the critic alone"
        return metrics["loss/value"], trainer.optimizer_steps

    untrained, steps = first_iteration(0)
    pretrained, more_steps = first_iteration(30)
    assert more_steps == steps + 30
    assert pretrained < 0.7 * untrained
