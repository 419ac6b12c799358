"""Ranks that hold shards and run different numbers of forward passes: nobody computes without the others' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from uniml_rl.engines.ranks import exchanging

_END = -1
"""In place of a module to run or of its unit: there is none any more."""


class Lockstep:
    """Before a pass a rank says which module it is about to run. Those that run another one, or nothing any more, take
    part in the gathers of its blocks and compute nothing.

    Only passes without gradient. The first unit of each root is itself, the others are its blocks. `gather` collects
    the weights of a unit, for which all ranks call it, and `give_back` frees them. `sum_over_ranks` adds int64 tensors
    of all ranks.
    """

    def __init__(
        self,
        units: Sequence[Sequence[nn.Module]],
        gather: Callable[[nn.Module], None],
        give_back: Callable[[nn.Module], None],
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> None:
        self._units = units
        self._gather, self._give_back = gather, give_back
        self._sum = sum_over_ranks
        self._later: list[int] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it passes may be run; it is left when every rank has come to its end."""
        handles = [handle for index in range(len(self._units)) for handle in self._hooked(index)]
        try:
            yield
            while self._go_together(_END):
                pass
        finally:
            for handle in handles:
                handle.remove()

    def _hooked(self, index: int) -> Iterator[RemovableHandle]:
        root = self._units[index][0]
        for place, unit in enumerate(self._units[index]):
            # In front of the engine's own hook, which gathers; of the root's two the one put there last runs first.
            yield unit.register_forward_pre_hook(self._says_unit(place), prepend=True)
        yield root.register_forward_pre_hook(lambda *_: self._begin(index), prepend=True)
        yield root.register_forward_hook(lambda *_: self._end())

    def _says_unit(self, place: int) -> Callable[..., None]:
        def say(*_: Any) -> None:
            self._largest(place)

        return say

    def _begin(self, index: int) -> None:
        self._go_together(index)

    def _end(self) -> None:
        """The pass is over on the ranks that ran it; then come the modules that others have asked for."""
        self._largest(_END)
        for other in self._later:
            self._accompany(other)
        self._later = []

    def _go_together(self, own: int) -> bool:
        """Agrees on the modules to run, and goes with the others up to the own one; whether there was any."""
        asked = torch.zeros(len(self._units), dtype=torch.long)
        if own != _END:
            asked[own] = 1
        wanted = self._sum(asked).nonzero().flatten().tolist()
        for place, index in enumerate(wanted):
            if index == own:
                self._later = wanted[place + 1 :]
                return True
            self._accompany(index)
        return bool(wanted)

    def _accompany(self, index: int) -> None:
        while (place := self._largest(_END)) != _END:
            unit = self._units[index][place]
            with exchanging("gathering weights"):
                self._gather(unit)
            self._give_back(unit)

    def _largest(self, place: int) -> int:
        """What the ranks that run the pass say, which is the same of each; -1 of those that only go with them."""
        said = torch.tensor([place + 1, place >= 0], dtype=torch.long)
        total, voices = self._sum(said).tolist()
        return total // voices - 1 if voices else _END
