"""Learning from single samples that are desirable or not: KTO."""

from __future__ import annotations

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Trajectory
from rewards.combine import RewardResult
from uniml_rl.algorithms.advantages import group_advantages
from uniml_rl.algorithms.aggregation import aggregate
from uniml_rl.algorithms.direct_settings import KTOSettings
from uniml_rl.algorithms.preference import kto_loss
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Experience, Minibatch
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.divergence import log_probs_under
from uniml_rl.objectives.likelihood import LikelihoodObjective


class KTOObjective(LikelihoodObjective):
    """Desirable samples shall become likelier, the others less likely, both measured from the policy's own drift.

    The drift z is the mean log-ratio of the samples under each other's prompts, not below 0, over all ranks, taken
    once per rollout and not again within its optimizer steps. The paper takes it from each micro-batch. With
    `desirable_above: group_mean` a sample at the mean is neither good nor bad, and left out.
    """

    needs_reference = True

    def __init__(self, settings: KTOSettings) -> None:
        super().__init__(settings.forward)
        self.settings = settings

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
        above = self.settings.desirable_above
        if above == "group_mean":
            over, _ = group_advantages(result.total, result.valid, part.groups, scale="none", epsilon=0.0)
            part.mask = part.mask & (over != 0).unsqueeze(1)
        else:
            over = torch.where(result.valid, result.total, torch.nan) - above
        part.advantages = torch.where(over > 0, 1.0, -1.0).unsqueeze(1)
        part.drift = self._drift(policy, trajectory, part.mask, cuts, engine)
        metrics.share("kto/desirable_share", over > 0, mask=part.mask.any(1))
        metrics.mean("kto/drift", part.drift.reshape(1))
        return experience

    def _drift(self, policy: Policy, trajectory: Trajectory, mask: Tensor, cuts: list[Cut], engine: Engine) -> Tensor:
        """0-dim: the mean log-ratio of samples whose prompts were exchanged, each prompt with its neighbour.

        Two and two, so that it does not matter where the prompts are split between ranks that hold an even number of
        them. An odd one out takes the prompt of the one before it; one that is alone keeps its own.
        """
        segment = trajectory.segments[0]
        groups, place = segment.group.unique(return_inverse=True)
        partner = torch.where((place ^ 1) < len(groups), place ^ 1, place - 1)  # of the only one -1, itself
        row_of = torch.zeros(len(groups), dtype=torch.long)
        row_of[place] = torch.arange(len(place))
        exchanged = Trajectory([segment.with_prompts_of(row_of[partner])], trajectory.requests)
        current, reference = (log_probs_under(policy, name, exchanged, 0, cuts) for name in ("current", "reference"))
        ratios = self.scores(segment, current - reference, mask)[mask.any(1)]
        total, count = engine.sum_over_ranks(torch.tensor([ratios.double().sum(), ratios.numel()]))
        return (total / count.clamp(min=1)).clamp(min=0).float()

    def minibatch(self, experience: Experience, roots: Tensor, engine: Engine) -> Minibatch:
        return self.minibatch_of_samples(experience, roots, torch.ones(len(experience.segments[0].mask)), engine)

    def loss(self, policy: Policy, minibatch: Minibatch, cut: Cut, iteration: int, metrics: Metrics) -> Tensor:
        trajectory, experience = minibatch.experience.trajectory, minibatch.experience.segments[0]
        assert experience.reference_log_probs is not None and experience.drift is not None
        log_probs = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        device = log_probs.device
        mask, reference = (cut.take(x).to(device) for x in (experience.mask, experience.reference_log_probs))
        ratios = self.scores(trajectory.segments[0], log_probs - reference, mask)
        desirable = (experience.advantages[cut.rows, 0] > 0).to(device)
        settings = self.settings
        terms = kto_loss(
            ratios,
            desirable,
            experience.drift.to(device),
            settings.beta,
            settings.desirable_weight,
            settings.undesirable_weight,
        )
        total = aggregate(terms, cut.take(minibatch.weights[0]).to(device), minibatch.denominators[0])
        metrics.sum("loss/total", total.detach())
        return total
