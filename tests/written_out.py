"""Formulas written out, one sample and one decision at a time; nothing of the package computes here."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy_world import FAILED, ROWS, World, accumulated

from uniml_rl.experience import Experience
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective


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


def group_advantage(rewards: list[float], row: int, members: list[int]) -> float:
    values = [rewards[member] for member in members]
    mean = sum(values) / len(values)
    std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    return (rewards[row] - mean) / (std + 1e-4)


def clipped(advantage: Tensor | float, ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    bounded = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
    return max(-advantage * ratio, -advantage * bounded)


def group_advantages(world: World) -> list[float]:
    rewards, group = world.rewards.total.tolist(), world.segment.group.tolist()
    valid = [row for row in range(ROWS) if row not in FAILED]
    return [
        group_advantage(rewards, row, [other for other in valid if group[other] == group[row]]) if row in valid else 0.0
        for row in range(ROWS)
    ]
