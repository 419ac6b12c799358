"""Tensors in a folder of safetensors files, each rank's parts in its own: written by torch's distributed checkpoints.

Whatever number of ranks has written them, any number reads them, one tensor at a time, whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from modalities.shards import is_divided, local_part
from modalities.weights import LazyTensors
from uniml_rl.engines.groups import writing_group
from uniml_rl.engines.ranks import exchanging

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


def shard_prefix(rank: int) -> str:
    """With which the names of the files begin that a rank writes."""
    return f"shard-{rank + 1:05d}-"


def store(tensors: Mapping[str, Tensor], folder: Path, beside: bool = False) -> Callable[[], None]:
    """Writes the tensors; every rank calls it with the same names and the parts that it holds.

    Tensors that every rank holds whole are dealt out, each to one. With `beside`, a copy is written by a thread. What
    it returns waits for that, and raises OSError on every rank if one could not write.
    """
    if not tensors:
        return lambda: None
    state = dict(_apart(_own_share(tensors)))
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # As it should be in one process. Without an end, since the thread may say it at any time.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if beside:
        begun = dcp.async_save(
            state,
            storage_writer=writer,
            process_group=writing_group() if _together() else None,
            no_dist=not _together(),
        )
        written = begun if isinstance(begun, Future) else begun.upload_completion
        return partial(_waited, written.result)
    _waited(lambda: dcp.save(state, storage_writer=writer, no_dist=not _together()))
    return lambda: None


def _own_share(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of the tensors that all ranks hold whole those that this one writes, the largest first to whoever has least."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if _together() else (0, 1)
    own, dealt = dict[str, Tensor](), [0] * ranks
    for key, value in sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
        writer = rank if is_divided(value) else dealt.index(min(dealt))
        if not is_divided(value):
            dealt[writer] += value.nbytes
        if writer == rank:
            own[key] = value
    return own


def _apart(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and copies of those that share their memory with one before: a file holds each for itself."""
    seen = set[int]()
    for key, value in tensors.items():
        place = local_part(value).untyped_storage().data_ptr()
        yield key, value.detach().clone() if place in seen else value.detach()
        seen.add(place)


def _together() -> bool:
    return dist.is_initialized()


def _waited(work: Callable[[], object]) -> None:
    try:
        with exchanging("writing a checkpoint"):
            work()
    except CheckpointException as failed:  # no Exception, but a BaseException
        rank, (error, _) = next(iter(failed.failures.items()))
        if isinstance(error, OSError):
            raise OSError(error.errno, f"{error.strerror or error} (rank {rank})") from failed
        raise error from failed


@dataclass(frozen=True)
class _Part:
    file: Any  # as safetensors opens it, once, since opening reads the names of all tensors in it
    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor


class StoredTensors(LazyTensors):
    """The tensors of a folder that `store` has written, each read from the disk when it is asked for.

    The files stay open as long as it, and what `under` gives, are there.
    """

    def __init__(self, parts: Mapping[str, Sequence[_Part]]) -> None:
        self._parts = parts

    @classmethod
    def of(cls, folder: Path) -> StoredTensors:
        """Reads which tensors there are, and where."""
        parts: dict[str, list[_Part]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            sharding = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
            for key in file.keys():  # noqa: SIM118  # it is no dictionary
                shape = tuple(file.get_slice(key).get_shape())
                offsets = tuple(sharding[key][_OFFSETS]) if key in sharding else (0,) * len(shape)
                parts.setdefault(key, []).append(_Part(file, key, offsets, shape))
        return cls(parts)

    def under(self, place: str) -> StoredTensors:
        begin = {key: parts for key, parts in self._parts.items() if key.startswith(place)}
        return StoredTensors({key.removeprefix(place): parts for key, parts in begin.items()})

    def shape(self, key: str) -> torch.Size:
        return torch.Size(max(along) for along in zip(*(part.ends for part in self._parts[key]), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        parts = self._parts[key]
        if len(parts) == 1:
            return parts[0].read().clone()  # what is read stands for the file, which may be removed
        whole: Tensor | None = None
        for part in parts:
            value = part.read()
            whole = value.new_empty(self.shape(key)) if whole is None else whole
            whole[tuple(slice(*along) for along in zip(part.offsets, part.ends, strict=True))] = value
        assert whole is not None
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class StoredTensor:
    """One of them, to be read later."""

    tensors: StoredTensors
    key: str

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.tensors[self.key]


def as_read(value: Any) -> Any:
    """The tensor itself, if `value` is one to be read later."""
    return value.read() if isinstance(value, StoredTensor) else value
