"""Dynamic sampling: prompts that teach nothing are replaced, as far as the rounds go, and no rank waits for another."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.harness import make_trainer, scored
from torch import Tensor
from toy_policy import LENGTH, ToyPolicy
from toy_runs import on_ranks

from modalities.base import Request
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample, Text
from rewards.combine import RewardResult
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.objectives.policy_gradient import PolicyGradientObjective
from uniml_rl.trainer import Trainer

PROMPTS = 12


class Letters:
    """The share of a's of prompts that are `telling`, 0.5 of all others; remembers what it was asked."""

    def __init__(self, telling: Callable[[Prompt], bool]) -> None:
        self.telling, self.prompts = telling, list[int]()

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        self.prompts += [prompt.index for prompt in prompts]
        texts = [sample.text for sample in samples if isinstance(sample, Text)]
        every = zip(texts, prompts, strict=True)
        result = scored(
            torch.tensor([t.count("a") / LENGTH + t.count("b") if self.telling(p) else 0.5 for t, p in every])
        )
        result.raw = result.weighted = {"letters": result.total}
        result.weights, result.failures = {"letters": 1.0}, {"letters": Counter()}
        return result


def trainer_for(
    folder: Path, engine: Engine, scores: Letters, rounds: int = 3, wanted: int = 4, **algorithm: Any
) -> Trainer:
    path = folder / "many.txt"
    if not path.exists():
        path.write_text("\n".join(f"prompt {index}" for index in range(PROMPTS)))
    return make_trainer(
        ToyPolicy("letters"),
        {"name": "dapo", "overlong": None, "dynamic_sampling": {"rounds": rounds}} | algorithm,
        engine,
        folder,
        scores,
        prompts={"type": "file", "path": str(path), "shuffle": False},
        prompts_per_iteration=wanted,
        group_size=8,
        optimizer={"learning_rate": 0.1},
    )


def trained_experience(trainer: Trainer) -> list[Experience]:
    """A list that fills with what the objective prepares."""
    found, prepare = list[Experience](), trainer.objective.prepare

    def recording(*arguments: Any) -> Experience:
        found.append(prepare(*arguments))
        return found[-1]

    trainer.objective.prepare = recording  # type: ignore[method-assign]
    return found


def table(trainer: Trainer) -> Tensor:
    assert isinstance(trainer.policy, ToyPolicy)
    return trainer.policy.table.weight.detach().clone()


def test_prompts_without_signal_are_replaced_until_there_are_enough(tmp_path: Path) -> None:
    """Only each third prompt tells anything: 4 + 3 + 2 + ... prompts are drawn until four of them did."""
    scores = Letters(lambda prompt: prompt.index % 3 == 0)
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), scores, rounds=9)
    requests, rollout = list[Request](), trainer.policy.rollout
    trainer.policy.rollout = lambda asked, sampling=None: requests.extend(asked) or rollout(asked)  # type: ignore[method-assign,func-returns-value]
    experience = trained_experience(trainer)
    metrics = trainer.iterate(0).metrics
    # prompts 0-3 hold 0 and 3; then two more: 4, 5; two more: 6, 7; then one: 8; one: 9
    assert scores.prompts[::8] == list(range(10))
    assert (metrics["resampling/rounds"], metrics["resampling/dropped_groups"]) == (4, 6)
    trained = experience[0].trajectory
    assert sorted({request.prompt.index for request in trained.requests}) == [0, 3, 6, 9]
    assert len(trained.requests) == 4 * 8
    assert [r.key.resampling_round for r in requests[::8]] == [0] * 4 + [1] * 2 + [2] * 2 + [3, 4]
    assert len({request.group for request in requests}) == 10 and len({request.key for request in requests}) == 80


def test_the_reward_that_is_reported_is_that_of_all_samples(tmp_path: Path) -> None:
    """Else a run whose prompts become easy would seem to get worse."""
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), Letters(lambda prompt: prompt.index == 0), rounds=1)
    experience = trained_experience(trainer)
    metrics = trainer.iterate(0).metrics
    of_trained = [text for text in trainer.policy.decode(experience[0].trajectory) if isinstance(text, Text)]
    told = sum(text.text.count("a") / LENGTH + text.text.count("b") for text in of_trained)
    assert len(of_trained) == 8  # one group of the seven that were sampled
    assert metrics["reward/mean"] == pytest.approx((told + 6 * 8 * 0.5) / (7 * 8))


