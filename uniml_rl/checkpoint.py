"""Checkpoints: written aside by all ranks and then renamed, hashed, never a pickle.

A checkpoint is a folder: `tensors/`, weights and moments as `engines/stored_tensors.py` has them; `state.pt`, plain
values and small tensors that all ranks share; `state-RANK.pt`, what another rank alone knows; and the manifest. Any
number of ranks and any engine can go on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modalities.errors import UserError
from modalities.shards import is_divided, require_finite
from uniml_rl.engines.stored_tensors import StoredTensor, StoredTensors, shard_prefix, store
from uniml_rl.full_disk import first_line, is_full_disk

SCHEMA = 2
MANIFEST = "manifest.json"
_STATE, _TENSORS = "state.pt", "tensors"
_WEIGHTS, _ENGINE = "weights/", "engine"
_STORED = "stored tensor"
"""In place of a tensor that lies among the tensors: this, and its name there."""
_PREFIX = "iteration-"
_REPLACED, _REMOVED = ".replaced-", ".removed-"


def environment() -> dict[str, str | int]:
    """What a bit-for-bit repetition depends on besides the configuration."""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "diffusers": version("diffusers"),
        "peft": version("peft"),
        "processor": platform.machine() + " " + torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
    }


def _state_file(rank: int) -> str:
    """Rank 0's holds what all ranks share, too."""
    return f"state-{rank:05d}.pt" if rank else _STATE


def _alone() -> None:
    """Where the ranks would meet."""


def _own(names: list[str]) -> list[str]:
    """What all ranks would say."""
    return names


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    weights: dict[str, StoredTensors]  # policy or critic name -> its weight state
    state: dict[str, Any]  # positions, statistics, optimizers (their large tensors as StoredTensor)
    manifest: dict[str, Any]
    own: dict[str, Any] | None = None  # this rank's own state, if it is not rank 0 and the checkpoint has it

    @property
    def ranks(self) -> int:
        """How many ranks had samples of their own when it was written."""
        return _shares(self.manifest)

    def state_on(self, ranks: int) -> dict[str, Any]:
        """The state with what this rank kept for itself, for a run of so many ranks.

        Raises UserError if the ranks kept samples and there are other ranks now.
        """
        if self.ranks == ranks:
            return _merged(self.state, self.own or {})
        if "trainer" in self.state and _keeps_samples(self.state):
            raise UserError(
                f"the checkpoint was written by {self.ranks} processes, and each kept experience or statistics of its "
                f"own samples, which cannot be shared out to {ranks}; start {self.ranks}."
            )
        return self.state


