"""What supervised and preference objectives share: samples scored by their log-likelihood or a surrogate of it."""

from __future__ import annotations

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Segment, Trajectory
from modalities.forward_process import ForwardProcessSettings
from rewards.combine import RewardResult
from uniml_rl.algorithms.preference import sample_scores
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch, SegmentExperience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective
from uniml_rl.objectives.divergence import log_probs_under


class LikelihoodObjective(Objective):
    """Learns from whole samples: given ones, or rollouts taken as such."""

    def __init__(self, forward: ForwardProcessSettings) -> None:
        self.forward = forward

    def as_trained(
        self, policy: Policy, trajectory: Trajectory, result: RewardResult
    ) -> tuple[Trajectory, RewardResult]:
        return policy.as_likelihood(trajectory, self.forward), result

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
        mask = segment.trained_mask & result.valid.unsqueeze(1)
        nothing = torch.zeros(mask.shape)
        experience = SegmentExperience(mask, segment.group, nothing, nothing)
        if self.needs_reference:
            experience.reference_log_probs = log_probs_under(policy, "reference", trajectory, 0, cuts)
        return Experience(trajectory, [experience])

    def scores(self, segment: Segment, log_probs: Tensor, mask: Tensor, per_decision: bool = False) -> Tensor:
        """[b, u] float32, see `sample_scores`."""
        return sample_scores(log_probs, mask, draws=segment.decisions_are_draws, per_decision=per_decision)

    def minibatch_of_samples(self, experience: Experience, roots: Tensor, counted: Tensor, engine: Engine) -> Minibatch:
        """A step whose loss is a mean over samples (and over draws): `counted` [B] float are their weights."""
        part = experience.segments[0]
        chosen = torch.zeros(len(counted)).index_fill_(0, roots, 1.0) * counted * part.mask.any(1)
        draws = part.mask.shape[1] if experience.trajectory.segments[0].decisions_are_draws else 1
        weights = chosen.unsqueeze(1).expand(-1, draws) / draws
        totals = engine.sum_over_ranks(torch.stack([chosen.double().sum(), (chosen > 0).double().sum()]))
        return Minibatch(experience, roots, [weights], [totals[0]], int(totals[1]))
