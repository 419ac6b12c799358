"""A tiny SD3 policy that was sampled from and has moved since, and its raw transformer, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from denoising_helpers import image_policy, requests
from torch import Tensor

from modalities.base import DenoisingSegment, ForwardSegment, LatentSegment, Trajectory
from modalities.denoising import DenoisingPolicy
from modalities.randomness import seeded_generator
from rewards.combine import RewardResult
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective

GROUPS, SIZE = 2, 3
ROWS = GROUPS * SIZE
FAILED = 4
"""The row whose reward failed."""


@dataclass
class DenoisingWorld:
    """The reference, the weights "old" and those of the rollout are three places; the current ones move on."""

    policy: DenoisingPolicy
    trajectory: Trajectory
    rewards: RewardResult

    @property
    def valid(self) -> list[int]:
        return [row for row in range(ROWS) if row != FAILED]

    @property
    def parameters(self) -> list[Tensor]:
        return list(self.policy.weight_sets.parameters().values())

    def output(self, segment: LatentSegment, row: int, x: Tensor, sigma: float) -> Tensor:
        """Of the transformer itself, without guidance, for one latent."""
        prompt = segment.condition_index[row : row + 1]
        text = segment.conditions["prompt_embeds"][prompt]
        (pooled,) = (value[prompt] for name, value in segment.conditions.items() if name != "prompt_embeds")
        time = torch.tensor([1000 * sigma])
        return self.policy.pipeline.transformer(x[None], text, pooled, time).sample[0]

    def under(self, weights: str, values: Callable[[], Any]) -> Any:
        """`values()` with a named weight set and without gradient."""
        with torch.no_grad(), self.policy.using(weights):
            return values()


def moved(world: DenoisingWorld | DenoisingPolicy, seed: int, scale: float) -> None:
    """Moves every trainable weight."""
    policy = world.policy if isinstance(world, DenoisingWorld) else world
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def scored(total: Tensor) -> RewardResult:
    return RewardResult(total, total.isfinite(), {}, {}, {}, {})


def make_world(model: Path, **sampling: Any) -> DenoisingWorld:
    """`model` is a folder of `tiny_stable_diffusion_3`."""
    block = {"steps": 3, "guidance_scale": 1.0, "height": 8, "width": 8} | sampling
    policy = image_policy(model, block, max_sequence_length=8)
    moved(policy, 1, 0.02)
    policy.keep("reference")
    moved(policy, 2, 0.02)
    policy.keep("old")
    moved(policy, 3, 0.02)
    trajectory = policy.rollout(requests(ROWS, per_prompt=SIZE))
    total = torch.randn(ROWS, generator=torch.Generator().manual_seed(4))
    total[FAILED] = math.nan
    return DenoisingWorld(policy, trajectory, scored(total))


def denoising_segment(trajectory: Trajectory) -> DenoisingSegment:
    segment = trajectory.segments[0]
    assert isinstance(segment, DenoisingSegment)
    return segment


def forward_segment(trajectory: Trajectory) -> ForwardSegment:
    segment = trajectory.segments[0]
    assert isinstance(segment, ForwardSegment)
    return segment


def draw(segment: ForwardSegment, row: int, t: int) -> tuple[Tensor, float, Tensor]:
    """(clean latent, sigma, noise) of one draw."""
    noise = torch.randn(segment.clean.shape[1:], generator=seeded_generator(int(segment.noise_seed[row]), t))
    return segment.clean[row].float(), float(segment.times[row, t]), noise


def states(segment: DenoisingSegment, row: int, t: int) -> tuple[Tensor, Tensor]:
    """The latents before and after one transition."""
    kept = {**segment.states, segment.num_steps: segment.final_latents}
    return kept[t][row].float(), kept[t + 1][row].float()


def prepared(objective: Objective, world: DenoisingWorld, metrics: Metrics | None = None) -> Experience:
    trajectory, result = objective.as_trained(world.policy, world.trajectory, world.rewards)
    cuts = objective.plan(world.policy, trajectory, torch.arange(ROWS), 4)
    return objective.prepare(world.policy, trajectory, result, cuts, TorchEngine("cpu"), metrics or Metrics())


def accumulated(
    objective: Objective,
    world: DenoisingWorld,
    experience: Experience,
    roots: Tensor,
    budget: int,
    others: Sequence[Tensor] = (),
) -> tuple[float, list[Tensor]]:
    """The loss and its gradient, by the policy's parameters and `others`, added up over cuts of `budget` rows."""
    parameters = [*world.parameters, *others]
    for parameter in parameters:
        parameter.grad = None
    minibatch = objective.minibatch(experience, roots, TorchEngine("cpu"))
    loss = 0.0
    for cut in objective.plan(world.policy, experience.trajectory, roots, budget):
        part = objective.loss(world.policy, minibatch, cut, 0, Metrics())
        part.backward()
        loss += float(part.detach())
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def assert_same(
    objective: Objective,
    world: DenoisingWorld,
    experience: Experience,
    expected: Callable[[list[int]], Tensor],
    others: Sequence[Tensor] = (),
) -> None:
    """For all rows and a part of them, however they are cut, loss and gradient are those of `expected(rows)`."""
    for roots, budgets in ((torch.arange(ROWS), (1, 4)), (torch.tensor([5, 0, 3, 4]), (ROWS,))):
        loss = expected([row for row in sorted(roots.tolist()) if row in world.valid])
        parameters = [*world.parameters, *others]
        gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
        wanted = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient, strict=True)]
        size = torch.cat([g.flatten() for g in wanted]).norm()
        assert size > 1e-4
        for budget in budgets:
            found_loss, found = accumulated(objective, world, experience, roots, budget, others)
            assert math.isclose(found_loss, loss.item(), rel_tol=2e-5, abs_tol=1e-6), (found_loss, loss.item())
            difference = torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)]).norm()
            assert difference <= 1e-4 * size, budget


def group_advantages(world: DenoisingWorld, scale: str, epsilon: float, clip: float = math.inf) -> dict[int, float]:
    """Of each valid row: (r - mean of its group) / (std + epsilon), the std of the group or of the whole batch."""
    rewards = {row: float(world.rewards.total[row]) for row in world.valid}

    def std(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))

    found = {}
    for row, reward in rewards.items():
        group = [other for member, other in rewards.items() if member // SIZE == row // SIZE]
        spread = std(group if scale == "group_std" else list(rewards.values()))
        found[row] = min(max((reward - sum(group) / len(group)) / (spread + epsilon), -clip), clip)
    return found