def test_what_is_never_found_is_said_once_and_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), Letters(lambda prompt: False), rounds=2)
    before = table(trainer)
    with caplog.at_level(logging.WARNING):
        reports = [trainer.iterate(iteration) for iteration in range(2)]
    assert torch.equal(table(trainer), before) and trainer.optimizer_steps == 0
    assert len(caplog.records) == 1
    message = caplog.text
    assert "of 12 prompts sampled in 3 rounds, only 0 of the 4 wanted" in message
    assert "this iteration learns nothing new" in message and "dynamic_sampling.rounds" in message
    for report in reports:
        assert report.metrics["resampling/rounds"] == 2 and report.metrics["resampling/dropped_groups"] == 12
        assert report.metrics["update/empty_steps"] == 1
        assert report.reward_mean == pytest.approx(0.5)


def test_what_is_found_in_part_is_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), Letters(lambda prompt: prompt.index == 1), rounds=1)
    before = table(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.iterate(0)
    assert not torch.equal(table(trainer), before)
    assert "only 1 of the 4 wanted" in caplog.text and "nothing new" not in caplog.text


@pytest.mark.parametrize("telling", [lambda p: p.index in (0, 1, 4), lambda p: p.index >= 2, lambda p: False])
def test_ranks_agree_on_the_rounds_and_none_waits(telling: Callable[[Prompt], bool], tmp_path: Path) -> None:
    """Also where all that tells anything lies on one rank, and the other has nothing for several optimizer steps."""

    def work(engine: Engine) -> tuple[Tensor, list[float], int]:
        trainer = trainer_for(tmp_path, engine, Letters(telling), rounds=2, minibatches=3, epochs=2)
        found = []
        for iteration in range(2):
            metrics = trainer.iterate(iteration).metrics
            found += [metrics["resampling/rounds"], metrics["resampling/dropped_groups"]]
        return table(trainer), found, trainer.optimizer_steps

    first, second = on_ranks(2, work)
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]


def test_without_a_useful_group_missing_one_process_and_two_ranks_do_the_same(tmp_path: Path) -> None:
    """An even number is missing in each round, so that both draw alike."""

    def work(engine: Engine) -> Tensor:
        trainer = trainer_for(tmp_path, engine, Letters(lambda prompt: prompt.index % 4 < 2))
        trainer.iterate(0)
        return table(trainer)

    alone = work(TorchEngine("cpu"))
    assert alone.abs().max() > 0.01
    for weights in on_ranks(2, work):
        assert torch.allclose(weights, alone, atol=1e-6)


def test_a_group_needs_two_valid_samples_that_differ(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), Letters(lambda prompt: True), overlong={"maximum": 4})
    requests = [Request(Prompt("p", g), g, SampleKey(0, 0, 0, g, s)) for g in range(5) for s in range(3)]
    trajectory = trainer.policy.rollout(requests)
    nan = math.nan
    totals = torch.tensor([0.1, 0.1, 0.1, nan, 0.0, 0.0, 1.0, nan, 0.0, nan, nan, 1.0, nan, nan, nan])
    result = replace(scored(totals), valid=totals.isfinite())
    assert trainer.objective.useful(trajectory, result).view(5, 3).any(1).tolist() == [False, False, True, False, False]
    trained, kept = trainer.objective.as_trained(trainer.policy, trajectory, result)
    assert [request.group for request in trained.requests] == [2, 2, 2]
    assert kept.total.nan_to_num(-1.0).tolist() == [1.0, -1.0, 0.0] and kept.valid.tolist() == [True, False, True]


def test_rewards_of_their_own_need_two_valid_samples_that_differ_in_one_of_them() -> None:
    block = {"name": "dapo", "overlong": None, "advantage": {"normalisation": "per_reward"}}
    objective = PolicyGradientObjective(resolve_algorithm(block), None)
    requests = [Request(Prompt("p", g), g, SampleKey(0, 0, 0, g, s)) for g in range(4) for s in range(2)]
    trajectory = ToyPolicy("letters").rollout(requests)
    valid = torch.tensor([True, True, True, True, True, False, True, True])  # the sixth by another reward's failure
    raw = {
        "first": torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]),
        "second": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0]),
        "watched": torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, math.nan, 1.0]),
    }
    weights = {"first": 1.0, "second": 1.0, "watched": 0.0}
    result = replace(scored(raw["first"] + raw["second"]), valid=valid, raw=raw, weights=weights)
    assert objective.useful(trajectory, result).view(4, 2).any(1).tolist() == [False, True, False, False]


def test_kept_experience_is_trained_while_nothing_useful_is_found(tmp_path: Path) -> None:
    telling = [True]
    scores = Letters(lambda prompt: telling[0])
    trainer = trainer_for(tmp_path, TorchEngine("cpu"), scores, rounds=1, replay={"iterations": 2})
    trainer.iterate(0)
    telling[0], before = False, table(trainer)
    experience = trained_experience(trainer)
    trainer.iterate(1)
    assert experience[0].segments[0].mask.any(1).sum() == 4 * 8 and not torch.equal(table(trainer), before)
