"""The curriculum: opens one stage after the other, decides when each ends, and carries policies from stage to stage."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from modalities.base import Policy
from modalities.critic import Critic
from modalities.errors import UserError
from uniml_rl.alike import check_alike
from uniml_rl.build import (
    CRITIC,
    EXPORTS,
    RunConfig,
    StageConfig,
    build_objective,
    build_policy,
    part_names,
    policies_of,
)
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.divergence import diverged
from uniml_rl.engines import phases
from uniml_rl.engines.base import Engine
from uniml_rl.evaluation import Evaluation, Evaluator, compare, evaluation_metrics, of_all_ranks
from uniml_rl.export import export_policy
from uniml_rl.monitor.progress import Progress
from uniml_rl.monitor.report import StageReport
from uniml_rl.monitor.samples import save_before_after, save_samples
from uniml_rl.monitor.writer import MetricsWriter
from uniml_rl.stage_parts import stage_auxiliary, stage_critic, stage_evaluator, stage_rewards, stage_source
from uniml_rl.stage_rewards import StageRewards
from uniml_rl.stopping import Stop
from uniml_rl.trainer import Trainer
from uniml_rl.until import why_ended

ITERATIONS_WITHOUT_REWARD = 5
"""So many iterations in a row without one valid reward end the run."""


@dataclass
class Position:
    """Where the curriculum stands: everything that decides what happens next, besides the objects' own state."""

    stage: int = 0
    iteration: int = 0  # finished iterations of the stage
    total_iterations: int = 0  # finished iterations of the run
    rewards: list[float] = field(default_factory=list)  # mean total reward of each of them


@dataclass
class OpenStage:
    """The objects of the stage in progress."""

    config: StageConfig
    policy: Policy
    critic: Critic | None
    trainer: Trainer
    rewards: StageRewards
    evaluator: Evaluator | None


