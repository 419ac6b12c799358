"""Supervised fine-tuning: the likelihood of given samples, for tokens and for denoising models alike."""

from __future__ import annotations

from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from modalities.trajectories import select
from rewards.combine import RewardResult
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.direct_settings import SupervisedSettings
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch, select_results
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import minibatch_of_decisions
from uniml_rl.objectives.likelihood import LikelihoodObjective


class SupervisedObjective(LikelihoodObjective):
    """-log-prob per decision: cross-entropy of tokens, w(t) mean((prediction - target)^2) of denoising models.

    Of preference pairs and labelled samples, those with the label 1 are imitated.
    """

    def __init__(self, settings: SupervisedSettings) -> None:
        super().__init__(settings.forward)
        self.settings = settings
        self.keeps_groups = settings.aggregation.mode == "prompt_mean"

    def as_trained(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult
    ) -> tuple[Trajectory, RewardResult]:
        rows = (result.total > 0).nonzero().flatten()
        return super().as_trained(policy, select(trajectory, rows), select_results(result, rows))

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        return minibatch_of_decisions(experience, roots, self.settings.aggregation, engine)

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        experience = minibatch.experience
        log_probs = policy.replay(experience.trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        mask, weights = (cut.take(x).to(log_probs.device) for x in (experience.segments[0].mask, minibatch.weights[0]))
        metrics.mean("supervised/log_prob", log_probs.detach(), mask=mask)
        total = aggregate(-log_probs, weights, minibatch.denominators[0])
        metrics.sum("loss/total", total.detach())
        return total
