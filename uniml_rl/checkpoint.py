"""Checkpoints: written aside and then renamed, hashed, never a pickle; and the lock of the run's folder."""

from __future__ import annotations

import fcntl
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from modalities.errors import UserError
from uniml_rl.full_disk import first_line, is_full_disk

SCHEMA = 1
MANIFEST = "manifest.json"
_STATE = "state.pt"
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


def _finish_file(path: Path) -> str:
    """Flushes the file to the disk and returns its SHA-256."""
    _flush(path)
    return _sha256(path)


def _save_weights(weights: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    for name, tensors in weights.items():
        contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        save_file(contiguous, folder / f"{name}.safetensors")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    weights: dict[str, dict[str, Tensor]]  # policy or critic name -> its weight state
    state: dict[str, Any]  # optimizers, positions, statistics: tensors and plain values
    manifest: dict[str, Any]
    own: dict[str, Any] | None = None  # this rank's own state, if it is not rank 0 and the checkpoint has it

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return int(self.manifest["environment"].get("ranks", 1))

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


class CheckpointStore:
    """The checkpoints of one run, one folder each, named by the number of finished iterations of the whole run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self,
        iteration: int,
        weights: Mapping[str, Mapping[str, Tensor]],
        state: dict[str, Any],
        about: dict[str, Any],
        rank: int = 0,
        meet: Callable[[], None] = _alone,
    ) -> Path:
        """Writes a complete checkpoint aside, flushes it, renames it, and then removes old ones.

        `about` is readable information for the manifest. A kill at any moment leaves either the old set of checkpoints
        or the new one; an earlier checkpoint of the same iteration is replaced only by the rename. Of several ranks all
        call it; those other than 0 add what they alone know, and `meet` returns when all have come to it.
        """
        final = self.folder / f"{_PREFIX}{iteration:06d}"
        aside, replaced = (self.folder / f"{state}{final.name}" for state in (".writing-", _REPLACED))
        try:
            if rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir()
            meet()
            if not aside.is_dir():
                raise UserError(f"rank {rank} does not see {aside}: a run's folder must be one that all nodes share.")
            # A handle, because torch's own file does not say why it could not be written.
            with (aside / _state_file(rank)).open("wb") as handle:
                torch.save(state if rank == 0 else _own_part(state), handle)
            _flush(aside / _state_file(rank))
            if rank == 0:
                _save_weights(weights, aside)
            meet()
            if rank == 0:
                self._finish(aside, final, replaced, {"iteration": iteration, **about})
            meet()
        except Exception as error:
            if rank == 0:  # another rank cannot know whether this one still writes
                shutil.rmtree(aside, ignore_errors=True)
            if not isinstance(error, OSError) and not is_full_disk(error):
                raise
            raise UserError(
                f"checkpoint {final} could not be written ({first_line(error)}); the last good one is kept. Free disk "
                "space and run the same command again."
            ) from error
        if rank == 0:
            self._remove_old(replaced)
        return final

    def _finish(self, aside: Path, final: Path, replaced: Path, about: dict[str, Any]) -> None:
        """The manifest, the flush and the rename of what all ranks have written aside."""
        hashes = {path.name: _finish_file(path) for path in sorted(aside.iterdir())}
        manifest = {"schema": SCHEMA, **about, "sha256": hashes, "environment": environment()}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2))
        _finish_file(aside / MANIFEST)
        sync_folder(aside)
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


def load_checkpoint(folder: Path, rank: int = 0) -> Checkpoint:
    """Reads and verifies a checkpoint, with the own state of one rank.

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
    for name, digest in manifest["sha256"].items():
        if not (folder / name).is_file() or _sha256(folder / name) != digest:
            raise UserError(
                f"{folder / name} is missing or damaged (its SHA-256 is not the manifest's). Remove the folder to go "
                "on from the checkpoint before it."
            )
    weights = {
        Path(name).stem: load_file(folder / name) for name in manifest["sha256"] if name.endswith(".safetensors")
    }
    state = torch.load(folder / _STATE, weights_only=True)
    has_own = rank > 0 and _state_file(rank) in manifest["sha256"]
    own = torch.load(folder / _state_file(rank), weights_only=True) if has_own else None
    return Checkpoint(weights, state, manifest, own)


def environment_changes(manifest: Mapping[str, Any]) -> list[str]:
    """Lines that say what changed since the checkpoint was written; empty if a bit-for-bit continuation is promised."""
    now = environment()
    return [
        f"{key}: {before} -> {now.get(key)}"
        for key, before in manifest["environment"].items()
        if now.get(key) != before
    ]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder against a second process; the lock dies with the process.

    Raises UserError if it is held, or if there can be no such folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"folder {str(folder)!r} cannot be written: {error.strerror}. Choose another.") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{folder} is in use by another process; wait for it or train into another folder."
            ) from error
        yield
