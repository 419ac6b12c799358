"""Given samples as if the policy had made them, and the supervised loss on such that goes along with any algorithm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from modalities.base import Policy
from modalities.randomness import SampleKey
from rewards.combine import RewardResult
from uniml_rl.build import AuxiliarySettings
from uniml_rl.data.records import RecordStream
from uniml_rl.engines.base import Engine
from uniml_rl.experience import Rollout
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.supervised import SupervisedObjective
from uniml_rl.passes import passes


def given_rollout(policy: Policy, source: RecordStream, count: int, engine: Engine, key: SampleKey) -> Rollout:
    """The next `count` records over all ranks, this rank's share of them; a record is a group, its labels the rewards.

    `key` gives run seed, stage, iteration and round of the random numbers.
    """
    drawn = source.take(count, engine.rank, engine.world_size)
    first_group = engine.rank * count // engine.world_size
    rows = [(place, number) for place, record in enumerate(drawn) for number in range(len(record.samples))]
    keys = [
        replace(key, prompt=drawn[place].index, sample=drawn[place].repeat * len(drawn[place].samples) + number)
        for place, number in rows
    ]
    samples = [drawn[place].samples[number] for place, number in rows]
    with torch.no_grad(), engine.autocast():
        trajectory = policy.encode([drawn[place].prompt for place, _ in rows], samples, keys)
    trajectory.segments[0].group = torch.tensor([first_group + place for place, _ in rows], dtype=torch.long)
    labels = torch.tensor([drawn[place].labels[number] for place, number in rows])
    return Rollout(trajectory, samples, RewardResult(labels, labels.isfinite(), {}, {}, {}, {}))


class AuxiliaryLoss:
    """weight x the supervised loss of some records, added to every optimizer step against forgetting."""

    def __init__(self, settings: AuxiliarySettings, source: RecordStream, micro_batch: int) -> None:
        self.settings = settings
        self.source = source
        self.micro_batch = micro_batch
        self.objective = SupervisedObjective(settings.algorithm)

    def add_gradient(self, policy: Policy, engine: Engine, key: SampleKey, metrics: Metrics) -> None:
        """Draws the records of one optimizer step and adds their gradient; `key` as in `given_rollout`."""
        rollout = given_rollout(policy, self.source, self.settings.records_per_step, engine, key)
        own = Metrics()  # what a supervised stage would log under names that belong to the stage's own algorithm
        with engine.autocast():
            trajectory, result = self.objective.as_trained(policy, rollout.trajectory, rollout.result)
            roots = torch.arange(trajectory.segments[0].num_rows)
            cuts = self.objective.plan(policy, trajectory, roots, self.micro_batch)
            own_passes = passes(cuts, engine, lambda: cuts)
            experience = self.objective.prepare(
                policy, trajectory, result, [each.cut for each in own_passes], engine, own
            )
            minibatch = self.objective.minibatch(experience, roots, engine)
        for each in own_passes:
            with engine.autocast():
                loss = self.objective.loss(policy, minibatch, each.cut, key.iteration, own)
            weighted = self.settings.weight * each.counts * loss
            engine.backward(weighted)
            metrics.sum("loss/auxiliary", each.counts * loss.detach())
            metrics.sum("loss/total", weighted.detach())

    def state_dict(self) -> dict[str, Any]:
        """The position in the records."""
        return self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.source.load_state_dict(state)
