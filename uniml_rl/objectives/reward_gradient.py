"""Reward backpropagation: ReFL, DRaFT-K and AlignProp send a differentiable reward's own gradient into the denoiser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from modalities.critic import Critic
from modalities.errors import UserError
from rewards.combine import RewardResult, RewardSet
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.direct_settings import RewardGradientSettings
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch, SegmentExperience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective

_CHOICE_OF_STEPS = -1
"""In place of a segment's number in a sample's key: random numbers of the objective, not of the sampler."""


class RewardGradientObjective(Objective):
    """-mean over samples of reward(decode(x_0)), with gradient through the decoder and some denoising steps.

    The samples of a rollout are made again from the same random numbers, now with gradient; a sample whose reward fails
    either time is left out. A random number of steps is drawn once per iteration, so that the gradient does not depend
    on micro-batches and ranks.
    """

    def __init__(self, settings: RewardGradientSettings, rewards: RewardSet) -> None:
        self.settings = settings
        self.rewards = rewards

    @classmethod
    def build(cls, settings: Any, critic: Critic | None, rewards: RewardSet | None) -> RewardGradientObjective:
        if rewards is None:
            raise UserError(f"algorithm {settings.name!r} needs rewards.")
        return cls(settings, rewards)

    def plan(self, policy: Policy, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """Rows alone: every cut holds all their steps."""
        return [Cut(0, rows, slice(0, trajectory.segments[0].num_steps)) for rows in roots.split(budget) if len(rows)]

    def prepare(
        self,
        policy: Policy,
        trajectory: Trajectory,
        result: RewardResult,
        cuts: list[Cut],
        engine: Engine,
        metrics: Metrics,
    ) -> Experience:
        segment = trajectory.segments[0]
        mask = result.valid.unsqueeze(1)
        return Experience(trajectory, [SegmentExperience(mask, segment.group, torch.zeros(()), torch.zeros(()))])

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        mask = experience.segments[0].mask
        weights = torch.zeros(mask.shape).index_fill_(0, roots, 1.0) * mask
        count = engine.sum_over_ranks(weights.double().sum())
        return Minibatch(experience, roots, [weights], [count], int(count))

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        requests = [minibatch.experience.trajectory.requests[row] for row in cut.rows.tolist()]
        steps = minibatch.experience.trajectory.segments[0].num_steps
        gradient = self.settings.gradient
        key = replace(requests[0].key, prompt=0, sample=0, segment=_CHOICE_OF_STEPS)
        count = gradient.draw(steps, key.generator())
        trajectory = policy.rollout_with_gradient(requests, count, early_clean=gradient.early_clean)
        samples = policy.decode(trajectory, differentiable=True)
        rewards, valid = self.rewards.score_with_gradient(samples, [request.prompt for request in requests], iteration)
        weights = torch.where(valid, minibatch.weights[0][cut.rows, 0].to(valid.device), 0.0)
        total = aggregate(-rewards, weights, minibatch.denominators[0])
        metrics.sum("loss/total", total.detach())
        return total
