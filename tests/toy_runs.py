"""Runs of the toy policy for tests: configurations of milliseconds, and ranks that are threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest
import torch
import yaml
from torch import Tensor

from modalities.samples import Prompt, Sample, Text
from rewards.base import Reward, RewardConfig
from uniml_rl.build import RunConfig
from uniml_rl.config import load_yaml, validate
from uniml_rl.engines.base import StepReport
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml
from uniml_rl.trainer import IterationReport, Trainer

Result = TypeVar("Result")
TOY = {"type": "toy_policy:ToyConfig"}
COUNT_A = {"a": {"type": "regex", "pattern": "a", "timeout_seconds": None}}
COUNT_B = {"b": {"type": "regex", "pattern": "b", "timeout_seconds": None}}


def prompts(folder: Path, texts: str = "one two three four five") -> dict[str, Any]:
    """A block of prompts in a file of their own."""
    path, content = folder / "prompts.txt", "\n".join(texts.split())
    if not path.exists() or path.read_text() != content:  # a thread may be reading it
        path.write_text(content)
    return {"type": "file", "path": str(path)}


def stage(folder: Path, name: str = "only", **keys: Any) -> dict[str, Any]:
    """A stage of the policy `letters`."""
    return {
        "name": name,
        "policy": "letters",
        "prompts": prompts(folder),
        "prompts_per_iteration": 2,
        "group_size": 3,
        "rewards": COUNT_A,
        "algorithm": {"name": "grpo"},
        "optimizer": {"learning_rate": 0.1},
        "until": {"iterations": 2},
    } | keys


def held_out(folder: Path, **keys: Any) -> dict[str, Any]:
    """An `evaluation` block."""
    return {"prompts": prompts(folder), "count": 3, "samples_per_prompt": 2} | keys


def write_run(folder: Path, *stages: dict[str, Any], **keys: Any) -> Path:
    """The YAML file of a run; its policies are toys, unless `policies` says otherwise."""
    path = folder / "run.yaml"
    policies = {block["policy"]: TOY for block in stages}
    path.write_text(yaml.safe_dump({"name": "toy", "policies": policies, "stages": list(stages)} | keys))
    return path


def load_run(path: Path) -> RunConfig:
    """The validated file."""
    return validate(RunConfig, load_yaml(path))


class Meeting:
    """Where the threads of a world meet."""

    def __init__(self, size: int) -> None:
        self.size, self.values = size, dict[int, Any]()
        self.barrier = threading.Barrier(size, timeout=120)

    def everyone(self, rank: int, value: Any) -> list[Any]:
        """What each rank brought, in rank order."""
        self.values[rank] = value
        self.barrier.wait()
        brought = [self.values[other] for other in range(self.size)]
        self.barrier.wait()
        return brought


class RankEngine(TorchEngine):
    """One rank of several: sums meet the other threads', and gradients are summed as every engine does."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__("cpu")
        self.rank, self.world_size, self.meeting = rank, meeting.size, meeting

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return torch.stack(self.meeting.everyone(self.rank, value.clone())).sum(0).to(value.dtype)

    def union_of_names(self, names: list[str]) -> list[str]:
        return sorted(set().union(*self.meeting.everyone(self.rank, names)))

    def step(self, iteration: int) -> StepReport:
        for name in self._optimizers:
            for parameter in self._parameters(name):
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.sum_over_ranks(gradient)
        return super().step(iteration)


def on_ranks(count: int, work: Callable[[RankEngine], Result]) -> list[Result]:
    """The result of `work` on each of `count` ranks; an exception of any rank is raised."""
    meeting, results, errors = Meeting(count), dict[int, Result](), list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(RankEngine(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(count)]


class SurpriseConfig(RewardConfig):
    """A reward with a memory."""

    type: Literal["toy_runs:SurpriseConfig"] = "toy_runs:SurpriseConfig"
    """Import path of this class."""
    timeout_seconds: float | None = None
    """No thread is needed."""

    def build(self, device: str) -> Reward:
        return Surprise()


class Surprise(Reward):
    """The number of a's minus the mean number so far."""

    kinds = frozenset({"text"})

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        scores = torch.tensor([float(sample.text.count("a")) for sample in samples if isinstance(sample, Text)])
        self.total, self.count = self.total + float(scores.sum()), self.count + len(scores)
        return scores - self.total / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.count = state["total"], state["count"]


class InterruptedTestError(Exception):
    """In place of a kill."""


def interrupt(config: Path, folder: Path, *moments: tuple[int, int]) -> None:
    """Starts the run again and again, and ends it before each (stage, iteration) of `moments`."""
    left, iterate = list(moments), Trainer.iterate

    def interrupting(trainer: Trainer, iteration: int) -> IterationReport:
        if left and left[0] == (trainer.stage_index, iteration):
            raise InterruptedTestError(left.pop(0))
        return iterate(trainer, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "iterate", interrupting)
        for _ in moments:
            with pytest.raises(InterruptedTestError):
                train_from_yaml(config, [], folder)


def weights_of(folder: Path, policy: str = "letters") -> Tensor:
    """[1, 8] of a policy that was exported."""
    table: Tensor = torch.load(folder / "export" / policy / "table.pt", weights_only=True)["weight"]
    return table


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without what the clock decides."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    volatile = ("time/", "throughput/", "memory/")
    for row in rows:
        row.pop("time")
        row["metrics"] = {k: v for k, v in row["metrics"].items() if not k.startswith(volatile)}
    return rows
