"""What the trainer asks of an objective, which turns a scored trajectory into losses; `policy_gradient.py` is one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from rewards.combine import RewardResult
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch
from uniml_rl.monitor.metrics import Metrics


class Objective(ABC):
    """What the trainer asks of any objective."""

    needs_reference: bool

    @abstractmethod
    def check_policy(self, policy: Policy) -> None:
        """Raises UserError if the objective wants something of a replay that the policy does not offer."""

    @abstractmethod
    def check_replay(self, policy: Policy, trajectory: Trajectory, cut: Cut, precision: str) -> None:
        """Compares the sampler's log-probs with a replay's; an error or a warning past the tolerance.

        `cut` holds a trained decision.
        """

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

    @abstractmethod
    def finish_iteration(self, experience: Experience, engine: Engine, metrics: Metrics) -> None:
        """Updates what lives from one iteration to the next."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What lives from one iteration to the next."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
