"""What the trainer asks of an objective, which turns a scored trajectory into losses; its files are beside this one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from modalities.critic import Critic
from rewards.combine import RewardResult, RewardSet
from uniml_rl.algorithms.aggregation import decision_weights, global_denominator
from uniml_rl.algorithms.parts import AggregationSettings
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch
from uniml_rl.monitor.metrics import Metrics


class Objective(ABC):
    """What the trainer asks of any objective."""

    needs_reference: bool = False
    """Whether a weight set "reference" is kept from the stage's start on."""
    keeps_old_policy: bool = False
    """Whether the weight set "old" is kept."""
    rollout_weights: str = "current"
    """The weight set that rollouts are sampled with."""
    resampling_rounds: int = 0
    """How often a rollout whose groups are not all `useful` is topped up with other prompts."""
    pretraining_epochs: int = 0
    """Passes over the stage's first rollout before its first iteration, in which `loss` is given iteration -1."""
    keeps_groups: bool = False
    """Whether the samples of a prompt must lie in one optimizer step."""

    @classmethod
    def build(cls, settings: Any, critic: Critic | None, rewards: RewardSet | None) -> Objective:
        """The objective of its `settings`; `rewards` are the stage's own, None if it learns from records."""
        return cls(settings)  # type: ignore[call-arg]

    def start(self, policy: Policy) -> None:
        """At the start of a stage: keeps the weight sets that the objective compares with."""
        if self.needs_reference:
            policy.keep("reference")

    def useful(self, trajectory: Trajectory, result: RewardResult) -> Tensor:
        """[B] bool, per row of the first segment: whether its group can teach anything."""
        return torch.ones(trajectory.segments[0].num_rows, dtype=torch.bool)

    def as_trained(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult
    ) -> tuple[Trajectory, RewardResult]:
        """The trajectory whose decisions the loss is about, and its rewards; here the rollout as it is."""
        return trajectory, result

    def check_replay(self, policy: Policy, trajectory: Trajectory, cut: Cut, precision: str) -> None:
        """Compares the sampler's log-probs with a replay's; an error or a warning past the tolerance.

        `cut` holds a trained decision. Here nothing: the objective takes no ratio to the sampler's log-probs.
        """

    def plan(self, policy: Policy, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """Micro-batches of the rows that descend from the first segment's rows `roots`; see `Policy.plan`."""
        return policy.plan(trajectory, roots, budget)

    @abstractmethod
    def prepare(
        self,
        policy: Policy,
        trajectory: Trajectory,
        result: RewardResult,
        cuts: list[Cut],
        engine: Engine,
        metrics: Metrics,
    ) -> Experience:
        """Everything that is computed once per rollout. `cuts` are those that the first epoch will train on."""

    @abstractmethod
    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        """The rows of one optimizer step, with weights and denominators over all ranks."""

    @abstractmethod
    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        """One micro-batch's share of the optimizer step's loss."""

    def finish_iteration(
        self, policy: Policy, experience: Experience, iteration: int, engine: Engine, metrics: Metrics
    ) -> None:
        """Updates what lives from one iteration to the next."""

    def state_dict(self) -> dict[str, Any]:
        """What lives from one iteration to the next, besides weight sets."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""


def minibatch_of_decisions(
    experience: Experience, roots: Tensor, aggregation: AggregationSettings, engine: Engine
) -> Minibatch:
    """One optimizer step whose loss is an aggregate over decisions, each segment by its own denominator."""
    mode, constant = aggregation.mode, aggregation.constant
    weights, denominators, decisions = [], [], torch.zeros((), dtype=torch.long)
    for index, segment in enumerate(experience.segments):
        chosen = torch.isin(experience.trajectory.roots(index), roots)
        mask = segment.mask & chosen.unsqueeze(1)
        decisions += mask.sum()
        weights.append(decision_weights(mask, mode, groups=segment.groups))
        denominators.append(
            global_denominator(mask, mode, groups=segment.groups, constant=constant, reduce=engine.sum_over_ranks)
        )
    return Minibatch(experience, roots, weights, denominators, int(engine.sum_over_ranks(decisions)))