class Curriculum:
    """Runs the stages of a configuration in a folder, from wherever its last checkpoint stands.

    Every rank runs one. Rank 0 alone has a `writer`, scores evaluations, exports, and writes samples and reports.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        engine: Engine,
        device: str,
        writer: MetricsWriter | None,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self.config = config
        self.folder = folder
        self.engine = engine
        self.device = device
        self.writer = writer
        self.progress = progress
        self.stop = stop
        self.store = CheckpointStore(folder / "checkpoints", config.checkpoint.keep)
        self.position = Position()
        self.policies: dict[str, Policy] = {}
        self._checkpoint_seconds: float | None = None
        self._restored: dict[str, Any] | None = None
        self._restored_weights: dict[str, Any] = {}

    @property
    def finished(self) -> bool:
        """Whether every stage has ended."""
        return self.position.stage >= len(self.config.stages)

    def restore(self) -> dict[str, Any] | None:
        """Takes the newest checkpoint, if there is one, and brings the metrics back to it; returns its manifest."""
        latest = self.store.latest() if self._leads else None
        checkpoint = None
        for name in self.engine.union_of_names([latest.name] if latest else []):  # rank 0 has chosen for all
            checkpoint = load_checkpoint(self.store.folder / name, self.engine.rank, self.engine.world_size)
            self.position = Position(**checkpoint.state["position"])
            self._restored, self._restored_weights = checkpoint.state_on(self.engine.world_size), checkpoint.weights
        if self.writer is not None:
            self.writer.rewind(self.position.total_iterations if checkpoint else -1)
        return checkpoint.manifest if checkpoint else None

    @property
    def _leads(self) -> bool:
        return self.engine.leads

    def _write(self, stage: str, iteration: int, metrics: dict[str, float]) -> None:
        if self.writer is not None:
            self.writer.write(stage, iteration, self.position.total_iterations, metrics)

    def run(self) -> None:
        """Trains until every stage has ended.

        Raises StoppedError, with everything saved, if the process is told to, and DivergedError, with nothing written,
        when weights or what they compute are no longer finite.
        """
        while not self.finished:
            stage = self._open(self.position.stage)
            try:
                self._run_stage(stage)
            except FloatingPointError as error:
                steps = stage.trainer.optimizer_steps
                raise diverged(error, self.config, stage.trainer.stage_index, steps, self.store) from error
            if not self.finished:
                self.stop.heed()

    # -- one stage -------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: OpenStage) -> None:
        config, position = stage.config, self.position
        self.progress.start_stage(
            config.name, position.stage, len(self.config.stages), config.until.iterations, position.iteration
        )
        if position.iteration == 0:
            self._evaluate(stage)
        self.stop.postpone()  # until what follows is saved
        while (reason := why_ended(config.until, position.iteration, position.rewards)) is None:
            report = stage.trainer.iterate(position.iteration)
            position.iteration += 1
            position.total_iterations += 1
            position.rewards.append(report.reward_mean)
            if config.ema is not None:
                stage.policy.average("ema", config.ema.decay)
            self._refuse_to_learn_from_nothing()
            metrics = dict(report.metrics)
            ended = why_ended(config.until, position.iteration, position.rewards) is not None
            every = config.evaluation.every if config.evaluation else None
            if ended or (every and position.iteration % every == 0):
                metrics |= self._evaluation_metrics(stage)
            metrics["stage/index"] = float(position.stage)
            if self._checkpoint_seconds is not None:
                metrics["time/checkpoint"], self._checkpoint_seconds = self._checkpoint_seconds, None
            # The row comes first: a checkpoint that is found says that the rows up to it are on the disk.
            self._write(config.name, position.iteration, metrics)
            self.store.settle()
            due = not ended and position.total_iterations % self.config.checkpoint.every == 0
            if due:
                self._checkpoint_seconds = self._save(stage)
            stops = not ended and self._anyone_is_told_to_stop()
            if stops and not due:
                self._save(stage)
            self.progress.advance(position.iteration, metrics)
            if stops:
                self.store.settle()
                raise self.stop.error(f"after the {position.total_iterations} iterations that are saved")
        self.progress.note(f"stage {config.name} ended: {reason}")
        self._close(stage)

    def _anyone_is_told_to_stop(self) -> bool:
        """Alike on all ranks, whichever of them a signal has reached."""
        return bool(self.engine.union_of_names(["stop"] if self.stop.signal else []))

    def _refuse_to_learn_from_nothing(self) -> None:
        last = self.position.rewards[-ITERATIONS_WITHOUT_REWARD:]
        stage = self.config.stages[self.position.stage]
        if stage.rewards and len(last) == ITERATIONS_WITHOUT_REWARD and not any(map(math.isfinite, last)):
            raise UserError(
                f"stage {stage.name!r}: no sample had a valid reward in {len(last)} iterations in a row, so nothing is "
                "learned. `reward/.../failures` in metrics.jsonl counts which rewards failed; `on_error: fail` shows "
                "the first failure."
            )

    def _close(self, stage: OpenStage) -> None:
        """Exports the policy, moves on, and saves what later stages need."""
        self._export(stage)
        stage.rewards.close()
        if stage.evaluator is not None:
            stage.evaluator.close()
        position = self.position
        position.stage, position.iteration, position.rewards = position.stage + 1, 0, []
        self._save(None)
        still_used = policies_of(self.config, self.config.stages[position.stage :])
        self.policies = {name: policy for name, policy in self.policies.items() if name in still_used}

    def _export(self, stage: OpenStage) -> None:
        """Rank 0 writes the model folder; of weights that are divided among the ranks, from a copy of the policy."""
        name, policy = stage.config.policy, stage.policy
        if self.engine.divides_weights:
            weights = {key: value.cpu() for key, value in self.engine.whole(policy.weight_state()) if self._leads}
            if self._leads:
                policy = build_policy(self.config, name, "cpu")
                policy.load_weight_state(weights)
        if self._leads:
            export_policy(policy, self.folder / EXPORTS / name)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def evaluation_path(self, stage: str, iteration: int) -> Path:
        """Where the evaluation after `iteration` iterations of a stage is kept."""
        return self.folder / "evaluations" / stage / f"iteration-{iteration:06d}.pt"

    def _evaluation_metrics(self, stage: OpenStage) -> dict[str, float]:
        """The evaluation's numbers, on rank 0, which scores what all have sampled; the others wait for it."""
        if stage.evaluator is None:
            return {}
        started = time.perf_counter()
        metrics: dict[str, float] = {}
        weight_sets = {"eval": "current"}
        if stage.config.ema and self.position.iteration:
            weight_sets["eval_ema"] = "ema"
        for prefix, weights in weight_sets.items():
            phases.enter("evaluation")
            self.progress.activity(f"evaluation of {weights} weights")
            with stage.policy.using(weights), self.engine.sampling(stage.policy.trainable_modules().values()):
                samples = stage.evaluator.sample()
            samples = of_all_ranks(samples, self.engine)
            if self._leads:
                metrics |= self._keep_evaluation(stage.config.name, prefix, stage.evaluator.score(samples))
        self.engine.wait()
        return metrics | ({"time/evaluation": time.perf_counter() - started} if self._leads else {})

    def _keep_evaluation(self, stage: str, prefix: str, evaluation: Evaluation) -> dict[str, float]:
        """Its numbers; of the current weights samples and scores are kept, too."""
        iteration, first_path = self.position.iteration, self.evaluation_path(stage, 0)
        before = Evaluation.load(first_path) if iteration and first_path.exists() else None
        if prefix == "eval":
            evaluation.save(self.evaluation_path(stage, iteration))
            save_samples(
                self.folder / "samples" / stage,
                f"iteration-{iteration:06d}",
                evaluation.samples,
                evaluation.prompt_of_each_sample(),
                evaluation.score_lists(),
            )
        return evaluation_metrics(prefix, evaluation, before)

    def _evaluate(self, stage: OpenStage) -> None:
        """The evaluation before a stage, in a row of its own."""
        metrics = self._evaluation_metrics(stage)
        if metrics:
            metrics["stage/index"] = float(self.position.stage)
            self._write(stage.config.name, 0, metrics)

    def reports(self) -> list[StageReport]:
        """Before and after of every finished stage that has held-out evaluations, from the files of the run."""
        reports = []
        for config in self.config.stages[: self.position.stage]:
            paths = sorted((self.folder / "evaluations" / config.name).glob("iteration-*.pt"))
            if config.evaluation is None or len(paths) < 2:
                continue
            before, after = Evaluation.load(paths[0]), Evaluation.load(paths[-1])
            grid = save_before_after(
                self.folder / "samples" / config.name,
                "before_after",
                before.samples,
                after.samples,
                after.prompt_of_each_sample(),
                before.score_lists(),
                after.score_lists(),
            )
            reports.append(
                StageReport(config.name, compare(before, after), frozenset(config.evaluation.rewards), (grid,))
            )
        return reports

    # -- opening and saving ----------------------------------------------------------------------------------------

    def _open(self, index: int) -> OpenStage:
        """Builds the stage's objects; takes over the checkpoint's state if the run was restored into this stage."""
        config, seed = self.config.stages[index], self.config.seed
        phases.enter("opening", config.name, 0)
        self.progress.activity(f"opening stage {config.name}")
        with self.engine.opening():
            policy = self._policy(config.policy)
            critic = stage_critic(self.config, config, policy, self.device)
        source, rewards = stage_source(self.config, config), stage_rewards(self.config, index, self.device, self.folder)
        objective = build_objective(config.algorithm, critic, rewards.own)
        auxiliary = stage_auxiliary(self.config, config)
        optimizers = {config.policy: (policy.trainable_modules(), config.optimizer)}
        if critic is not None and config.critic is not None:
            optimizers[CRITIC] = (critic.trainable_modules(), config.critic.optimizer)
        self.engine.attach(optimizers)
        self._restore_weights(critic)
        read = [each.state_dict() for each in (source, auxiliary) if each]
        check_alike(self.engine, f"the data of stage {config.name!r}", repr(read))
        trainer = Trainer(policy, source, rewards, objective, self.engine, config, index, seed, auxiliary)
        evaluator = stage_evaluator(self.config, index, policy, rewards, self.engine, self.device, self.folder)
        stage = OpenStage(config, policy, critic, trainer, rewards, evaluator)
        if self._restored is not None and self.position.iteration > 0:
            trainer.load_state_dict(self._restored["trainer"])
            rewards.load_state_dict(self._restored["rewards"])
        else:
            policy.forget_all()
            policy.set_version(0)
            objective.start(policy)
            if config.ema is not None:
                policy.average("ema", config.ema.decay)
        self._restored = None
        # Of policies that only later stages open: read now, for the checkpoint they lie in will be removed.
        self._restored_weights = {name: dict(self.engine.stored(kept)) for name, kept in self._restored_weights.items()}
        self.engine.check_equal_start()
        return stage

    def _policy(self, name: str) -> Policy:
        if name not in self.policies:
            self.policies[name] = build_policy(self.config, name, self.device, built=self._policy)
        return self.policies[name]

    def _restore_weights(self, critic: Critic | None) -> None:
        """Puts the checkpoint's weights into the models that are open, which hold their own parts of them by now."""
        opened: dict[str, Policy | Critic] = {**self.policies, **({CRITIC: critic} if critic is not None else {})}
        for name in sorted(opened.keys() & self._restored_weights.keys()):
            opened[name].load_weight_state(self._restored_weights.pop(name))

    def _save(self, stage: OpenStage | None) -> float:
        """Writes a checkpoint and returns the seconds it took. Between stages there is no trainer to save."""
        started = time.perf_counter()
        phases.enter("checkpoint")
        self.progress.activity("checkpoint")
        first_needed = min(self.position.stage, len(self.config.stages) - 1)
        needed = policies_of(self.config, self.config.stages[first_needed:])
        # A policy made of parts is their weights, unless its own stage is in progress and has kept other sets of them.
        needed -= {name for name in needed if part_names(self.config.policies[name])}
        needed |= {stage.config.policy} if stage else set()
        weights: dict[str, Mapping[str, Tensor]] = {
            name: self.engine.stored(policy.weight_state()) for name, policy in self.policies.items() if name in needed
        }
        state: dict[str, Any] = {"position": vars(self.position) | {"rewards": list(self.position.rewards)}}
        if stage is not None:
            state |= {"trainer": stage.trainer.state_dict(), "rewards": stage.rewards.state_dict()}
            if stage.critic is not None:
                weights[CRITIC] = self.engine.stored(stage.critic.weight_state())
        # Policies that were restored, but that no stage has opened since, are in nobody else's hands.
        weights |= {name: kept for name, kept in self._restored_weights.items() if name in needed}
        stage_name = self.config.stages[first_needed].name
        about: dict[str, Any] = {"run": self.config.name, "stage": stage_name, "shares": self.engine.world_size}
        about["optimizer_steps"] = stage.trainer.optimizer_steps if stage else 0  # of that stage
        together = self.engine.process, self.engine.wait, self.engine.union_of_names
        beside = self.config.checkpoint.asynchronous and stage is not None
        self.store.save(self.position.total_iterations, weights, state, about, *together, beside=beside)
        return time.perf_counter() - started
