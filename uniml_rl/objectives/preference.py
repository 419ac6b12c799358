"""Learning from pairs: DPO, IPO, Diffusion-DPO, and with a reward model as the policy the Bradley-Terry loss."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from modalities.trajectories import select
from rewards.combine import RewardResult
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.direct_settings import PreferenceSettings
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.likelihood import LikelihoodObjective


def best_and_worst(rewards: Tensor, valid: Tensor, groups: Tensor) -> Tensor:
    """[2 n] int64: the rows with the highest and the lowest valid reward of each group, one pair after the other.

    A group of fewer than two valid samples, or of equal rewards, has no pair. Of equal extremes the first row counts.
    """
    pairs = []
    for group in groups[valid].unique().tolist():
        rows = (valid & (groups == group)).nonzero().flatten()
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        if rewards[best] > rewards[worst]:
            pairs += [best, worst]
    return torch.stack(pairs) if pairs else torch.zeros(0, dtype=torch.long)


class PreferenceObjective(LikelihoodObjective):
    """The chosen sample of each pair shall become likelier than the rejected one, measured against a reference.

    Given pairs have the labels 1 and 0; of rollouts, the best and the worst valid sample of each prompt are a pair. The
    loss is a mean over pairs, and over draws for denoising models (Diffusion-DPO's bound: the mean stays outside of
    the sigmoid). A pair of which one sample has no trained decision is left out.
    """

    keeps_groups = True

    def __init__(self, settings: PreferenceSettings) -> None:
        super().__init__(settings.forward)
        self.settings = settings
        self.needs_reference = not settings.reference_free

    def as_trained(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult
    ) -> tuple[Trajectory, RewardResult]:
        rows = best_and_worst(result.total, result.valid, trajectory.segments[0].group)
        valid = result.valid[rows]
        if not len(rows):  # a pair that counts for nothing: without any, this rank could not go along with the others
            rows, valid = torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.bool)
        pairs = replace(result, total=result.total[rows], valid=valid, raw={}, weighted={})
        return super().as_trained(policy, select(trajectory, rows), pairs)

    def plan(self, policy: Policy, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """Whole pairs; all decisions of a sample together, or one draw after the other."""
        segment = trajectory.segments[0]
        ordered = roots[segment.group[roots].argsort(stable=True)]
        width = segment.num_steps
        steps = [slice(t, t + 1) for t in range(width)] if segment.decisions_are_draws else [slice(0, width)]
        parts = ordered.split(2 * max(1, budget // 2)) if len(ordered) else []
        return [Cut(0, rows, step) for rows in parts for step in steps]

    def prepare(
        self,
        policy: Policy,
        trajectory: Trajectory,
        result: RewardResult,
        cuts: list[Cut],
        engine: Engine,
        metrics: Metrics,
    ) -> Experience:
        experience = super().prepare(policy, trajectory, result, cuts, engine, metrics)
        part = experience.segments[0]
        pairs = len(part.mask) // 2
        part.advantages = torch.tensor([1.0, -1.0]).repeat(pairs).unsqueeze(1)  # in the order of `best_and_worst`
        both = part.mask.any(1).view(pairs, 2).all(1)
        part.mask = part.mask & both.repeat_interleave(2).unsqueeze(1)
        return experience

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        chosen = experience.segments[0].advantages[:, 0] > 0
        return self.minibatch_of_samples(experience, roots, chosen.float(), engine)

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        trajectory, experience = minibatch.experience.trajectory, minibatch.experience.segments[0]
        segment = trajectory.segments[0]
        log_probs = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        device = log_probs.device
        if experience.reference_log_probs is not None:
            log_probs = log_probs - cut.take(experience.reference_log_probs).to(device)
        mask = cut.take(experience.mask).to(device)
        scores = self.scores(segment, log_probs, mask, self.settings.loss.per_decision)
        chosen = experience.advantages[cut.rows, 0] > 0
        groups = experience.groups[cut.rows]
        first, second = (rows.nonzero().flatten() for rows in (chosen, ~chosen))
        first, second = first[groups[first].argsort()], second[groups[second].argsort()]
        margin = scores[first.to(device)] - scores[second.to(device)]
        terms = self.settings.loss.terms(margin)
        weights = cut.take(minibatch.weights[0])[first].to(device)
        metrics.share("preference/accuracy", (margin > 0).detach(), mask=weights > 0)
        metrics.mean("preference/margin", margin.detach(), mask=weights > 0)
        total = aggregate(terms, weights, minibatch.denominators[0])
        metrics.sum("loss/total", total.detach())
        return total
