"""The denoising rows of policy gradients against the papers' formulas, one sample and one transition at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_world import (
    ROWS,
    DenoisingWorld,
    accumulated,
    assert_same,
    denoising_segment,
    group_advantages,
    make_world,
    moved,
    prepared,
    states,
)
from tiny_models_diffusion import tiny_stable_diffusion_3
from torch import Tensor

from modalities.base import Cut
from modalities.critic import Critic, ValueHead
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stable_diffusion_3(tmp_path_factory.mktemp("models"))


# -- the transitions of the papers: sigma runs from 1 to 0, D = sigma_next - sigma < 0 --------


def flow_sde(x: Tensor, v: Tensor, sigma: float, following: float, second: float, a: float) -> tuple[Tensor, float]:
    """Flow-GRPO; at sigma = 1 its g takes the second sigma of the grid."""
    step = following - sigma
    g = a * math.sqrt(sigma / (1 - (second if sigma == 1 else sigma)))
    mean = x * (1 + g**2 * step / (2 * sigma)) + v * (1 + g**2 * (1 - sigma) / (2 * sigma)) * step
    return mean, g * math.sqrt(-step)


def dance_sde(x: Tensor, v: Tensor, sigma: float, following: float, second: float, eta: float) -> tuple[Tensor, float]:
    step, clean = following - sigma, x - sigma * v
    score = -(x - clean * (1 - sigma)) / sigma**2
    return x + v * step - 0.5 * eta**2 * score * step, eta * math.sqrt(-step)


def cps(x: Tensor, v: Tensor, sigma: float, following: float, second: float, a: float) -> tuple[Tensor, float]:
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    std = following * math.sin(a * math.pi / 2)
    return clean * (1 - following) + noise * math.sqrt(following**2 - std**2), std


KERNELS = {"flow_sde": (flow_sde, 0.7), "dance_sde": (dance_sde, 0.3), "cps": (cps, 0.8)}


@dataclass
class Step:
    """One transition, now."""

    mean: Tensor
    std: float
    log_prob: Tensor
    after: Tensor
    size: float  # sigma - sigma_next


def transitions(world: DenoisingWorld) -> dict[tuple[int, int], Step]:
    """Every trained transition of every valid row."""
    segment, found = denoising_segment(world.trajectory), {}
    kernel, level = KERNELS[segment.sampler]
    for row in world.valid:
        times = segment.times[row].tolist()
        for t in segment.trained_mask[row].nonzero().flatten().tolist():
            x, after = states(segment, row, t)
            v = world.output(segment, row, x, times[t])
            mean, std = kernel(x, v, times[t], times[t + 1], times[1], level)
            log_prob = torch.distributions.Normal(mean, std).log_prob(after).mean()
            found[row, t] = Step(mean, std, log_prob, after, times[t] - times[t + 1])
    return found


def clipped(advantage: float, ratio: Tensor, low: float) -> Tensor:
    bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + low))
    return max(-advantage * ratio, -advantage * bounded)


def drift(now: Step, before: Step) -> Tensor:
    return ((now.mean - before.mean) ** 2).mean() / (2 * before.std**2)


def ppo_clip(advantage: float, now: Step, before: Step, low: float) -> Tensor:
    return clipped(advantage, (now.log_prob - before.log_prob).exp(), low)


def guard(advantage: float, now: Step, before: Step, low: float) -> Tensor:
    """The recentred ratio is exp of the mean of noise x (mu - mu_old), for the noise that was drawn."""
    noise = (before.after - before.mean) / before.std
    return clipped(advantage, (noise * (now.mean - before.mean)).mean().exp(), low) / now.size


def dppo(advantage: float, now: Step, before: Step, threshold: float) -> Tensor:
    ratio = (now.log_prob - before.log_prob).exp()
    away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    return torch.zeros(()) if away and drift(now, before) >= threshold else -advantage * ratio


WINDOW = {"steps": 5, "window": {"steps": [1, 2]}}
MOVING = {"steps": 6, "window": {"moving": {"size": 2, "every": 2}}}  # the requests are of iteration 3: one move
ROWS_OF_THE_TABLE: list[
    tuple[dict[str, Any], dict[str, Any], list[int], Callable[..., Tensor], float, tuple[str, float]]
] = [
    ({"name": "flow_grpo_fast"}, WINDOW | {"sampler": {"type": "cps"}}, [1, 2], ppo_clip, 1e-5, ("batch_std", 1e-4)),
    ({"name": "dance_grpo"}, {"sampler": {"type": "dance_sde"}}, [0, 1], ppo_clip, 1e-4, ("group_std", 1e-8)),
    ({"name": "flow_cps"}, {"sampler": {"type": "cps"}}, [0, 1], ppo_clip, 1e-5, ("batch_std", 1e-4)),
    ({"name": "mix_grpo"}, MOVING, [1, 2], ppo_clip, 1e-4, ("group_std", 1e-8)),
    ({"name": "grpo_guard"}, {}, [0, 1], guard, 2e-6, ("group_std", 1e-4)),
    ({"name": "grpo_guard"}, {"sampler": {"type": "cps"}}, [0, 1], guard, 2e-6, ("group_std", 1e-4)),
    ({"name": "flow_dppo"}, {}, [0, 1], dppo, 1e-6, ("batch_std", 1e-4)),
    ({"name": "flow_dppo"}, {"sampler": {"type": "cps"}}, [0, 1], dppo, 1e-6, ("batch_std", 1e-4)),
]


@pytest.mark.parametrize(
    ("block", "sampling", "steps", "surrogate", "bound", "advantage"),
    ROWS_OF_THE_TABLE,
    ids=[f"{row[0]['name']}-{row[1].get('sampler', {}).get('type', 'flow_sde')}" for row in ROWS_OF_THE_TABLE],
)
def test_a_row_of_the_table(
    model: Path,
    block: dict[str, Any],
    sampling: dict[str, Any],
    steps: list[int],
    surrogate: Callable[..., Tensor],
    bound: float,
    advantage: tuple[str, float],
) -> None:
    """The mean over valid samples and trained transitions, and nothing else is in the loss."""
    world = make_world(model, **{"steps": 3} | sampling)
    assert denoising_segment(world.trajectory).trained_mask.any(0).nonzero().flatten().tolist() == steps
    objective = PolicyGradientObjective(resolve_algorithm(block), None)  # type: ignore[arg-type]
    experience = prepared(objective, world)
    before = world.under("current", lambda: transitions(world))
    moved(world, 5, 0.001)
    advantages = group_advantages(world, *advantage, clip=5.0)
    now = world.under("current", lambda: transitions(world))
    bounded = [float(surrogate(advantages[at[0]], now[at], before[at], bound)) for at in now]
    free = [float(surrogate(advantages[at[0]], now[at], before[at], 0.9)) for at in now]
    assert {a == b for a, b in zip(bounded, free, strict=True)} == {True, False}

    def expected(rows: list[int]) -> Tensor:
        now = transitions(world)
        terms = [surrogate(advantages[at[0]], now[at], before[at], bound) for at in now if at[0] in rows]
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected)


@pytest.mark.parametrize("estimator", ["gaussian", "prediction_mse"])
def test_flow_grpo(model: Path, estimator: str) -> None:
    """The clipped surrogate + beta times the transition's KL to the reference, or the velocity's difference."""
    world = make_world(model)
    kl = {"coefficient": 0.3, "estimator": estimator}
    objective = PolicyGradientObjective(resolve_algorithm({"name": "flow_grpo", "kl": kl}), None)  # type: ignore[arg-type]
    experience, segment = prepared(objective, world), denoising_segment(world.trajectory)
    before, reference = (world.under(name, lambda: transitions(world)) for name in ("current", "reference"))

    def velocities() -> dict[tuple[int, int], Tensor]:
        return {
            (row, t): world.output(segment, row, states(segment, row, t)[0], float(segment.times[row, t]))
            for row, t in before
        }

    reference_velocities = world.under("reference", velocities)
    moved(world, 5, 0.001)
    advantages = group_advantages(world, "group_std", 1e-4, clip=5.0)

    def expected(rows: list[int]) -> Tensor:
        now, v, terms = transitions(world), velocities(), []
        for at in now:
            if at[0] in rows:
                normal = torch.distributions.Normal
                pair = (normal(now[at].mean, now[at].std), normal(reference[at].mean, reference[at].std))
                divergence = torch.distributions.kl_divergence(*pair).mean()
                if estimator == "prediction_mse":
                    divergence = ((v[at] - reference_velocities[at]) ** 2).mean()
                terms.append(ppo_clip(advantages[at[0]], now[at], before[at], 1e-4) + 0.3 * divergence)
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected)


def test_ppo_with_a_critic_over_denoising_steps(model: Path) -> None:
    """GAE over the trained transitions, the reward on the last of them; whitened; the value loss beside it."""
    world = make_world(model, steps=4)
    head = ValueHead(world.policy.feature_size, hidden_size=5, seed=0)
    with torch.no_grad():
        head.layers[-1].weight += torch.randn(head.layers[-1].weight.shape, generator=torch.Generator().manual_seed(8))
    block = {"name": "denoising_ppo", "advantage": {"gamma": 0.9}, "value": {"coefficient": 0.5}}
    objective = PolicyGradientObjective(resolve_algorithm(block), Critic(head, None, trunk_gradient=False))  # type: ignore[arg-type]
    segment = denoising_segment(world.trajectory)

    def values() -> dict[tuple[int, int], Tensor]:
        found = {}
        for row in world.valid:
            for t in range(3):
                cut = Cut(0, torch.tensor([row]), slice(t, t + 1))
                features = world.policy.replay(world.trajectory, cut, frozenset({"features"})).of("features")[0, 0]
                found[row, t] = head.layers(features.detach())[0]
        return found

    assert segment.trained_mask.any(0).tolist() == [True, True, True, False]
    experience = prepared(objective, world)
    before, old_values = world.under("current", lambda: (transitions(world), values()))
    assert len({round(float(value), 3) for value in old_values.values()}) > 9  # of the latent, the step and the prompt
    advantages, returns = {}, {}
    for row in world.valid:
        following_value = following_advantage = 0.0
        for t in (2, 1, 0):
            value, reward = float(old_values[row, t]), float(world.rewards.total[row]) if t == 2 else 0.0
            following_advantage = reward + 0.9 * following_value - value + 0.9 * 0.95 * following_advantage
            following_value = value
            advantages[row, t], returns[row, t] = following_advantage, following_advantage + value
    mean = sum(advantages.values()) / len(advantages)
    std = math.sqrt(sum((a - mean) ** 2 for a in advantages.values()) / len(advantages))
    moved(world, 5, 0.001)

    def expected(rows: list[int]) -> Tensor:
        now, value, terms = transitions(world), values(), []
        for at in now:
            if at[0] in rows:
                advantage = min(max((advantages[at] - mean) / (std + 1e-8), -5.0), 5.0)
                terms.append(
                    ppo_clip(advantage, now[at], before[at], 1e-4) + 0.5 * 0.5 * (value[at] - returns[at]) ** 2
                )
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected, list(head.parameters()))


# -- properties --------


def test_guards_ratio_is_one_on_policy_and_so_are_all_others(model: Path) -> None:
    world = make_world(model)
    for name in ("grpo_guard", "flow_dppo"):
        objective = PolicyGradientObjective(resolve_algorithm(name), None)  # type: ignore[arg-type]
        experience, metrics = prepared(objective, world), Metrics()
        minibatch = objective.minibatch(experience, torch.arange(ROWS), TorchEngine("cpu"))
        for cut in objective.plan(world.policy, world.trajectory, torch.arange(ROWS), 2):
            objective.loss(world.policy, minibatch, cut, 0, metrics)
        found = metrics.reduce(TorchEngine("cpu"))
        assert found["policy/ratio_max_deviation"] <= 1e-6
        assert found["policy/clip_share"] == 0


def test_dppo_without_a_bound_is_the_unclipped_policy_gradient(model: Path) -> None:
    world = make_world(model)
    gradients = []
    for surrogate in ({"type": "flow_dppo", "threshold": 1e9}, {"type": "ppo_clip", "low": 1.0, "high": 1e9}):
        objective = PolicyGradientObjective(resolve_algorithm({"name": "flow_dppo", "surrogate": surrogate}), None)  # type: ignore[arg-type]
        experience = prepared(objective, world)
        gradients.append(accumulated(objective, world, experience, torch.arange(ROWS), ROWS)[1])
    assert max(float(g.abs().max()) for g in gradients[0]) > 1e-3
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*gradients, strict=True))
