"""Ranks that hold shards and run different numbers of forward passes: nobody computes without the others' parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from uniml_rl.engines.ranks import exchanging

_DONE, _END = -1, -1


class Lockstep:
    """Before a pass a rank says which module it is about to run. Those that run another one, or nothing any more, take
    part in the gathers of its blocks and compute nothing.

    Only passes without gradient. `sum_over_ranks` adds int64 tensors of all ranks.
    """

    def __init__(self, roots: list[FSDPModule], sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        self._roots = roots
        self._units = [[m for m in cast(nn.Module, root).modules() if isinstance(m, FSDPModule)] for root in roots]
        self._sum = sum_over_ranks
        self._later: list[int] = []

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it passes may be run; it is left when every rank has come to its end."""
        handles = [handle for index in range(len(self._roots)) for handle in self._hooked(index)]
        for root in self._roots:
            root.set_reshard_after_forward(True)
        try:
            yield
            while self._go_together(_DONE):
                pass
        finally:
            for handle in handles:
                handle.remove()
            for root in self._roots:
                root.set_reshard_after_forward(False, recurse=False)
                root.reshard()

    def _hooked(self, index: int) -> Iterator[RemovableHandle]:
        root = cast(nn.Module, self._roots[index])
        for place, unit in enumerate(self._units[index]):
            # In front of FSDP's own hook, which gathers; of the root's two the one that is put there last runs first.
            yield cast(nn.Module, unit).register_forward_pre_hook(self._says_unit(place), prepend=True)
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
        asked = torch.zeros(len(self._roots), dtype=torch.long)
        if own != _DONE:
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
                unit.unshard()
            unit.reshard()

    def _largest(self, place: int) -> int:
        """What the ranks that run the pass say, which is the same of each; -1 of those that only go with them."""
        said = torch.tensor([place + 1, place >= 0], dtype=torch.long)
        total, voices = self._sum(said).tolist()
        return total // voices - 1 if voices else _END