def _taken_out(state: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """The nested state with a mark in place of every tensor that is sharded or no single number, which goes into
    `tensors`.
    """
    if isinstance(state, Tensor) and (state.numel() > 1 or is_divided(state)):
        tensors[place] = state
        return {_STORED: place}
    if isinstance(state, Mapping):
        return {key: _taken_out(value, f"{place}/{key}", tensors) for key, value in state.items()}
    return state


def _put_back(state: Any, tensors: StoredTensors) -> Any:
    """The nested state with tensors to be read later in place of the marks."""
    if isinstance(state, Mapping):
        if _STORED in state:
            return StoredTensor(tensors, state[_STORED])
        return {key: _put_back(value, tensors) for key, value in state.items()}
    return state


def _own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of an open stage's state what may differ between ranks."""
    if "trainer" not in state:
        return {}
    return {"trainer": {"objective": state["trainer"]["objective"]}, "rewards": state["rewards"]}


def _merged(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, **own, "trainer": {**state["trainer"], **own["trainer"]}} if own else dict(state)


def _keeps_samples(state: Mapping[str, Any]) -> bool:
    """Whether an open stage has kept experience, or rewards that remember."""
    replay = state["trainer"]["objective"].get("replay", {})
    rewards = [remembered for each in state["rewards"]["sets"] for remembered in each.values()]
    return any([*replay.values(), *rewards])


def _written_by(rank: int, folder: Path) -> list[Path]:
    """A rank's files, flushed to the disk."""
    prefixes = (shard_prefix(rank), _state_file(rank))
    own = [path for path in _files(folder) if path.name.startswith(prefixes)]
    for path in own:
        _flush(path)
    return own


class CheckpointStore:
    """The checkpoints of one run, one folder each, named by the number of finished iterations of the whole run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._begun: Callable[[], None] | None = None  # what is left to do of one that is being written

    def save(
        self,
        iteration: int,
        weights: Mapping[str, Mapping[str, Tensor]],
        state: dict[str, Any],
        about: dict[str, Any],
        rank: int = 0,
        meet: Callable[[], None] = _alone,
        share: Callable[[list[str]], list[str]] = _own,
        beside: bool = False,
    ) -> Path:
        """Writes a complete checkpoint aside, flushes it, renames it, and then removes old ones.

        `about` is readable information for the manifest. A kill at any moment leaves either the old set of checkpoints
        or the new one; an earlier checkpoint of the same iteration is replaced only by the rename. Of several ranks all
        call it, each with its parts of sharded tensors; those other than 0 add what they alone know. `meet` returns
        when all have come to it, `share` the names that any rank brings. With `beside` it returns as soon as there is a
        copy of the tensors, which threads write while training goes on; the checkpoint counts after `settle`. Raises
        FloatingPointError, and writes no tensor, if one is not finite.
        """
        self.settle()
        final = self.folder / f"{_PREFIX}{iteration:06d}"
        aside, replaced = (self.folder / f"{state}{final.name}" for state in (".writing-", _REPLACED))
        with self._keeping_the_last(final, aside, rank):
            if rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
            meet()
            if not aside.is_dir():
                raise UserError(f"rank {rank} does not see {aside}: a run's folder must be one that all nodes share.")
            tensors = {f"{_WEIGHTS}{name}/{key}": t for name, each in weights.items() for key, t in each.items()}
            if "trainer" in state:
                engine = _taken_out(state["trainer"]["engine"], _ENGINE, tensors)
                state = {**state, "trainer": {**state["trainer"], "engine": engine}}
            require_finite(tensors)
            # A handle, because torch's own file does not say why it could not be written.
            with (aside / _state_file(rank)).open("wb") as handle:
                torch.save(state if rank == 0 else _own_part(state), handle)
            wait = store(tensors, aside / _TENSORS, beside)

        def finish() -> None:
            with self._keeping_the_last(final, aside, rank):
                wait()
                hashes = share([f"{_sha256(path)} {path.relative_to(aside)}" for path in _written_by(rank, aside)])
                if rank == 0:
                    self._finish(aside, final, replaced, hashes, {"iteration": iteration, **about})
                meet()
            if rank == 0:
                self._remove_old(replaced)

        self._begun = finish
        if not beside:
            self.settle()
        return final

    def settle(self) -> None:
        """Finishes the checkpoint that is being written, if there is one; all ranks call it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()

    @contextmanager
    def _keeping_the_last(self, final: Path, aside: Path, rank: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if rank == 0:  # another rank cannot know whether this one still writes
                shutil.rmtree(aside, ignore_errors=True)
            if not isinstance(error, OSError) and not is_full_disk(error):
                raise
            raise UserError(
                f"checkpoint {final} could not be written ({first_line(error)}); the last good one is kept. Free disk "
                "space and run the same command again."
            ) from error

    def _finish(self, aside: Path, final: Path, replaced: Path, hashes: list[str], about: dict[str, Any]) -> None:
        """The manifest, the flush and the rename of what all ranks have written aside."""
        by_name = {name: digest for digest, _, name in (line.partition(" ") for line in hashes)}
        manifest = {"schema": SCHEMA, **about, "sha256": by_name, "environment": environment()}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2))
        _flush(aside / MANIFEST)
        for folder in {path.parent for path in _files(aside)}:
            sync_folder(folder)
        if final.exists():  # a stage that ended without an iteration
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        aside.rename(final)
        sync_folder(self.folder)

    def _remove_old(self, replaced: Path) -> None:
        for old in self.complete()[: -self.keep]:
            # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
            old.rename(self.folder / f"{_REMOVED}{old.name}")
        for path in (*self.folder.glob(f"{_REMOVED}*"), replaced):
            shutil.rmtree(path, ignore_errors=True)

    def complete(self) -> list[Path]:
        """Folders of finished checkpoints, oldest first; a half-written one has another name.

        One that was being replaced when the process was killed counts until its successor stands.
        """
        found = {}
        for prefix in (_REPLACED + _PREFIX, _PREFIX):
            for path in self.folder.glob(f"{prefix}*"):
                number = path.name.removeprefix(prefix)
                if number.isdigit() and (path / MANIFEST).is_file():
                    found[int(number)] = path
        return [found[number] for number in sorted(found)]

    def latest(self) -> Path | None:
        """The newest finished checkpoint."""
        complete = self.complete()
        return complete[-1] if complete else None


def load_checkpoint(folder: Path, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Reads a checkpoint, with the own state of one rank, which verifies its share of the files.

    Raises UserError that names the file if it is missing, or a hash or the schema does not fit.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / MANIFEST} is missing or damaged ({error}). Remove the folder to go on from the checkpoint "
            "before it."
        ) from error
    if manifest["schema"] != SCHEMA:
        raise UserError(f"{folder}: checkpoint schema {manifest['schema']}, but this version reads schema {SCHEMA}.")
    for name, digest in list(manifest["sha256"].items())[rank::ranks]:
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise UserError(
                f"{folder / name} is missing or damaged (its SHA-256 is not the manifest's). Remove the folder to go "
                "on from the checkpoint before it."
            )
    tensors = StoredTensors.of(folder / _TENSORS)
    names = {key.removeprefix(_WEIGHTS).partition("/")[0] for key in tensors if key.startswith(_WEIGHTS)}
    weights = {name: tensors.under(f"{_WEIGHTS}{name}/") for name in sorted(names)}
    state = torch.load(folder / _STATE, weights_only=True)
    if "trainer" in state:
        state["trainer"]["engine"] = _put_back(state["trainer"]["engine"], tensors)
    # Of the processes that had the same samples the first one's, which has scored them.
    file = _state_file(rank * (_processes(manifest) // _shares(manifest)))
    own = torch.load(folder / file, weights_only=True) if rank > 0 and file in manifest["sha256"] else None
    return Checkpoint(weights, state, manifest, own)


def _processes(manifest: Mapping[str, Any]) -> int:
    return int(manifest["environment"].get("ranks", 1))


def _shares(manifest: Mapping[str, Any]) -> int:
    return int(manifest.get("shares", _processes(manifest)))


def environment_changes(manifest: Mapping[str, Any]) -> list[str]:
    """Lines that say what changed since the checkpoint was written; empty if a bit-for-bit continuation is promised."""
    now = environment()
    return [
        f"{key}: {before} -> {now.get(key)}"
        for key, before in manifest["environment"].items()
        if now.get(key) != before
    ]
