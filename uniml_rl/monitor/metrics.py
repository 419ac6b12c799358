"""Metrics of one iteration: each states its reduction where it is computed; ranks reduce the union of their names."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from uniml_rl.monitor.vocabulary import Reduction, define

Values = Tensor | Sequence[float] | float
Partial = list[float]
_WIDTH = 5  # the most numbers that a partial result needs (explained variance)


class Ranks(Protocol):
    """What reducing needs of an engine."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; float64 stays float64."""
        ...

    def union_of_names(self, names: list[str]) -> list[str]:
        """The sorted union of all ranks' names."""
        ...


class Metrics:
    """Accumulates the metrics of one iteration on one rank.

    Every name must be in the vocabulary, and the method must be the reduction that the vocabulary states; both raise
    ValueError otherwise. `values` may have any shape; `mask` (bool, same shape) selects the values that count. NaN and
    infinite values among them are left out and counted in `nonfinite/<name>`. Partial results are float64.
    """

    def __init__(self) -> None:
        self._partials: dict[str, Partial] = {}

    def mean(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Sum over count, over all calls and ranks; absent if nothing was counted."""
        finite = self._finite(name, values, mask)
        self._merge("mean", name, [finite.sum().item(), finite.numel()])

    def share(self, name: str, flags: Values, mask: Tensor | None = None) -> None:
        """The share of true values: their mean."""
        self.mean(name, flags, mask)

    def sum(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """The sum over all calls and ranks; 0 over no values, absent if there were some and none was finite."""
        finite = self._finite(name, values, mask)
        if finite.numel() or f"nonfinite/{name}" not in self._partials:
            self._merge("sum", name, [finite.sum().item()])

    def maximum(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """The largest value over all calls and ranks."""
        finite = self._finite(name, values, mask)
        if finite.numel():
            self._merge("maximum", name, [finite.max().item()])

    def last(self, name: str, value: float) -> None:
        """The value of the last call on the lowest rank that called it."""
        finite = self._finite(name, value, None)
        if finite.numel():
            self._merge("last", name, [finite.item()])

    def standard_deviation(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Population standard deviation (ddof 0) of all values of all calls and ranks."""
        self._merge("standard deviation", name, _moments(self._finite(name, values, mask)))

    def explained_variance(self, name: str, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """1 - Var(targets - predictions) / Var(targets); absent if the targets do not vary."""
        both = torch.stack([targets - predictions, targets]).double()
        if mask is None:
            mask = torch.ones_like(targets, dtype=torch.bool)
        finite = both.isfinite().all(dim=0)
        self._finite(name, torch.where(finite, 0.0, torch.nan), mask)
        residual, target = (_moments(part[mask & finite]) for part in both)
        self._merge("explained variance", name, [*residual, *target[1:]])

    def seconds(self, name: str, seconds: float) -> None:
        """Seconds of a phase: summed over calls, then the slowest rank's."""
        self._merge("sum per rank", name, [seconds])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds(name, time.perf_counter() - start)

    def steps(self, name: str, count: float) -> None:
        """Steps that all ranks take together: summed over calls, not over ranks."""
        self._merge("sum per rank", name, [count])

    def rate(self, name: str, count: float, seconds: float) -> None:
        """`count` per second: counts are summed over calls and ranks, seconds are the slowest rank's."""
        self._merge("rate", name, [count, seconds])

    def reduce(self, ranks: Ranks | None = None) -> dict[str, float]:
        """One finite number per metric, by name, the same on every rank; collective, so every rank calls it.

        `ranks` is the engine; None is a single process. A name that only some ranks logged is reduced over those.
        """
        parts = [self._partials] if ranks is None else _gather(self._partials, ranks)
        reduced = {}
        for name in sorted(set().union(*parts)):
            value = _REDUCE[define(name).reduction]([part[name] for part in parts if name in part])
            if value is not None:
                reduced[name] = value
        return reduced

    def _finite(self, name: str, values: Values, mask: Tensor | None) -> Tensor:
        """[N] float64: the finite ones of the values that count; the others become `nonfinite/<name>`."""
        flat = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach().flatten()
        if mask is not None:
            flat = flat[mask.detach().cpu().flatten()]
        finite = flat[flat.isfinite()]
        if len(finite) < len(flat):
            self._merge("sum", f"nonfinite/{name}", [float(len(flat) - len(finite))])
        return finite

    def _merge(self, reduction: Reduction, name: str, partial: Partial) -> None:
        declared = define(name).reduction
        if declared != reduction:
            raise ValueError(f"metric {name!r} was logged as {reduction!r}, but the vocabulary says {declared!r}.")
        before = self._partials.get(name)
        self._partials[name] = partial if before is None else _COMBINE[reduction](before, partial)


def _gather(partials: dict[str, Partial], ranks: Ranks) -> list[dict[str, Partial]]:
    """Every rank's partial results. A sum in which each rank fills only its own slice is a gather."""
    names = ranks.union_of_names(sorted(partials))
    own = torch.zeros(ranks.world_size, len(names), 1 + _WIDTH, dtype=torch.float64)
    for column, name in enumerate(names):
        if name in partials:
            own[ranks.rank, column, 0] = len(partials[name])
            own[ranks.rank, column, 1 : 1 + len(partials[name])] = torch.tensor(partials[name], dtype=torch.float64)
    return [
        {name: row[1 : 1 + int(row[0])] for name, row in zip(names, rank_rows, strict=True) if row[0]}
        for rank_rows in ranks.sum_over_ranks(own).tolist()
    ]


def _moments(values: Tensor) -> Partial:
    """[count, mean, sum of squared deviations]; exact where a sum of squares would cancel."""
    if not values.numel():
        return [0.0, 0.0, 0.0]
    mean = values.mean()
    return [float(values.numel()), mean.item(), (values - mean).square().sum().item()]


def _add(first: Partial, second: Partial) -> Partial:
    return [a + b for a, b in zip(first, second, strict=True)]


def _merge_moments(first: Partial, second: Partial) -> Partial:
    """[count, mean, deviations, mean, deviations, ...] of two sets of values as of one (Chan et al. 1979, eq. 1.5)."""
    count = first[0] + second[0]
    if not count:
        return first
    merged = [count]
    for index in range(1, len(first), 2):
        shift = second[index] - first[index]
        merged.append(first[index] + shift * second[0] / count)
        merged.append(first[index + 1] + second[index + 1] + shift**2 * first[0] * second[0] / count)
    return merged


def _largest(first: Partial, second: Partial) -> Partial:
    return [max(a, b) for a, b in zip(first, second, strict=True)]


_COMBINE: dict[Reduction, Callable[[Partial, Partial], Partial]] = {
    "mean": _add,
    "sum": _add,
    "maximum": _largest,
    "last": lambda _, second: second,
    "standard deviation": _merge_moments,
    "explained variance": _merge_moments,
    "sum per rank": _add,
    "rate": _add,
}


def _reduce_mean(parts: list[Partial]) -> float | None:
    total, count = reduce(_add, parts)
    return total / count if count else None


def _reduce_standard_deviation(parts: list[Partial]) -> float | None:
    count, _, deviations = reduce(_merge_moments, parts)
    return math.sqrt(deviations / count) if count else None


def _reduce_explained_variance(parts: list[Partial]) -> float | None:
    _, _, residual, _, target = reduce(_merge_moments, parts)
    return 1 - residual / target if target else None


def _reduce_rate(parts: list[Partial]) -> float | None:
    slowest = max(seconds for _, seconds in parts)
    return sum(count for count, _ in parts) / slowest if slowest else None


_REDUCE: dict[Reduction, Callable[[list[Partial]], float | None]] = {
    "mean": _reduce_mean,
    "sum": lambda parts: reduce(_add, parts)[0],
    "maximum": lambda parts: reduce(_largest, parts)[0],
    "last": lambda parts: parts[0][0],
    "standard deviation": _reduce_standard_deviation,
    "explained variance": _reduce_explained_variance,
    "sum per rank": lambda parts: reduce(_largest, parts)[0],
    "rate": _reduce_rate,
}


def peak_memory_gib() -> float:
    """GiB: the most memory held so far, of the CUDA device if one is in use, else this process's resident set."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux
