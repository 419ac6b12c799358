"""A toy policy that was sampled from and has moved since: ragged masks, failed rewards, a reference elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from toy_policy import LENGTH, ToyPolicy

from modalities.base import Request, Segment, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from rewards.combine import RewardResult
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective

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


def log_probs(weights: Tensor, tokens: Tensor) -> Tensor:
    """[B, T] of the toy: a softmax over one row of weights."""
    normalised = weights[0] - weights[0].exp().sum().log()
    return normalised[tokens]


def decisions(world: World, roots: Tensor, mask: Tensor | None = None) -> dict[int, list[int]]:
    """Trained decisions of each row that has one."""
    mask = world.mask if mask is None else mask
    found = {row: mask[row].nonzero().flatten().tolist() for row in sorted(roots.tolist())}
    return {row: steps for row, steps in found.items() if steps}
