"""The whole loss and its gradient against plain loops over the formulas, for any cutting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from toy_policy import LENGTH, LETTERS
from toy_world import (
    FAILED,
    GROUPS,
    ROWS,
    SIZE,
    decisions,
    log_probs,
    make_world,
    moved,
    prepared,
    random,
    scored,
)
from written_out import assert_same, clipped, group_advantages

from modalities.critic import Critic, ValueHead
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective


def test_grpo() -> None:
    """Sample mean of decision means of the clipped surrogate + 0.04 k2, over the samples that train anything."""
    world = make_world()
    objective = PolicyGradientObjective(resolve_algorithm("grpo"), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    with world.policy.using("reference"):
        reference = log_probs(weights.detach().clone(), world.tokens)
    experience = prepared(objective, world)
    moved(weights, 5)
    advantages = group_advantages(world)
    assert sum(abs(a) > 0.1 for a in advantages) == 7  # group 1 has a single valid sample

    def expected(roots: Tensor) -> Tensor:
        new, chosen = log_probs(weights, world.tokens), decisions(world, roots)
        total = torch.zeros(())
        for row, steps in chosen.items():
            for t in steps:
                ratio = (new[row, t] - old[row, t]).exp()
                kl = 0.5 * (new[row, t] - reference[row, t]) ** 2
                total = total + (clipped(advantages[row], ratio) + 0.04 * kl) / len(steps)
        return total / len(chosen)

    assert_same(objective, world, experience, expected, [weights])


@pytest.mark.parametrize("trunk_gradient", [False, True])
def test_ppo(trunk_gradient: bool) -> None:
    """GAE over trained decisions with k1 in the reward, whitened; the clipped value loss beside it."""
    world = make_world()
    head = ValueHead(len(LETTERS), hidden_size=5, seed=0)
    for index, parameter in enumerate(head.parameters()):
        moved(parameter, 10 + index)
    objective = PolicyGradientObjective(
        resolve_algorithm({"name": "ppo", "entropy_coefficient": 0.01, "advantage": {"gamma": 0.9}}),
        Critic(head, None, trunk_gradient),
    )
    weights = world.policy.table.weight

    def values_now() -> Tensor:
        features = weights[0] if trunk_gradient else weights[0].detach()
        norm, first, last = head.layers[0], head.layers[1], head.layers[3]
        centred = (features - features.mean()) / ((features - features.mean()).square().mean() + 1e-5).sqrt()
        hidden = first.weight @ (centred * norm.weight + norm.bias) + first.bias
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        return (last.weight @ hidden + last.bias)[0]

    old, old_value = log_probs(weights.detach().clone(), world.tokens), values_now().item()
    with world.policy.using("reference"):
        reference = log_probs(weights.detach().clone(), world.tokens)
    experience = prepared(objective, world)
    moved(weights, 5)
    moved(head.layers[3].weight, 6, scale=-1.0)

    advantages, returns = {}, {}
    for row, steps in decisions(world, torch.arange(ROWS)).items():
        following_value = following_advantage = 0.0
        for t in reversed(steps):
            reward = float(world.rewards.total[row]) if t == steps[-1] else 0.0
            reward -= 0.05 * float(old[row, t] - reference[row, t])
            delta = reward + 0.9 * following_value - old_value
            following_advantage = delta + 0.9 * 0.95 * following_advantage
            following_value = old_value
            advantages[row, t], returns[row, t] = following_advantage, following_advantage + old_value
    mean = sum(advantages.values()) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages.values()) / len(advantages))
    assert len(advantages) > 15
    clip_holds = [abs(values_now().item() - value) < abs(old_value - value) for value in returns.values()]
    assert abs(values_now().item() - old_value) > 0.2 and any(clip_holds) and not all(clip_holds)

    def expected(roots: Tensor) -> Tensor:
        new, value = log_probs(weights, world.tokens), values_now()
        bounded = min(max(value, torch.tensor(old_value - 0.2)), torch.tensor(old_value + 0.2))
        entropy = -(weights[0].softmax(0) * weights[0].log_softmax(0)).sum()
        chosen = [(row, t) for row, steps in decisions(world, roots).items() for t in steps]
        total = torch.zeros(())
        for at in chosen:
            total = total + clipped((advantages[at] - mean) / (std + 1e-8), (new[at] - old[at]).exp())
            total = total + 0.5 * max((value - returns[at]) ** 2, (bounded - returns[at]) ** 2) - 0.01 * entropy
        return total / len(chosen)

    assert_same(objective, world, experience, expected, [weights, *head.parameters()])


def test_ddpo() -> None:
    """Advantages from what a prompt got in this iteration and the one before, bounded; mean over decisions."""
    world = make_world()
    algorithm = {
        "name": "ddpo",
        "advantage": {"buffer_size": 5, "min_count": 4, "clip": 1.0},
        "surrogate": {"high": 0.1},
    }
    objective = PolicyGradientObjective(resolve_algorithm(algorithm), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    second = world.rewards
    world.rewards = scored(random(ROWS, seed=20))  # an iteration before, in which all samples of the prompts are valid
    world.rewards.valid[8:] = False  # but not those of prompt 2
    prepared(objective, world)
    first, world.rewards = world.rewards, second
    experience = prepared(objective, world)
    moved(weights, 5)
    valid = [row for row in range(ROWS) if row not in FAILED]
    histories = {
        prompt: [float(first.total[row]) for row in range(4 * prompt, 4 * prompt + 4) if prompt < 2]
        + [float(second.total[row]) for row in range(4 * prompt, 4 * prompt + 4) if row in valid]
        for prompt in range(GROUPS)
    }
    batch = [float(second.total[row]) for row in valid]
    advantages = {}
    for row in valid:
        known = histories[row // SIZE][-5:]
        known = known if len(known) >= 4 else batch
        mean = sum(known) / len(known)
        std = math.sqrt(sum((value - mean) ** 2 for value in known) / len(known))
        advantages[row] = min(max((float(second.total[row]) - mean) / (std + 1e-6), -1.0), 1.0)
    assert {abs(a) == 1.0 for a in advantages.values()} == {True, False}

    def expected(roots: Tensor) -> Tensor:
        new, chosen = log_probs(weights, world.tokens), decisions(world, roots)
        terms = [
            clipped(advantages[row], (new[row, t] - old[row, t]).exp(), high=0.1) for row in chosen for t in chosen[row]
        ]
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected, [weights])


def test_kl_in_the_reward_of_a_sample() -> None:
    """Without a critic a sample's whole KL is charged to its reward, before samples are compared (RLOO here)."""
    world = make_world()
    kl = {"coefficient": 0.3, "estimator": "k1", "placement": "reward"}
    algorithm = {
        "name": "grpo",
        "advantage": {"type": "leave_one_out"},
        "kl": kl,
        "aggregation": {"mode": "token_mean"},
    }
    objective = PolicyGradientObjective(resolve_algorithm(algorithm), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    with world.policy.using("reference"):
        reference = log_probs(weights.detach().clone(), world.tokens)
    experience = prepared(objective, world)
    moved(weights, 5)
    steps_of = decisions(world, torch.arange(ROWS))
    valid = [row for row in range(ROWS) if row not in FAILED]
    charged = {
        row: float(world.rewards.total[row])
        - 0.3 * sum(float(old[row, t] - reference[row, t]) for t in steps_of.get(row, []))
        for row in valid
    }

    def advantage(row: int) -> float:
        others = [charged[other] for other in valid if other // SIZE == row // SIZE and other != row]
        return charged[row] - sum(others) / len(others) if others else 0.0

    def expected(roots: Tensor) -> Tensor:
        new, chosen = log_probs(weights, world.tokens), decisions(world, roots)
        terms = [
            clipped(advantage(row), (new[row, t] - old[row, t]).exp()) for row, steps in chosen.items() for t in steps
        ]
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected, [weights])


def test_sequence_ratio() -> None:
    """GSPO: one ratio per sample, exp of its mean log-ratio; each sample counts once."""
    world = make_world()
    objective = PolicyGradientObjective(resolve_algorithm({"name": "grpo", "ratio": "sequence", "kl": None}), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    experience = prepared(objective, world)
    moved(weights, 5)
    advantages = group_advantages(world)

    def expected(roots: Tensor) -> Tensor:
        new, chosen = log_probs(weights, world.tokens), decisions(world, roots)
        terms = [
            clipped(advantages[row], (sum(new[row, t] - old[row, t] for t in steps) / len(steps)).exp())
            for row, steps in chosen.items()
        ]
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected, [weights])


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_rollout_mismatch(kind: str) -> None:
    """The ratio is against training's own old log-probs; the sampler's enter as a truncated weight or a band. What has
    no finite log-prob there leaves numerator and denominator."""
    world = make_world()
    mismatch = {"truncate": {"cap": 1.1}, "mask": {"low": 0.9, "high": 1.1}}[kind]
    algorithm = {"name": "ddpo", "mismatch": {"type": kind, **mismatch}, "surrogate": {"low": 0.3}}
    objective = PolicyGradientObjective(resolve_algorithm(algorithm), None)
    weights = world.policy.table.weight
    old = log_probs(weights.detach().clone(), world.tokens)
    sampler = old + 0.2 * random(ROWS, LENGTH, seed=30)
    row, t = world.mask.nonzero()[3].tolist()
    sampler[row, t] = -math.inf
    world.segment.rollout_log_probs = sampler
    experience = prepared(objective, world)
    moved(weights, 5)
    rho = (old - sampler).exp()
    kept = world.mask & sampler.isfinite()
    if kind == "mask":
        kept &= (rho >= 0.9) & (rho <= 1.1)
    assert 5 < kept.sum() < world.mask.sum()
    valid = [float(r) for r in world.rewards.total[world.rewards.valid]]
    mean = sum(valid) / len(valid)
    std = math.sqrt(sum((value - mean) ** 2 for value in valid) / len(valid))

    def expected(roots: Tensor) -> Tensor:
        new, chosen = log_probs(weights, world.tokens), decisions(world, roots, kept)
        total = torch.zeros(())
        for row, steps in chosen.items():
            for t in steps:
                weight = min(float(rho[row, t]), 1.1) if kind == "truncate" else 1.0
                advantage = (float(world.rewards.total[row]) - mean) / (std + 1e-6)
                total = total + weight * clipped(advantage, (new[row, t] - old[row, t]).exp(), 0.3, 0.3)
        return total / sum(map(len, chosen.values()))

    assert_same(objective, world, experience, expected, [weights])
