"""The whole loss against plain loops over the formulas; and what an objective does with failures, kinds and ranks."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_policy import LENGTH, LETTERS, ToyPolicy
from toy_runs import on_ranks

from modalities.base import Request, Segment, Trajectory
from modalities.critic import Critic, ValueHead
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from rewards.combine import RewardResult
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience, to_segment
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objective import PolicyGradientObjective

GROUPS, SIZE = 3, 4
ROWS = GROUPS * SIZE
FAILED = [1, 4, 5, 6]  # rows whose reward failed: one of group 0, three of group 1, which keeps a single valid sample


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moved(weights: Tensor, seed: int, scale: float = 0.5) -> None:
    with torch.no_grad():
        weights.add_(scale * random(*weights.shape, seed=seed))


@dataclass
class World:
    """A toy policy that was sampled from, and has moved since; its reference lies elsewhere still."""

    policy: ToyPolicy
    trajectory: Trajectory
    rewards: RewardResult

    @property
    def segment(self) -> Segment:
        return self.trajectory.segments[0]

    @property
    def tokens(self) -> Tensor:
        return self.segment.tokens  # type: ignore[attr-defined, no-any-return]

    @property
    def mask(self) -> Tensor:
        """Trained decisions of valid rows."""
        return self.segment.trained_mask & self.rewards.valid[:, None]


def scored(total: Tensor) -> RewardResult:
    return RewardResult(total, total.isfinite(), {}, {}, {}, {})


def make_world() -> World:
    policy = ToyPolicy("letters")
    moved(policy.table.weight, 1)
    policy.keep("reference")
    moved(policy.table.weight, 2)
    requests = [
        Request(Prompt("p", group), group, SampleKey(0, 0, 0, group, sample))
        for group in range(GROUPS)
        for sample in range(SIZE)
    ]
    trajectory = policy.rollout(requests)
    ragged = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.7
    ragged[2] = False  # a sample without a trained decision
    trajectory.segments[0].trained_mask = ragged
    total = random(ROWS, seed=4)
    total[FAILED] = math.nan
    return World(policy, trajectory, scored(total))


def prepared(
    objective: PolicyGradientObjective, world: World, engine: Engine | None = None, metrics: Metrics | None = None
) -> Experience:
    cuts = world.policy.plan(world.trajectory, torch.arange(len(world.tokens)), 5)
    return objective.prepare(
        world.policy, world.trajectory, world.rewards, cuts, engine or TorchEngine("cpu"), metrics or Metrics()
    )


def accumulated(
    objective: PolicyGradientObjective,
    world: World,
    experience: Experience,
    roots: Tensor,
    budget: int,
    parameters: list[Tensor],
    iteration: int = 0,
) -> tuple[float, list[Tensor]]:
    """The loss and its gradient, added up over cuts of `budget` rows."""
    for parameter in parameters:
        parameter.grad = None
    minibatch = objective.minibatch(experience, roots, TorchEngine("cpu"))
    loss = 0.0
    for cut in world.policy.plan(world.trajectory, roots, budget):
        part = objective.loss(world.policy, minibatch, cut, iteration, Metrics())
        part.backward()
        loss += float(part.detach())
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def assert_same(
    objective: PolicyGradientObjective,
    world: World,
    experience: Experience,
    expected: Callable[[Tensor], Tensor],
    parameters: list[Tensor],
) -> None:
    """For all rows and a part of them, however they are cut, loss and gradient are those of `expected(roots)`."""
    for roots in (torch.arange(ROWS), torch.tensor([7, 0, 8, 3, 10])):
        loss = expected(roots)
        gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
        wanted = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient, strict=True)]
        assert any(g.abs().max() > 1e-3 for g in wanted)
        for budget in (1, 4, ROWS):
            found_loss, found = accumulated(objective, world, experience, roots, budget, parameters)
            assert found_loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
            for name, (a, b) in enumerate(zip(found, wanted, strict=True)):
                assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), (budget, name, a, b)


# -- the formulas, one sample and one decision at a time; nothing of the package computes here --------


def log_probs(weights: Tensor, tokens: Tensor) -> Tensor:
    """[B, T] of the toy: a softmax over one row of weights."""
    normalised = weights[0] - weights[0].exp().sum().log()
    return normalised[tokens]


def group_advantage(rewards: list[float], row: int, members: list[int]) -> float:
    values = [rewards[member] for member in members]
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return (rewards[row] - mean) / (std + 1e-4)


def clipped(advantage: Tensor | float, ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
    return max(-advantage * ratio, -advantage * bounded)


def decisions(world: World, roots: Tensor, mask: Tensor | None = None) -> dict[int, list[int]]:
    """Trained decisions of each row that has one."""
    mask = world.mask if mask is None else mask
    found = {row: mask[row].nonzero().flatten().tolist() for row in sorted(roots.tolist())}
    return {row: steps for row, steps in found.items() if steps}


def group_advantages(world: World) -> list[float]:
    rewards, group = world.rewards.total.tolist(), world.segment.group.tolist()
    valid = [row for row in range(ROWS) if row not in FAILED]
    return [
        group_advantage(rewards, row, [other for other in valid if group[other] == group[row]]) if row in valid else 0.0
        for row in range(ROWS)
    ]


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
    moved(head.layers[3].weight, 6)

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


# -- failures --------


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
    objective.finish_iteration(experience, TorchEngine("cpu"), metrics)
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
    objective.finish_iteration(experience, TorchEngine("cpu"), metrics := Metrics())
    assert metrics.reduce()["kl/coefficient"] == pytest.approx(0.04)
    assert objective.kl_controller is not None
    assert objective.kl_controller.coefficient == pytest.approx(0.04 * (1 + error * len(estimate) / 40))
    assert 0 < len(estimate) < ROWS
    world.rewards = scored(torch.full((ROWS,), math.nan))
    before = objective.kl_controller.coefficient
    objective.finish_iteration(prepared(objective, world), TorchEngine("cpu"), Metrics())
    assert objective.kl_controller.coefficient == before


@pytest.mark.parametrize("block", [ADAPTIVE, {"name": "ddpo", "advantage": {"min_count": 6}}, {"name": "ppo"}])
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
        objective.finish_iteration(experience, engine, Metrics())
        numbers = [float(minibatch.denominators[0]), float(minibatch.trained_decisions)]
        return experience.segments[0].advantages, numbers, objective.state_dict()

    alone = work(TorchEngine("cpu"))
    together = on_ranks(3, work)
    assert alone[0].abs().max() > 0.1
    assert torch.allclose(torch.cat([advantages for advantages, _, _ in together]), alone[0], atol=1e-6)
    for _, numbers, state in together:
        assert numbers == alone[1]
        assert state["kl_controller"] == pytest.approx(alone[2]["kl_controller"])
        for segment, statistics in alone[2]["running_statistics"].items():
            assert all(torch.equal(state["running_statistics"][segment][key], statistics[key]) for key in statistics)


# -- replay, reference, critic --------


def test_a_replay_that_scores_something_else_is_an_error_a_warning_or_ignored(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    world.segment.trained_mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
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


def test_an_objective_refuses_a_policy_that_does_not_offer_what_it_reads() -> None:
    policy = ToyPolicy("letters")
    for block, missing in (
        ({"name": "grpo"}, None),
        ({"name": "grpo", "entropy_coefficient": 0.1}, "needs entropy"),
        ({"name": "flow_grpo"}, "needs mean, std"),
    ):
        policy.offers = frozenset({"log_prob"})
        objective = PolicyGradientObjective(resolve_algorithm(block), None)
        if missing is None:
            objective.check_policy(policy)
            continue
        with pytest.raises(UserError, match=missing):
            objective.check_policy(policy)


def test_what_lives_from_one_iteration_to_the_next_is_restored() -> None:
    world = make_world()
    for block in (ADAPTIVE, {"name": "ddpo", "advantage": {"min_count": 6}}):
        settings = resolve_algorithm(block)
        first, second = PolicyGradientObjective(settings, None), PolicyGradientObjective(settings, None)
        first.finish_iteration(prepared(first, world), TorchEngine("cpu"), Metrics())
        fresh = prepared(second, world).segments[0].advantages
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        expected, found = (prepared(each, world).segments[0].advantages for each in (first, second))
        assert torch.equal(found, expected)
        if block is not ADAPTIVE:
            assert not torch.equal(found, fresh)
        else:
            assert vars(second.kl_controller) == vars(first.kl_controller)


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
