"""The rows of the table that learn from tokens: loss and gradient against the papers' formulas, written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_policy import LENGTH
from toy_world import FAILED, ROWS, SIZE, World, decisions, log_probs, make_world, moved, prepared, random
from written_out import assert_same, clipped, group_advantages

from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective

VALID = [row for row in range(ROWS) if row not in FAILED]


@dataclass
class Case:
    """A rollout that an objective has prepared, whose policy has moved since."""

    world: World
    objective: PolicyGradientObjective
    experience: Experience
    old: Tensor  # [B, T]
    reference: Tensor  # [B, T]

    @property
    def weights(self) -> Tensor:
        return self.world.policy.table.weight

    @property
    def rewards(self) -> list[float]:
        return self.world.rewards.total.tolist()

    def check(self, loss: Callable[[Tensor, dict[int, list[int]]], Tensor]) -> None:
        """`loss(log pi [B, T], trained decisions by row)` is the objective's, and so is its gradient."""

        def expected(roots: Tensor) -> Tensor:
            return loss(log_probs(self.weights, self.world.tokens), decisions(self.world, roots))

        assert_same(self.objective, self.world, self.experience, expected, [self.weights])


def make_case(block: str | dict[str, Any], world: World | None = None) -> Case:
    world = world or make_world()
    objective = PolicyGradientObjective(resolve_algorithm(block), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    with world.policy.using("reference"):
        reference = log_probs(weights.detach().clone(), world.tokens)
    experience = prepared(objective, world)
    moved(weights, 5)
    return Case(world, objective, experience, old, reference)


def total(terms: Iterable[Tensor]) -> Tensor:
    return sum(terms, torch.zeros(()))


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def spread(values: Iterable[float]) -> float:
    listed = list(values)
    return math.sqrt(mean((value - mean(listed)) ** 2 for value in listed))


def others_of(row: int) -> list[int]:
    return [other for other in VALID if other // SIZE == row // SIZE and other != row]


def group_of(row: int) -> list[int]:
    return [other for other in VALID if other // SIZE == row // SIZE]


def per_decision(chosen: dict[int, list[int]], term: Callable[[int, int], Tensor]) -> Tensor:
    """Mean over all decisions."""
    return total(term(row, t) for row, steps in chosen.items() for t in steps) / sum(map(len, chosen.values()))


def per_sample(chosen: dict[int, list[int]], term: Callable[[int, int], Tensor]) -> Tensor:
    """Mean over samples of the sum over their decisions."""
    return total(term(row, t) for row, steps in chosen.items() for t in steps) / len(chosen)


def test_reinforce() -> None:
    """-A log pi summed over a sample, A normalised over the batch."""
    case = make_case("reinforce")
    rewards = [case.rewards[row] for row in VALID]
    advantages = {row: (case.rewards[row] - mean(rewards)) / (spread(rewards) + 1e-6) for row in VALID}
    case.check(lambda new, chosen: per_sample(chosen, lambda row, t: -advantages[row] * new[row, t]))


def test_rloo() -> None:
    """-A log pi with the KL of the whole sample in the reward; the baseline is the mean of the others."""
    case = make_case("rloo")
    steps_of = decisions(case.world, torch.arange(ROWS))
    charged = {
        row: case.rewards[row] - 0.05 * sum(float((case.old - case.reference)[row, t]) for t in steps_of.get(row, []))
        for row in VALID
    }
    advantages = {
        row: charged[row] - mean(charged[other] for other in others_of(row)) if others_of(row) else 0.0 for row in VALID
    }
    case.check(lambda new, chosen: per_sample(chosen, lambda row, t: -advantages[row] * new[row, t]))


@pytest.mark.parametrize("gamma", [1.0, 0.8])
@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus(baseline: bool, gamma: float) -> None:
    """Returns of terminal reward and KL per decision, whitened over all decisions; PPO's clip. The baseline form takes
    the group's mean off the rewards and has its KL in the loss."""
    name = "reinforce_plus_plus" + "_baseline" * baseline
    case = make_case({"name": name, "advantage": {"gamma": gamma}})
    difference = case.old - case.reference
    returns = {}
    for row, steps in decisions(case.world, torch.arange(ROWS)).items():
        following = 0.0
        for t in reversed(steps):
            reward = 0.0
            if t == steps[-1]:
                reward = case.rewards[row] - (mean(case.rewards[o] for o in group_of(row)) if baseline else 0.0)
            if not baseline:
                reward -= 0.01 * float(difference[row, t])
            following = returns[row, t] = reward + gamma * following
    centre, width = mean(returns.values()), spread(returns.values())

    def term(new: Tensor, row: int, t: int) -> Tensor:
        ratio = (new[row, t] - case.old[row, t]).exp()
        surrogate = clipped((returns[row, t] - centre) / (width + 1e-8), ratio)
        return surrogate + 0.01 * (new[row, t] - case.reference[row, t]) ** 2 / 2 if baseline else surrogate

    case.check(lambda new, chosen: per_decision(chosen, lambda row, t: term(new, row, t)))


def test_dr_grpo() -> None:
    """No standard deviation, and no length of the sample in a denominator."""
    case = make_case("dr_grpo")
    advantages = {row: case.rewards[row] - mean(case.rewards[other] for other in group_of(row)) for row in VALID}

    def term(new: Tensor, row: int, t: int) -> Tensor:
        return clipped(advantages[row], (new[row, t] - case.old[row, t]).exp())

    case.check(lambda new, chosen: per_sample(chosen, lambda row, t: term(new, row, t)))


def test_dapo() -> None:
    """The range is wider above; all decisions of the batch count alike; long samples lose reward."""
    world = make_world()
    world.segment.length_mask = torch.arange(LENGTH) < torch.tensor([4, 3, 2, 1] * 3)[:, None]
    world.segment.trained_mask = world.segment.trained_mask & world.segment.length_mask
    world.segment.context_mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    world.segment.context_mask[8, 1] = True  # not of the model's own making: row 8 is 3 long
    case = make_case({"name": "dapo", "overlong": {"maximum": 4, "buffer": 2, "factor": 3.0}}, world)
    lengths = [3 if row == 8 else (4, 3, 2, 1)[row % 4] for row in range(ROWS)]
    shaped = {row: case.rewards[row] - 3.0 * {4: 1.0, 3: 0.5, 2: 0.0, 1: 0.0}[lengths[row]] for row in VALID}
    advantages = {
        row: (shaped[row] - mean(shaped[o] for o in group_of(row))) / (spread(shaped[o] for o in group_of(row)) + 1e-4)
        for row in VALID
    }

    def term(new: Tensor, row: int, t: int) -> Tensor:
        return clipped(advantages[row], (new[row, t] - case.old[row, t]).exp(), 0.2, 0.28)

    case.check(lambda new, chosen: per_decision(chosen, lambda row, t: term(new, row, t)))
    ratios = (log_probs(case.weights, world.tokens) - case.old).exp()[world.mask]
    assert (ratios > 1.28).any()


def test_gspo() -> None:
    """One ratio per sample, the geometric mean of its decisions' ratios, in a range of its own."""
    case = make_case({"name": "gspo", "surrogate": {"low": 0.1, "high": 0.2}})
    advantages = group_advantages(case.world)

    def loss(new: Tensor, chosen: dict[int, list[int]]) -> Tensor:
        ratios = {
            row: math.e ** total((new - case.old)[row, t] / len(steps) for t in steps) for row, steps in chosen.items()
        }
        return total(clipped(advantages[row], ratio, 0.1, 0.2) for row, ratio in ratios.items()) / len(chosen)

    case.check(loss)
    preset = resolve_algorithm("gspo").surrogate
    assert (preset.low, preset.high) == (3e-4, 4e-4)


def test_cispo() -> None:
    """Every decision keeps the gradient of log pi; its weight is the ratio, at most the cap."""
    case = make_case({"name": "cispo", "surrogate": {"high": 1.1}})
    advantages = group_advantages(case.world)
    ratios = (log_probs(case.weights.detach(), case.world.tokens) - case.old).exp()
    assert (ratios[case.world.mask] > 1.1).any() and (ratios[case.world.mask] < 1.1).any()

    def term(new: Tensor, row: int, t: int) -> Tensor:
        return -min(float(ratios[row, t]), 1.1) * advantages[row] * new[row, t]

    case.check(lambda new, chosen: per_decision(chosen, lambda row, t: term(new, row, t)))


@pytest.mark.parametrize("weight", ["old_probability", "one"])
def test_drpo(weight: str) -> None:
    """A quadratic pull to ratio 1, weaker for tokens that were unlikely."""
    case = make_case({"name": "drpo", "surrogate": {"weight": weight, "epsilon": 0.3}})
    advantages = group_advantages(case.world)

    def term(new: Tensor, row: int, t: int) -> Tensor:
        ratio = (new[row, t] - case.old[row, t]).exp()
        w = math.exp(float(case.old[row, t])) if weight == "old_probability" else 1.0
        return -advantages[row] * ratio + abs(advantages[row]) * w * (ratio - 1) ** 2 / (2 * 0.3)

    case.check(lambda new, chosen: per_decision(chosen, lambda row, t: term(new, row, t)))


def test_dual_clip() -> None:
    """A bad decision that became likelier loses no more than dual x |A|."""
    block = {"name": "dr_grpo", "surrogate": {"dual": 1.3}}
    case = make_case(block)
    advantages = {row: case.rewards[row] - mean(case.rewards[other] for other in group_of(row)) for row in VALID}
    bound = []

    def term(new: Tensor, row: int, t: int) -> Tensor:
        value = clipped(advantages[row], (new[row, t] - case.old[row, t]).exp())
        if advantages[row] < 0 and value > -1.3 * advantages[row]:
            bound.append((row, t))
            return torch.tensor(-1.3 * advantages[row])
        return value

    case.check(lambda new, chosen: per_sample(chosen, lambda row, t: term(new, row, t)))
    assert bound
    dual, plain = resolve_algorithm("ppo_dual_clip"), resolve_algorithm("ppo")
    assert dual.surrogate.dual == 3.0
    changed = {"name": "ppo", "surrogate": plain.surrogate}
    assert dual.model_copy(update=changed) == plain


def test_per_reward_normalisation() -> None:
    """GDPO: each reward is normalised within its group, then weighted and summed, then whitened over samples."""
    world = make_world()
    small, large = random(ROWS, seed=31), 100 * random(ROWS, seed=32)
    small[[8, 9]], large[10] = math.nan, math.nan
    small[11] = math.nan  # with rows 8 and 9 one valid value is left in group 2, which teaches nothing of this reward
    world.rewards.raw = {"small": small, "large": large, "unweighted": random(ROWS, seed=33)}
    world.rewards.weights = {"small": 2.0, "large": 1.0, "unweighted": 0.0}
    advantage = {"normalisation": "per_reward", "whiten": True}
    case = make_case({"name": "dr_grpo", "advantage": advantage | {"scale": "group_std"}}, world)
    sums = dict.fromkeys(VALID, 0.0)
    for weight, values in ((2.0, small.tolist()), (1.0, large.tolist())):
        for row in VALID:
            members = [values[other] for other in group_of(row) if math.isfinite(values[other])]
            if math.isfinite(values[row]):
                sums[row] += weight * (values[row] - mean(members)) / (spread(members) + 1e-4)
    centre, width = mean(sums.values()), spread(sums.values())
    advantages = {row: (value - centre) / (width + 1e-8) for row, value in sums.items()}

    def term(new: Tensor, row: int, t: int) -> Tensor:
        return clipped(advantages[row], (new[row, t] - case.old[row, t]).exp())

    case.check(lambda new, chosen: per_sample(chosen, lambda row, t: term(new, row, t)))


@pytest.mark.parametrize("type", ["group", "leave_one_out", "running_prompt"])
def test_whitened_and_bounded_advantages(type: str) -> None:
    """Over the samples with a reward, and before the bound."""
    plain, whitened = (
        make_case({"name": "dr_grpo", "advantage": {"type": type, "whiten": whiten, "clip": clip}}).experience
        for whiten, clip in ((False, 1e9), (True, 1.2))
    )
    trained = {row: steps[0] for row, steps in decisions(make_world(), torch.arange(ROWS)).items()}
    before = {row: float(plain.segments[0].advantages[row, t]) for row, t in trained.items()}
    shown = make_world()
    shown.segment.trained_mask[2] = True  # valid, but without a decision that would show its advantage
    block = {"name": "dr_grpo", "advantage": {"type": type, "clip": 1e9}}
    before[2] = float(make_case(block, shown).experience.segments[0].advantages[2, 0])
    centre, width = mean(before.values()), spread(before.values())
    expected = {row: min(max((before[row] - centre) / (width + 1e-8), -1.2), 1.2) for row in trained}
    found = {row: float(whitened.segments[0].advantages[row, t]) for row, t in trained.items()}
    assert found == pytest.approx(expected, abs=1e-5)
    assert {abs(value) == pytest.approx(1.2) for value in found.values()} == {True, False}


def test_the_clip_range_follows_its_schedule() -> None:
    """Linear from the whole range to a share of it, which then stays."""
    surrogate = {"low": 0.4, "high": 0.8, "schedule": {"final_share": 0.25, "iterations": 4}}
    case = make_case({"name": "dr_grpo", "surrogate": surrogate})
    advantages = {row: case.rewards[row] - mean(case.rewards[other] for other in group_of(row)) for row in VALID}
    minibatch = case.objective.minibatch(case.experience, torch.arange(ROWS), TorchEngine("cpu"))
    (cut,) = case.world.policy.plan(case.world.trajectory, torch.arange(ROWS), ROWS)
    new, chosen = log_probs(case.weights.detach(), case.world.tokens), decisions(case.world, torch.arange(ROWS))
    for iteration, share in ((0, 1.0), (1, 0.8125), (2, 0.625), (4, 0.25), (9, 0.25)):
        found = case.objective.loss(case.world.policy, minibatch, cut, iteration, Metrics())

        def term(row: int, t: int, share: float = share) -> Tensor:
            return clipped(advantages[row], (new[row, t] - case.old[row, t]).exp(), 0.4 * share, 0.8 * share)

        assert float(found.detach()) == pytest.approx(float(per_sample(chosen, term)), rel=1e-5)
