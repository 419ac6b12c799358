"""Torch's process group and those beside it: what each waits for, and how all of them end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from modalities.errors import UserError

MEETING = timedelta(minutes=10)
"""Of processes that have met already (`meeting.py`), to connect to each other."""
_PATIENCE = timedelta(days=365)
"""Of waits for work that one rank does alone. A rank that dies ends them at once all the same."""
_wait = timedelta(minutes=30)
"""Longest wait in one exchange, as `join` was told."""
_joined = itertools.count()
_at_end: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Launch:
    """This process among those of the run, as its launcher says in the environment."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this node."""


def join(launch: Launch, device: str, timeout_seconds: float) -> bool:
    """Makes torch's process group, once: gloo for tensors on the CPU, NCCL for those on a GPU; whether this call did.

    A process that has no others makes one for libraries that want it.
    """
    global _wait
    if device == "cuda" and launch.world_size > 1:
        if launch.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"rank {launch.rank} is process {launch.local_rank} of its node, which has "
                f"{torch.cuda.device_count()} GPUs; start at most one process for each, or set engine.device: cpu."
            )
        torch.cuda.set_device(launch.local_rank)
    if dist.is_initialized():
        return False
    _wait = timedelta(seconds=timeout_seconds)
    store: dist.Store = dist.HashStore()
    if launch.world_size > 1:
        # torchrun keeps the store over its restarts: under the same keys a rank would find addresses of dead processes.
        attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_joined)}"
        store = dist.PrefixStore(attempt, next(iter(dist.rendezvous("env://", timeout=MEETING)))[0])
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_wait, store=store, rank=launch.rank, world_size=launch.world_size)
    return True


def patient_group() -> dist.ProcessGroup:
    """Of all ranks, for waits that no time-out ends; one for all engines of a process."""
    return _beside(dist.group.WORLD, "patient", "gloo", _PATIENCE)


def writing_group() -> dist.ProcessGroup:
    """Of all ranks, for the thread that writes, whose messages must not come between those of training."""
    return _beside(dist.group.WORLD, "writing", "gloo", _wait)


def lent_group() -> dist.ProcessGroup:
    """Of all ranks, for a library that would make one with a time-out of its own."""
    return _beside(dist.group.WORLD, "lent", None, _wait)


@cache
def _beside(world: object, purpose: str, backend: str | None, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend=backend, timeout=timeout, group_desc=purpose)
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return group


def row_of(rows: Tensor) -> dist.ProcessGroup:
    """The group of the row [rows, ranks] that this rank is in; each is in one."""
    if len(rows) == 1:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=_wait)
    assert isinstance(group, dist.ProcessGroup)
    return group


def mesh_of(sizes: Mapping[str, int], device: str) -> DeviceMesh:
    """All ranks in rows along named dimensions of these sizes, with neighbours next to each other along the last.

    As torch's `init_device_mesh`, whose groups have a time-out of their own.
    """
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = []
    for dimension in range(ranks.ndim):
        groups.append(row_of(ranks.movedim(dimension, -1).reshape(-1, ranks.size(dimension))))
    names = tuple(sizes)
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def at_end(forget: Callable[[], object]) -> None:
    """Has a library that has kept groups forget them when they end; each function once."""
    if forget not in _at_end:
        _at_end.append(forget)


def end() -> None:
    """Ends torch's process group and all that were made beside it. Nothing is sent, so no rank is waited for."""
    _beside.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
        for forget in _at_end:
            forget()
