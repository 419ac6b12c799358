"""What must not change an update, and what must not break it, for every row of the table that learns from tokens."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_policy import LENGTH, LETTERS
from toy_runs import on_ranks
from toy_world import FAILED, ROWS, SIZE, World, make_world, moved, prepared, scored

from modalities.critic import Critic, ValueHead
from modalities.errors import UserError
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings
from uniml_rl.algorithms.presets import PRESETS, resolve_algorithm
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective

OVERRIDES: dict[str, dict[str, Any]] = {"dapo": {"overlong": {"maximum": LENGTH, "buffer": 2}}}


def learns_from_tokens(name: str) -> bool:
    settings = resolve_algorithm(name)
    try:
        settings.check(SIZE, "token", "tokens")
    except UserError:
        return False
    return isinstance(settings, PolicyGradientSettings)


ROWS_OF_THE_TABLE = [name for name in PRESETS if learns_from_tokens(name)]
every_row = pytest.mark.parametrize("name", ROWS_OF_THE_TABLE)


def test_the_table_has_the_token_rows() -> None:
    assert set(ROWS_OF_THE_TABLE) >= {
        *("reinforce", "ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus"),
        *("reinforce_plus_plus_baseline", "gspo", "cispo", "drpo", "ppo_dual_clip"),
    }


@dataclass
class Update:
    """What a rollout did: to whom, and where it pushes."""

    advantages: Tensor  # [B, T]
    loss: float
    gradient: Tensor  # of policy and critic

    def assert_equals(self, other: Update, order: Tensor | None = None) -> None:
        """With the rows in another order, if one is given."""
        expected = self.advantages if order is None else self.advantages[order]
        assert torch.allclose(other.advantages, expected, atol=1e-5)
        assert other.loss == pytest.approx(self.loss, rel=1e-5, abs=1e-6)
        assert torch.allclose(other.gradient, self.gradient, rtol=1e-4, atol=1e-6)


def update(name: str, world: World, engine: Engine | None = None, budget: int = ROWS) -> Update:
    """Of a whole rollout, after the policy has moved a little."""
    engine = engine or TorchEngine("cpu")
    settings = resolve_algorithm({"name": name} | OVERRIDES.get(name, {}))
    critic = None
    if settings.needs_critic:
        critic = Critic(ValueHead(len(LETTERS), 4, seed=0), None, True)
        for place, parameter in enumerate(critic.head.parameters()):
            moved(parameter, 40 + place)
    objective = PolicyGradientObjective(settings, critic)
    experience = prepared(objective, world, engine)
    moved(world.policy.table.weight, 5, scale=0.2)
    parameters = [world.policy.table.weight, *(critic.head.parameters() if critic else [])]
    for parameter in parameters:
        parameter.grad = None
    roots = torch.arange(len(world.tokens))
    minibatch = objective.minibatch(experience, roots, engine)
    loss = torch.zeros((), dtype=torch.float64)
    for cut in world.policy.plan(world.trajectory, roots, budget):
        part = objective.loss(world.policy, minibatch, cut, 0, Metrics())
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    total, summed = engine.sum_over_ranks(loss), engine.sum_over_ranks(gradient)
    return Update(experience.segments[0].advantages, float(total), summed)


def with_rows(world: World, rows: Tensor) -> World:
    """These rows of a world, in this order."""
    segment, names = (
        world.segment,
        ("group", "rollout_log_probs", "trained_mask", "length_mask", "context_mask", "tokens"),
    )
    world.trajectory.segments[0] = replace(segment, **{name: getattr(segment, name)[rows] for name in names})
    world.trajectory.requests = [world.trajectory.requests[row] for row in rows.tolist()]
    world.rewards = scored(world.rewards.total[rows])
    return world


@every_row
def test_neither_the_cutting_nor_the_order_of_samples_matters(name: str) -> None:
    whole = update(name, make_world())
    assert whole.gradient.abs().max() > 1e-3 and whole.advantages.abs().max() > 0.1
    for budget in (1, 5):
        whole.assert_equals(update(name, make_world(), budget=budget))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    whole.assert_equals(update(name, with_rows(make_world(), order), budget=5), order)


@every_row
def test_ranks_do_together_what_one_does_alone(name: str) -> None:
    whole = update(name, make_world())

    def work(engine: Engine) -> Update:
        first = engine.rank * ROWS // engine.world_size
        return update(name, with_rows(make_world(), torch.arange(first, first + ROWS // engine.world_size)), engine)

    found = on_ranks(3, work)
    advantages = torch.cat([each.advantages for each in found])
    for each in found:
        whole.assert_equals(replace(each, advantages=advantages))


@every_row
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_does_not_matter(name: str, side: str) -> None:
    whole, world = update(name, make_world()), make_world()

    def padded(values: Tensor, by: Any) -> Tensor:
        filling = values.new_full((ROWS, 3), by)
        return torch.cat([filling, values] if side == "left" else [values, filling], 1)

    segment = world.segment
    fillings = {"trained_mask": False, "length_mask": False, "context_mask": False, "tokens": 3}
    values = {key: padded(getattr(segment, key), by) for key, by in fillings.items()}
    values["rollout_log_probs"] = padded(segment.rollout_log_probs, math.nan)
    world.trajectory.segments[0] = replace(segment, **values)
    found = update(name, world)
    own = found.advantages[:, 3:] if side == "left" else found.advantages[:, :-3]
    whole.assert_equals(replace(found, advantages=own))
    assert found.advantages.count_nonzero() == own.count_nonzero()


@every_row
def test_rewards_may_be_integers_and_failed_ones_anything(name: str) -> None:
    world = make_world()
    world.rewards.total = torch.where(world.rewards.valid, (2 * world.rewards.total).round(), torch.nan)
    whole = update(name, copy.deepcopy(world))
    assert whole.gradient.isfinite().all()
    for failed in (0, 10**6):
        world.rewards.total[FAILED] = failed
        integers = copy.deepcopy(world)
        integers.rewards.total = world.rewards.total.long()
        whole.assert_equals(update(name, integers))


@every_row
def test_groups_of_one_and_groups_of_equals_teach_nothing_that_compares_them(name: str) -> None:
    """And nothing becomes NaN, also where samples are compared with all others."""
    world = make_world()
    world.rewards = scored(torch.tensor([1.5] * SIZE + [math.nan] * (SIZE - 1) + [2.0] + [1.5] * SIZE))
    found = update(name, world)
    assert found.advantages.isfinite().all() and found.gradient.isfinite().all() and math.isfinite(found.loss)
    settings = resolve_algorithm(name)
    if settings.compares_groups and not (settings.kl and settings.kl.placement == "reward") and name != "dapo":
        assert torch.equal(found.advantages, torch.zeros(ROWS, LENGTH))


@every_row
def test_a_batch_without_a_decision_has_neither_loss_nor_gradient(name: str) -> None:
    world = make_world()
    world.segment.trained_mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    found = update(name, world)
    assert found.loss == 0 and not found.gradient.any() and not found.advantages.any()


@every_row
def test_what_is_not_trained_is_not_read(name: str) -> None:
    """Other tokens, and log-probs that are not even numbers; row 2 has no trained decision at all."""
    whole, world = update(name, make_world()), make_world()
    trained = world.segment.trained_mask
    world.segment.rollout_log_probs = torch.where(trained, world.segment.rollout_log_probs, -math.inf)
    world.trajectory.segments[0] = replace(world.segment, tokens=torch.where(trained, world.tokens, 7 - world.tokens))
    whole.assert_equals(update(name, world))
