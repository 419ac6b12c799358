"""Metrics of one iteration: each declares its reduction where it is computed, and all ranks reduce the union of names."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from uniml_rl.monitor.vocabulary import Reduction, define

Values = Tensor | Sequence[float] | float | bool
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
        self._partials: dict[str, list[float]] = {}

    def mean(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Sum over count, over all calls and ranks; absent if nothing was counted."""
        finite = self._finite("mean", name, values, mask)
        self._merge("mean", name, [finite.sum().item(), finite.numel()])

    def share(self, name: str, flags: Values, mask: Tensor | None = None) -> None:
        """The share of true values: their mean."""
        self.mean(name, flags, mask)

    def sum(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """The sum over all calls and ranks; 0 if it was called with nothing."""
        self._merge("sum", name, [self._finite("sum", name, values, mask).sum().item()])

    def maximum(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """The largest value over all calls and ranks."""
        finite = self._finite("maximum", name, values, mask)
        if finite.numel():
            self._merge("maximum", name, [finite.max().item()])

    def last(self, name: str, value: float) -> None:
        """The value of the last call on the lowest rank that called it."""
        finite = self._finite("last", name, value, None)
        if finite.numel():
            self._partials[name] = [finite.item()]

    def standard_deviation(self, name: str, values: Values, mask: Tensor | None = None) -> None:
        """Population standard deviation (ddof 0) of all values of all calls and ranks."""
        self._merge("standard deviation", name, _moments(self._finite("standard deviation", name, values, mask)))

    def explained_variance(self, name: str, predictions: Tensor, targets: Tensor, mask: Tensor | None = None) -> None:
        """1 - Var(targets - predictions) / Var(targets); absent if the targets do not vary."""
        both = torch.stack([targets - predictions, targets]).double()
        if mask is None:
            mask = torch.ones_like(targets, dtype=torch.bool)
        finite = both.isfinite().all(dim=0)
        self._finite("explained variance", name, torch.where(finite, 0.0, torch.nan), mask)
        residual, target = (_moments(part[mask & finite]) for part in both)
        self._merge("explained variance", name, [*residual, *target[1:]])

    def seconds(self, name: str, seconds: float) -> None:
        """Seconds of a phase: summed over calls, then the slowest rank's."""
        self._merge("seconds", name, [seconds])

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the wall time of the block to the phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds(name, time.perf_counter() - start)

    def rate(self, name: str, count: float, seconds: float) -> None:
        """`count` per second: counts are summed over calls and ranks, seconds are the slowest rank's."""
        self._merge("rate", name, [count, seconds])

    def reduce(self, ranks: Ranks | None = None) -> dict[str, float]:
        """One finite number per metric, the same on every rank; collective, so every rank calls it.

        `ranks` is the engine; None is a single process. Names that only some ranks logged are reduced over those.
        """
        names = sorted(self._partials)
        own = [self._partials]
        if ranks is not None:
            names = ranks.union_of_names(names)
        raise NotImplementedError(own)

    def _finite(self, reduction: Reduction, name: str, values: Values, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _merge(self, reduction: Reduction, name: str, partial: list[float]) -> None:
        raise NotImplementedError


def _moments(values: Tensor) -> list[float]:
    raise NotImplementedError


def peak_memory_gib() -> float:
    """GiB: the most memory held so far, of the CUDA device if one is in use, else this process's resident set."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux
