"""Where a model is put as it is opened: on its device, or in host memory until an engine divides its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

import torch
from torch import nn

from modalities.shards import is_divided

_WAITS = ContextVar("_WAITS", default=False)


@contextmanager
def waiting_for_division() -> Iterator[None]:
    """Within it `put_trained` leaves modules where they were read: what divides them moves each part by itself."""
    before = _WAITS.set(True)
    try:
        yield
    finally:
        _WAITS.reset(before)


def put_trained(module: nn.Module, device: torch.device | str) -> None:
    """Moves a module that an engine will train to `device`, whole, unless it waits to be divided."""
    if not _WAITS.get():
        nn.Module.to(module, device)


@torch.no_grad()
def put_undivided(module: nn.Module, device: torch.device | str) -> None:
    """Moves what of a divided module is whole: its buffers, and parameters that nothing divides."""
    for tensor in chain(module.parameters(), module.buffers()):
        if not is_divided(tensor):
            tensor.data = tensor.data.to(device)
