"""Metrics: the same figure for any split over calls and ranks, and nothing invented."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.base import DenoisingSegment, Segment, TokenSegment, Trajectory
from modalities.samples import Image, Text
from uniml_rl.monitor.metrics import Metrics, peak_memory_gib
from uniml_rl.monitor.sample_metrics import distinct_share, measure_rollout, measure_samples
from uniml_rl.monitor.vocabulary import METRICS, REDUCTIONS, define, metrics_page

FEW = settings(max_examples=50, deadline=None)
NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), max_size=12)


class FakeRank:
    """One rank of a world of threads; a collective that not every rank joins times out instead of hanging."""

    def __init__(self, rank: int, world: list) -> None:
        self.rank, self.world_size, self._world = rank, len(world), world

    def _exchange(self, value: object) -> list:
        barrier = self._world[0]["barrier"]
        self._world[self.rank]["value"] = value
        barrier.wait(timeout=5)
        values = [slot["value"] for slot in self._world]
        barrier.wait(timeout=5)
        return values

    def union_of_names(self, names: list[str]) -> list[str]:
        return sorted(set().union(*self._exchange(names)))

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(value)).sum(0)


def reduce_together(*metrics: Metrics) -> dict[str, float]:
    """Reduces on as many ranks; all must agree."""
    world = [{"barrier": threading.Barrier(len(metrics))} for _ in metrics]
    world = [{**slot, "barrier": world[0]["barrier"]} for slot in world]
    results: list = [None] * len(metrics)

    def run(rank: int) -> None:
        results[rank] = metrics[rank].reduce(FakeRank(rank, world))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(metrics))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == results[0] for result in results) and results[0] is not None
    return results[0]


@FEW
@given(st.lists(NUMBERS, min_size=1, max_size=3))
def test_reductions_do_not_depend_on_the_split_over_ranks_and_calls(parts: list[list[float]]) -> None:
    ranks = []
    for numbers in parts:
        metrics = Metrics()
        for start in range(0, len(numbers), 2):
            chunk = torch.tensor(numbers[start : start + 2])
            metrics.mean("reward/mean", chunk)
            metrics.sum("loss/policy", chunk)
            metrics.maximum("policy/ratio_max_deviation", chunk)
            metrics.standard_deviation("reward/std", chunk)
        ranks.append(metrics)
    everything = numpy.array([number for numbers in parts for number in numbers], dtype=numpy.float64)
    reduced = reduce_together(*ranks)
    if not len(everything):
        assert reduced == {}
        return
    scale = float(numpy.abs(everything).max()) + 1e-12
    assert reduced["reward/mean"] == pytest.approx(everything.mean(), abs=1e-9 * scale)
    assert reduced["loss/policy"] == pytest.approx(everything.sum(), abs=1e-9 * scale)
    assert reduced["policy/ratio_max_deviation"] == everything.max()
    assert reduced["reward/std"] == pytest.approx(everything.std(), abs=1e-7 * scale)


def test_the_standard_deviation_survives_a_large_mean() -> None:
    values = torch.tensor([1e8, 1e8 + 1, 1e8 + 2], dtype=torch.float64)
    metrics = Metrics()
    for value in values:
        metrics.standard_deviation("reward/std", value)
    assert metrics.reduce()["reward/std"] == pytest.approx(values.std(unbiased=False).item(), rel=1e-9)


@FEW
@given(st.integers(0, 8), st.integers(1, 8), st.integers(0, 2**31))
def test_explained_variance_is_of_all_ranks_values(first: int, second: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets, predictions = torch.randn(2, first + second + 1, generator=generator)
    ranks = [Metrics(), Metrics()]
    for metrics, part in zip(ranks, (slice(0, first), slice(first, None)), strict=True):
        metrics.explained_variance("value/explained_variance", predictions[part], targets[part])
    expected = 1 - (targets - predictions).double().var(unbiased=False) / targets.double().var(unbiased=False)
    assert reduce_together(*ranks)["value/explained_variance"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def test_explained_variance_of_constant_targets_is_absent() -> None:
    metrics = Metrics()
    metrics.explained_variance("value/explained_variance", torch.randn(4), torch.ones(4))
    assert metrics.reduce() == {}


def test_ranks_that_log_different_metrics_reduce_the_union() -> None:
    first, second, third = Metrics(), Metrics(), Metrics()
    first.mean("reward/mean", [1.0, 2.0])
    first.last("learning_rate/policy", 0.5)
    second.mean("kl/reference", 3.0)
    second.last("learning_rate/policy", 0.7)
    second.last("kl/coefficient", 0.1)
    assert reduce_together(first, second, third) == {
        "reward/mean": 1.5, "kl/reference": 3.0, "learning_rate/policy": 0.5, "kl/coefficient": 0.1
    }  # fmt: skip
    assert reduce_together(Metrics(), Metrics()) == {}


def test_a_mask_decides_what_counts_and_a_mean_over_nothing_is_absent() -> None:
    metrics = Metrics()
    metrics.mean("reward/mean", torch.tensor([[1.0, math.nan], [5.0, 7.0]]), mask=torch.tensor([[True, False]] * 2))
    metrics.mean("kl/reference", torch.ones(3), mask=torch.zeros(3, dtype=torch.bool))
    metrics.standard_deviation("reward/std", [])
    metrics.maximum("policy/ratio_max_deviation", [])
    metrics.share("text/finished_share", [True, False, False, True])
    metrics.sum("rollout/near_ties", [])
    assert metrics.reduce() == {"reward/mean": 3.0, "text/finished_share": 0.5, "rollout/near_ties": 0.0}


def test_values_that_are_not_finite_are_counted_not_hidden() -> None:
    first, second = Metrics(), Metrics()
    first.mean("policy/ratio_mean", [1.0, math.inf])
    second.mean("policy/ratio_mean", [3.0, math.nan])
    first.sum("loss/policy", math.nan)
    first.last("kl/coefficient", math.nan)
    first.maximum("policy/ratio_max_deviation", [math.inf, 0.5])
    targets = torch.tensor([1.0, 2.0, math.nan])
    first.explained_variance("value/explained_variance", torch.tensor([1.0, 2.0, 3.0]), targets)
    assert reduce_together(first, second) == {
        "policy/ratio_mean": 2.0,
        "policy/ratio_max_deviation": 0.5,
        "value/explained_variance": 1.0,
        "nonfinite/policy/ratio_mean": 2.0,
        "nonfinite/loss/policy": 1.0,
        "nonfinite/kl/coefficient": 1.0,
        "nonfinite/policy/ratio_max_deviation": 1.0,
        "nonfinite/value/explained_variance": 1.0,
    }


def test_seconds_are_the_slowest_ranks_and_rates_use_them() -> None:
    fast, slow = Metrics(), Metrics()
    for metrics, seconds in ((fast, 1.0), (slow, 2.0)):
        metrics.seconds("time/update", seconds)
        metrics.seconds("time/update", seconds)
        metrics.steps("gradient/skipped_steps", 1)
        metrics.rate("throughput/samples_per_second", 6, seconds)
    assert reduce_together(fast, slow) == {
        "time/update": 4.0, "gradient/skipped_steps": 1.0, "throughput/samples_per_second": 6.0
    }  # fmt: skip
    metrics = Metrics()
    with metrics.timed("time/reward"):
        threading.Event().wait(0.02)
    assert 0.02 <= metrics.reduce()["time/reward"] < 2


def test_unknown_names_and_other_reductions_are_errors() -> None:
    with pytest.raises(ValueError, match="did you mean 'reward/mean'"):
        Metrics().mean("reward/meen", 1.0)
    with pytest.raises(ValueError, match="logged as 'sum', but the vocabulary says 'mean'"):
        Metrics().sum("reward/mean", 1.0)
    for name in ("reward/a/b/raw_mean", "reward//raw_mean", "eval/x/median", "reward/{reward}/raw_mean/x"):
        with pytest.raises(ValueError, match="not in"):
            define(name)
    assert define("reward/CLIP score/raw_mean") is METRICS["reward/{reward}/raw_mean"]
    assert define("learning_rate/chain/writer") is METRICS["learning_rate/{optimizer}"]


def test_the_page_is_the_vocabulary() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics_page(), (
        "run `python -m uniml_rl.monitor.vocabulary > docs/metrics.md`"
    )
    assert {metric.reduction for metric in METRICS.values()} == set(REDUCTIONS)
    assert all(metric.definition and metric.unit for metric in METRICS.values())


def test_distinct_shares_see_repetition_within_and_between_texts() -> None:
    assert distinct_share(["a b c"], 1) == 1.0
    assert distinct_share(["Love love LOVE"], 1) == pytest.approx(1 / 3)
    assert distinct_share(["a b", "b a"], 2) == 1.0, "no pair spans two texts"
    assert distinct_share(["a b", "a b", "a b", "a b"], 2) == 0.25
    assert distinct_share(["one", ""], 2) is None


def test_samples_are_measured_by_group() -> None:
    texts = [Text("a a", 3, True), Text("a b", 5, False), Text("", 1, True)]
    metrics = Metrics()
    measure_samples(metrics, texts, [0, 0, 1])
    assert metrics.reduce() == {
        "text/length_mean": 3.0, "text/finished_share": pytest.approx(2 / 3), "text/distinct_1": 0.5,
        "text/distinct_2": 1.0,
    }  # fmt: skip
    pictures = Metrics()
    measure_samples(pictures, [Image(torch.zeros(3, 2, 2))], [0])
    assert pictures.reduce() == {}


def test_near_ties_of_token_segments_are_added_up() -> None:
    def segment(kind: type, **more) -> Segment:
        row = torch.zeros(1, 1)
        group = torch.zeros(1, dtype=torch.long)
        mask = torch.ones(1, 1, dtype=torch.bool)
        return kind("a", group, row, mask, mask, ~mask, "token", 0, ["eos"], [], **more)

    segments = [segment(TokenSegment, near_ties=2), segment(DenoisingSegment), segment(TokenSegment, near_ties=3)]
    metrics = Metrics()
    measure_rollout(metrics, Trajectory(segments, []))
    assert metrics.reduce() == {"rollout/near_ties": 5.0}


def test_peak_memory_is_the_kernels_high_water_mark_in_gib() -> None:
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: the unit at least
        assert 0.01 < peak_memory_gib() < 1024
        return
    (high_water,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory_gib() == pytest.approx(int(high_water.split()[1]) / 2**20, rel=0.05)
