"""Evaluation: the same numbers every time, honest about failures, with whichever weights are asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from toy_policy import LETTERS, ToyPolicy
from toy_runs import COUNT_A, COUNT_B, held_out, load_run, stage, write_run

from modalities.samples import Audio, Image, Prompt, Sample, Text, Video
from rewards.combine import RewardSet
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.evaluation import Evaluation, Evaluator, compare, evaluation_metrics, summary


def make_evaluator(
    folder: Path,
    policy: ToyPolicy,
    rewards: dict[str, Any] = COUNT_A,
    judged: dict[str, Any] | None = None,
    **keys: Any,
) -> Evaluator:
    evaluation = held_out(folder, rewards=judged or {}, **keys)
    config = load_run(write_run(folder, stage(folder, rewards=rewards, evaluation=evaluation))).stages[0]
    settings = config.evaluation
    assert settings is not None
    prompts = settings.prompts.build(0).first(settings.count)
    judges = RewardSet.build(settings.rewards, "cpu") if settings.rewards else None
    return Evaluator(
        policy, prompts, RewardSet.build(config.rewards, "cpu"), judges, settings, None, TorchEngine("cpu"), 0
    )


def towards(letter: str, strength: float = 3.0) -> ToyPolicy:
    policy = ToyPolicy("letters")
    with torch.no_grad():
        policy.table.weight[0, LETTERS.index(letter)] = strength
    return policy


def test_the_same_weights_give_the_same_numbers_however_many_rows_at_once(tmp_path: Path) -> None:
    policy = towards("a", 1.0)
    keys: dict[str, Any] = {"count": 5, "samples_per_prompt": 3, "judged": COUNT_B}
    found = [make_evaluator(tmp_path, policy, rows_at_once=rows, **keys).run() for rows in (100, 100, 4, 1)]
    torch.rand(3)  # the global generator is nobody's
    again = make_evaluator(tmp_path, policy, **keys)
    found += [again.run(), again.run()]
    for evaluation in found:
        assert [sample.text for sample in evaluation.samples] == [sample.text for sample in found[0].samples]  # type: ignore[union-attr]
        assert evaluation.scores.keys() == {"total", "a", "b"}
        assert all(torch.equal(evaluation.scores[name], scores) for name, scores in found[0].scores.items())
    assert found[0].scores["a"].shape == (5, 3)
    assert len({sample.text for sample in found[0].samples}) > 10  # type: ignore[union-attr]
    assert make_evaluator(tmp_path, policy, seed=5, **keys).run().samples != found[0].samples


def test_each_sample_is_scored_with_its_prompt(tmp_path: Path) -> None:
    evaluation = make_evaluator(tmp_path, ToyPolicy("letters")).run()
    pairs = list(zip(evaluation.samples, evaluation.prompt_of_each_sample(), strict=True))
    assert [prompt.text for _, prompt in pairs] == ["one", "one", "two", "two", "three", "three"]
    assert evaluation.score_lists()["a"] == [float("a" in sample.text) for sample, _ in pairs]  # type: ignore[union-attr]


def test_a_named_weight_set_is_evaluated_and_left(tmp_path: Path) -> None:
    """`ema` is the average: here of all-a and all-b weights, half each."""
    policy = towards("a", 20.0)
    policy.keep("ema")
    with torch.no_grad():
        policy.table.weight.copy_(towards("b", 20.0).table.weight)
    before = policy.table.weight.detach().clone()
    evaluator = make_evaluator(tmp_path, policy, rewards=COUNT_A | COUNT_B)
    with policy.using("ema"):
        old = evaluator.run()
    new = evaluator.run()
    assert (old.scores["a"].mean(), old.scores["b"].mean()) == (1, 0)
    assert (new.scores["a"].mean(), new.scores["b"].mean()) == (0, 1)
    policy.average("ema", 0.5)
    with policy.using("ema"):
        texts = "".join(sample.text for sample in evaluator.run().samples)  # type: ignore[union-attr]
    assert set(texts) == {"a", "b"}
    assert torch.equal(policy.table.weight, before)


def test_the_total_is_the_same_measure_while_rewards_fade_in(tmp_path: Path) -> None:
    """Else the table of before and after would show the weights' rise as the policy's."""
    fading = {"a": COUNT_A["a"] | {"fade_in_iterations": 100, "weight": 2.0}}
    scores = make_evaluator(tmp_path, towards("a"), rewards=fading).run().scores
    assert torch.equal(scores["total"], 2 * scores["a"]) and scores["total"].any()


def test_what_a_reward_remembers_is_of_training_alone(tmp_path: Path) -> None:
    rewards = {"surprise": {"type": "toy_runs:SurpriseConfig"}}
    evaluator = make_evaluator(tmp_path, towards("a"), rewards=rewards)
    evaluator.rewards.score([Text("aab", 3, True)], [Prompt("p", 0)], 0)
    before = evaluator.rewards.state_dict()
    first, second = evaluator.run(), evaluator.run()
    assert evaluator.rewards.state_dict() == before == {"surprise": {"total": 2.0, "count": 1}}
    assert torch.equal(first.scores["surprise"], second.scores["surprise"])


NAN = math.nan
PROMPTS = [Prompt(str(index), index) for index in range(4)]
TEXTS: list[Sample] = [Text("x", 1, True)] * 8


def evaluation_of(scores: list[list[float]]) -> Evaluation:
    return Evaluation(PROMPTS[: len(scores)], TEXTS, {"r": torch.tensor(scores)})


def test_failed_samples_are_left_out_and_counted() -> None:
    """The mean is over prompts that have a sample; a prompt without any leaves the difference too."""
    before = evaluation_of([[1.0, 3.0], [NAN, 4.0], [NAN, NAN], [1.0, 1.0]])
    after = evaluation_of([[2.0, NAN], [8.0, 8.0], [5.0, 5.0], [NAN, NAN]])
    found = evaluation_metrics("eval", after, before)
    differences = [2.0 - 2.0, 8.0 - 4.0]
    low, high = scipy.stats.t.interval(0.95, 1, loc=2.0, scale=scipy.stats.sem(differences))
    assert found == pytest.approx(
        {
            "eval/r/mean": (2 + 8 + 5) / 3,
            "eval/r/failures": 3,
            "eval/r/difference": 2.0,
            "eval/r/difference_low": low,
            "eval/r/difference_high": high,
        },
        rel=1e-4,
    )
    assert evaluation_metrics("eval", before, None) == pytest.approx(
        {"eval/r/mean": (2 + 4 + 1) / 3, "eval/r/failures": 3}
    )


def test_nothing_is_claimed_where_nothing_was_scored() -> None:
    nothing = evaluation_of([[NAN, NAN], [NAN, NAN]])
    some = evaluation_of([[1.0, 2.0], [NAN, NAN]])
    assert evaluation_metrics("eval", nothing, some) == {"eval/r/failures": 4.0}
    assert summary(nothing) == {}
    alone = evaluation_metrics("eval", some, some)
    assert alone == {"eval/r/mean": 1.5, "eval/r/failures": 2.0, "eval/r/difference": 0.0}  # no interval of one prompt
    assert compare(some, Evaluation(PROMPTS[:2], TEXTS, {"other": torch.zeros(2, 2)})) == {}


def test_an_evaluation_is_read_as_it_was_written(tmp_path: Path) -> None:
    kinds: list[Sample] = [
        Text("ä", 3, False),
        Image(torch.rand(3, 4, 5)),
        Image(torch.arange(48, dtype=torch.uint8).reshape(3, 4, 4)),
        Video(torch.rand(2, 3, 4, 4), frames_per_second=5.0),
        Audio(torch.rand(1, 9), 16000),
    ]
    scores = {"r": torch.tensor([[0.1], [NAN]])}
    for sample in kinds:
        written = Evaluation(PROMPTS[:2], [sample, sample], scores)
        written.save(tmp_path / "deep" / "one.pt")
        read = Evaluation.load(tmp_path / "deep" / "one.pt")
        assert [(p.text, p.index) for p in read.prompts] == [("0", 0), ("1", 1)]
        assert torch.equal(read.scores["r"].nan_to_num(7.0), scores["r"].nan_to_num(7.0))
        for name, value in vars(sample).items():
            found = getattr(read.samples[1], name)
            assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["one.pt"]
