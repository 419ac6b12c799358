"""Given texts and images, and one optimizer step of an objective that learns from whole samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models_text import tiny_gpt2
from torch import Tensor

from modalities.base import Policy, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Image, Prompt, Text
from modalities.text import TextPolicy, TextPolicyConfig
from rewards.combine import RewardResult
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective

PROMPTS = ["a", "b c d", "e f", "g"]
RESPONSES = [["a b", "c"], ["d e f g", "a"], ["b", "h i j"], ["", "k"]]
"""Two of each prompt; one is empty."""


def text_policy(folder: Path) -> TextPolicy:
    """A tiny GPT-2 that has moved away from its reference."""
    policy = TextPolicyConfig.model_validate({"model": str(tiny_gpt2(folder / "gpt2"))}).build("writer", "cpu", 0)
    policy.keep("reference")
    moved(policy, 0.1)
    return policy


def moved(policy: Policy, scale: float) -> None:
    """Moves every trainable weight."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def given_texts(policy: Policy, labels: Sequence[float]) -> tuple[Trajectory, RewardResult]:
    """Two responses to each of the first prompts, as a group; a label of NaN is a failed reward."""
    rows = [(prompt, number) for prompt in range(len(labels) // 2) for number in range(2)]
    trajectory = policy.encode(
        [Prompt(PROMPTS[prompt], prompt) for prompt, _ in rows],
        [Text(RESPONSES[prompt][number], 0, True) for prompt, number in rows],
        [SampleKey(0, 0, 0, prompt, number) for prompt, number in rows],
    )
    return trajectory, scored(labels)


def given_images(policy: Policy, labels: Sequence[float]) -> tuple[Trajectory, RewardResult]:
    """The same of random images."""
    generator = torch.Generator().manual_seed(4)
    rows = [(prompt, number) for prompt in range(len(labels) // 2) for number in range(2)]
    trajectory = policy.encode(
        [Prompt(PROMPTS[prompt], prompt) for prompt, _ in rows],
        [Image(torch.randint(0, 256, (3, 16, 16), generator=generator, dtype=torch.uint8)) for _ in rows],
        [SampleKey(0, 0, 0, prompt, number) for prompt, number in rows],
    )
    return trajectory, scored(labels)


def scored(labels: Sequence[float]) -> RewardResult:
    """The labels as rewards."""
    total = torch.tensor(labels)
    return RewardResult(total, total.isfinite(), {}, {}, {}, {})


def loss_and_gradient(
    objective: Objective,
    policy: Policy,
    trajectory: Trajectory,
    result: RewardResult,
    budget: int,
    engine: Engine | None = None,
) -> tuple[float, Tensor, Metrics]:
    """Of one optimizer step over everything, cut into micro-batches of `budget` rows."""
    engine, metrics = engine or TorchEngine("cpu"), Metrics()
    trajectory, result = objective.as_trained(policy, trajectory, result)
    roots = torch.arange(trajectory.segments[0].num_rows)
    cuts = objective.plan(policy, trajectory, roots, budget)
    experience = objective.prepare(policy, trajectory, result, cuts, engine, metrics)
    minibatch = objective.minibatch(experience, roots, engine)
    parameters = list(policy.weight_sets.parameters().values())
    total, gradient = 0.0, torch.zeros(sum(p.numel() for p in parameters))
    for cut in cuts:
        loss = objective.loss(policy, minibatch, cut, 0, metrics)
        total += loss.item()
        gradient += flat(torch.autograd.grad(loss, parameters, materialize_grads=True))
    return total, gradient, metrics


def flat(gradients: Any) -> Tensor:
    """One vector of all."""
    return torch.cat([gradient.flatten() for gradient in gradients])
