"""The loop. One iteration of learning, the same for tokens and for denoising transitions, for rollouts and given data:

    prompts -> policy.rollout -> policy.decode -> rewards                     (or records -> policy.encode, labels)
            -> objective.prepare (old and reference log-probs, advantages)
            -> minibatches -> policy.replay -> objective.loss -> engine.backward -> engine.step -> metrics

It knows no modality and no algorithm: policies cut trajectories into micro-batches, objectives turn them into losses.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from modalities.base import Cut, Policy, Request, Trajectory
from modalities.randomness import SampleKey, seeded_generator
from modalities.samples import Prompt, Sample
from rewards.combine import RewardResult
from uniml_rl.build import StageConfig
from uniml_rl.data.prompts import DrawnPrompt, PromptStream
from uniml_rl.data.records import RecordStream
from uniml_rl.engines import phases
from uniml_rl.engines.base import Engine, StepReport
from uniml_rl.experience import Experience, Rollout
from uniml_rl.given import AuxiliaryLoss, given_rollout
from uniml_rl.monitor.metrics import Metrics, peak_memory_gib
from uniml_rl.monitor.sample_metrics import measure_rollout, measure_samples
from uniml_rl.objectives.base import Objective
from uniml_rl.passes import Pass, passes

_log = logging.getLogger(__name__)
_BEFORE_TRAINING = -1
"""In place of an iteration: passes over the first rollout in which only what the objective pretrains learns."""
_AUXILIARY = -2
"""In place of a segment's number in a sample's key: random numbers of the auxiliary loss, not of a rollout."""


class Scores(Protocol):
    """What the trainer asks of the rewards."""

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult: ...


@dataclass(frozen=True)
class IterationReport:
    """One finished iteration."""

    metrics: dict[str, float]
    reward_mean: float  # mean total reward of the valid samples, NaN if there is none


@contextmanager
def phase(metric: str, metrics: Metrics) -> Iterator[None]:
    """A phase of the iteration begins, whose time is `metric` (time/rollout ...)."""
    phases.enter(metric.removeprefix("time/"))
    with metrics.timed(metric):
        yield


def requests_for(prompts: Sequence[DrawnPrompt], group_size: int, first_group: int, key: SampleKey) -> list[Request]:
    """`group_size` requests for each prompt, in order; a prompt that occurs twice gets two groups of other samples.

    `key` gives the run seed, the stage and the iteration.
    """
    return [
        Request(
            prompt,
            first_group + position,
            replace(key, prompt=prompt.index, sample=prompt.repeat * group_size + sample),
        )
        for position, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


class Trainer:
    """Runs the iterations of one stage."""

    def __init__(
        self,
        policy: Policy,
        source: PromptStream | RecordStream,
        rewards: Scores,
        objective: Objective,
        engine: Engine,
        stage: StageConfig,
        stage_index: int,
        run_seed: int,
        auxiliary: AuxiliaryLoss | None = None,
    ) -> None:
        self.policy = policy
        self.source = source
        self.rewards = rewards
        self.objective = objective
        self.engine = engine
        self.stage = stage
        self.stage_index = stage_index
        self.run_seed = run_seed
        self.auxiliary = auxiliary
        self.optimizer_steps = 0
        self._replay_checked = False
        self._warned_of_missing_groups = False

    def iterate(self, iteration: int) -> IterationReport:
        """One rollout (or draw of records) and its updates; `iteration` counts from 0 within the stage."""
        metrics = Metrics()
        started = time.perf_counter()
        phases.enter("start of an iteration", self.stage.name, iteration + 1)
        rollout = self._collect(iteration, metrics)
        with phase("time/replay", metrics), self.engine.autocast():
            trajectory, result = self.objective.as_trained(self.policy, rollout.trajectory, rollout.result)
            minibatches = self._minibatches(trajectory, iteration, 0)
            cuts = [each.cut for roots in minibatches for each in self._passes(trajectory, roots)]
            self._check_replay(trajectory, cuts)
        for epoch in range(self.objective.pretraining_epochs if iteration == 0 else 0):
            experience = self._prepare(trajectory, result, cuts, unlogged := Metrics())
            self._epoch(experience, _BEFORE_TRAINING, epoch, unlogged)
        experience = self._prepare(trajectory, result, cuts, metrics)
        with phase("time/update", metrics):
            for epoch in range(self.stage.algorithm.epochs):
                self._epoch(experience, iteration, epoch, metrics)
        phases.enter("end of an iteration")
        self.objective.finish_iteration(self.policy, experience, iteration, self.engine, metrics)
        self._measure(metrics, rollout, iteration, time.perf_counter() - started)
        reduced = metrics.reduce(self.engine)
        return IterationReport(reduced, reduced.get("reward/mean", float("nan")))

    # -- what an iteration learns from -----------------------------------------------------------------------------

    def _collect(self, iteration: int, metrics: Metrics) -> Rollout:
        if isinstance(self.source, RecordStream):
            key = SampleKey(self.run_seed, self.stage_index, iteration, prompt=0, sample=0)
            with phase("time/encode", metrics):
                return given_rollout(self.policy, self.source, self.stage.prompts_per_iteration, self.engine, key)
        rollout = self._rollout(self.source, iteration, 0, self.stage.prompts_per_iteration, metrics)
        return self._top_up(self.source, rollout, iteration, metrics) if self.objective.resampling_rounds else rollout

    def _top_up(self, source: PromptStream, rollout: Rollout, iteration: int, metrics: Metrics) -> Rollout:
        """The rollout with other prompts' samples in place of groups that are not useful, as far as the rounds go.

        Every rank draws as often and as many, so with several ranks there may be a few groups more than wanted.
        """
        wanted, ranks = self.stage.prompts_per_iteration, self.engine.world_size
        sampled, rounds = wanted, 0
        while (missing := wanted - self._useful_groups(rollout)) > 0 and rounds < self.objective.resampling_rounds:
            rounds += 1
            prompts = -(-missing // ranks) * ranks
            rollout = rollout.and_then(self._rollout(source, iteration, rounds, prompts, metrics))
            sampled += prompts
        metrics.steps("resampling/rounds", rounds)
        metrics.steps("resampling/dropped_groups", sampled - (wanted - missing))
        if missing > 0 and not self._warned_of_missing_groups and self.engine.leads:
            self._warned_of_missing_groups = True
            _log.warning(
                "stage %r, iteration %d: of %d prompts sampled in %d rounds, only %d of the %d wanted had samples that "
                "differ in their reward; training goes on with those%s. Make the prompts less easy or less hard for "
                "this policy, use a reward with more levels, a larger group_size or more "
                "algorithm.dynamic_sampling.rounds. (`resampling/...` in metrics.jsonl counts; this is said once.)",
                *(self.stage.name, iteration, sampled, rounds + 1, wanted - missing, wanted),
                "" if missing < wanted else ", so this iteration learns nothing new",
            )
        return rollout

    def _useful_groups(self, rollout: Rollout) -> int:
        """Over all ranks."""
        useful = self.objective.useful(rollout.trajectory, rollout.result)
        count = torch.tensor(len(rollout.trajectory.segments[0].group[useful].unique()))
        return int(self.engine.sum_over_ranks(count))

    def _rollout(
        self, source: PromptStream, iteration: int, resampling_round: int, prompts: int, metrics: Metrics
    ) -> Rollout:
        """Samples of the next `prompts` prompts (over all ranks), decoded and scored."""
        rank, world_size = self.engine.rank, self.engine.world_size
        key = SampleKey(self.run_seed, self.stage_index, iteration, 0, 0, resampling_round)
        drawn = source.take(prompts, rank, world_size)
        # A round draws less than a world more than the prompts of an iteration, so no two rounds share a group.
        first_group = resampling_round * (self.stage.prompts_per_iteration + world_size) + rank * prompts // world_size
        requests = requests_for(drawn, self.stage.group_size or 1, first_group, key)
        modules = self.policy.trainable_modules().values()
        weights = self.policy.using(self.objective.rollout_weights)
        with phase("time/rollout", metrics), self.engine.autocast(), weights, self.engine.sampling(modules):
            trajectory = self.policy.rollout(requests)
        with phase("time/decode", metrics), torch.no_grad():
            samples = self.policy.decode(trajectory)
        with phase("time/reward", metrics), torch.no_grad():
            prompts_of_samples = trajectory.leaf_prompts()
            result = self.engine.from_first(lambda: self.rewards.score(samples, prompts_of_samples, iteration))
        return Rollout(trajectory, samples, result)

    # -- from it to optimizer steps --------------------------------------------------------------------------------

    def _minibatches(self, trajectory: Trajectory, iteration: int, epoch: int) -> list[Tensor]:
        """Rows of the first segment, split into one part per optimizer step, in an order that only the seed decides."""
        count = self.stage.algorithm.minibatches
        first = trajectory.segments[0]
        unit = torch.arange(first.num_rows)
        if self.objective.keeps_groups:
            unit = first.group.unique(return_inverse=True)[1]
        order = torch.arange(int(unit.max()) + 1 if len(unit) else 0)
        if count > 1:
            generator = seeded_generator(self.run_seed, self.stage_index, iteration, epoch, self.engine.rank)
            order = order[torch.randperm(len(order), generator=generator)]
        # Also the empty parts of a rank with few rows: all ranks take the same number of steps.
        return [torch.isin(unit, part).nonzero().flatten() for part in order.tensor_split(count)]

    def _passes(self, trajectory: Trajectory, roots: Tensor) -> list[Pass]:
        def plan(rows: Tensor) -> list[Cut]:
            return self.objective.plan(self.policy, trajectory, rows, self.stage.micro_batch)

        return passes(plan(roots), self.engine, lambda: plan(torch.arange(trajectory.segments[0].num_rows)))

    def _check_replay(self, trajectory: Trajectory, cuts: list[Cut]) -> None:
        """Before the first update of a process: is what training scores what the sampler scored, in every segment?"""
        if self._replay_checked:
            return
        trained = [cut for cut in cuts if cut.take(trajectory.segments[cut.segment].trained_mask).any()]
        # The ranks of some engines must all replay, those without a trained decision too; it then finds nothing wrong.
        candidates = [*(cuts[::-1] if self.engine.passes_together else []), *trained[::-1]]
        for _, first in sorted({cut.segment: cut for cut in candidates}.items()):
            self.objective.check_replay(self.policy, trajectory, first, self.engine.precision)
        self._replay_checked = bool(self.engine.sum_over_ranks(torch.tensor(len(trained))))

    def _prepare(self, trajectory: Trajectory, result: RewardResult, cuts: list[Cut], metrics: Metrics) -> Experience:
        with phase("time/replay", metrics), self.engine.autocast():
            return self.objective.prepare(self.policy, trajectory, result, cuts, self.engine, metrics)

    def _epoch(self, experience: Experience, iteration: int, epoch: int, metrics: Metrics) -> None:
        for roots in self._minibatches(experience.trajectory, iteration, epoch):
            self._update(experience, roots, iteration, metrics)

    def _update(self, experience: Experience, roots: Tensor, iteration: int, metrics: Metrics) -> None:
        minibatch = self.objective.minibatch(experience, roots, self.engine)
        metrics.steps("update/empty_steps", minibatch.trained_decisions == 0)
        if minibatch.trained_decisions == 0:
            return  # a step without a gradient would still move weights by their momentum and decay
        unlogged = Metrics()
        for each in self._passes(experience.trajectory, roots):
            with self.engine.autocast():
                into = metrics if each.counts else unlogged
                loss = self.objective.loss(self.policy, minibatch, each.cut, iteration, into)
            if loss.requires_grad:
                self.engine.backward(loss if each.counts else 0 * loss)
        if self.auxiliary is not None and iteration != _BEFORE_TRAINING:
            # The number of the step stands in the place of the resampling round, so each draws its own noise.
            key = SampleKey(self.run_seed, self.stage_index, iteration, 0, 0, self.optimizer_steps, _AUXILIARY)
            self.auxiliary.add_gradient(self.policy, self.engine, key, metrics)
        report = self.engine.step(max(iteration, 0))
        self._record(report, metrics)
        self.optimizer_steps += not report.skipped
        self._refuse_to_go_on_without_numbers(report)
        self.policy.set_version(self.optimizer_steps)

    def _refuse_to_go_on_without_numbers(self, report: StepReport) -> None:
        for name, ratio in report.update_weight_ratio.items():
            if not math.isfinite(ratio):
                raise FloatingPointError(
                    f"an optimizer step has moved the weights of {name!r} so far that they, or the length of the step, "
                    f"are not finite (the gradient's norm was {report.gradient_norm[name]:.3g})."
                )

    def _record(self, report: StepReport, metrics: Metrics) -> None:
        for name, norm in report.gradient_norm.items():
            metrics.mean(f"gradient/norm/{name}", norm)
        for name, ratio in report.update_weight_ratio.items():
            metrics.mean(f"update/weight_ratio/{name}", ratio)
        metrics.steps("gradient/skipped_steps", report.skipped)
        if report.loss_scale is not None:
            metrics.last("gradient/loss_scale", report.loss_scale)

    def _measure(self, metrics: Metrics, rollout: Rollout, iteration: int, seconds: float) -> None:
        trajectory, samples, result = rollout.trajectory, rollout.samples, rollout.result
        if isinstance(self.source, PromptStream):
            metrics.mean("reward/mean", result.total, mask=result.valid)
            metrics.standard_deviation("reward/std", result.total, mask=result.valid)
        for name in result.raw:
            metrics.mean(f"reward/{name}/raw_mean", result.raw[name], mask=result.raw[name].isfinite())
            metrics.mean(f"reward/{name}/weighted_mean", result.weighted[name], mask=result.weighted[name].isfinite())
            metrics.last(f"reward/{name}/weight", result.weights[name])
            metrics.sum(f"reward/{name}/failures", float(sum(result.failures[name].values())))
        measure_rollout(metrics, trajectory)
        if isinstance(self.source, PromptStream):  # lengths and diversity of given samples are not the policy's
            measure_samples(metrics, samples, trajectory.segments[-1].group.tolist())
        decisions = sum(int(segment.length_mask.sum()) for segment in trajectory.segments)
        metrics.rate("throughput/samples_per_second", len(samples), seconds)
        metrics.rate("throughput/decisions_per_second", decisions, seconds)
        metrics.seconds("time/iteration", seconds)
        metrics.maximum("memory/peak_gib", peak_memory_gib())
        for name, rate in self.engine.learning_rates(iteration).items():
            metrics.last(f"learning_rate/{name}", rate)

    def state_dict(self) -> dict[str, Any]:
        """What the next iteration depends on besides weights."""
        return {
            "source": self.source.state_dict(),
            "objective": self.objective.state_dict(),
            "engine": self.engine.state_dict(),
            "optimizer_steps": self.optimizer_steps,
            "auxiliary": self.auxiliary.state_dict() if self.auxiliary else {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.source.load_state_dict(state["source"])
        self.objective.load_state_dict(state["objective"])
        self.engine.load_state_dict(state["engine"])
        self.optimizer_steps = state["optimizer_steps"]
        if self.auxiliary is not None:
            self.auxiliary.load_state_dict(state["auxiliary"])
        self.policy.set_version(self.optimizer_steps)
