"""Memory that is taken: what stands in for a device's, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes of memory that was taken within the context and held at once."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[tuple[StorageWeakRef, int]] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in storages_of((args, kwargs))}
        new = [storage for storage in storages_of(self.made_by(result)) if storage.data_ptr() not in given]
        made = [storage for storage in new if storage.nbytes()]
        self._taken += [(StorageWeakRef(storage), storage.nbytes()) for storage in made]
        self._taken = [(storage, size) for storage, size in self._taken if not storage.expired()]
        self.bytes = max(self.bytes, sum(size for _, size in self._taken))
        return result

    def made_by(self, result: Any) -> Any:
        """What counts of an operation's result."""
        return result


def storages_of(values: Any) -> list[Any]:
    """What is behind the tensors in a nest of them."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]


@contextmanager
def moves_make_memory() -> Iterator[None]:
    """Within it what moves tensors to the device that they are on copies them, as it would to another."""
    to = Tensor.to

    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = to(tensor, *args, **kwargs)
        asks_for_device = any(isinstance(each, torch.device | str) for each in (*args, *kwargs.values()))
        return result.clone() if result is tensor and asks_for_device else result

    def moved_to_shard(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            tensor.data = tensor.data.clone()

    moves_of_fsdp = mock.patch.object(_fsdp_init, "_move_states_to_device", moved_to_shard)
    with mock.patch.object(Tensor, "to", moved), moves_of_fsdp:
        yield
