"""Checkpoints: written aside and then renamed, hashed, never a pickle; and the lock of the run's folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modalities.errors import UserError

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
    }


def sync_folder(folder: Path) -> None:
    """Makes the folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finish_file(path: Path) -> str:
    """Flushes the file to the disk and returns its SHA-256."""
    with path.open("rb") as handle:
        os.fsync(handle.fileno())
    return _sha256(path)


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


class CheckpointStore:
    """The checkpoints of one run, one folder each, named by the number of finished iterations of the whole run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(
        self, iteration: int, weights: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any], about: dict[str, Any]
    ) -> Path:
        """Writes a complete checkpoint aside, flushes it, renames it, and then removes old ones.

        `about` is readable information for the manifest. A kill at any moment leaves either the old set of checkpoints
        or the new one; an earlier checkpoint of the same iteration is replaced only by the rename.
        """
        final = self.folder / f"{_PREFIX}{iteration:06d}"
        aside, replaced = (self.folder / f"{state}{final.name}" for state in (".writing-", _REPLACED))
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        try:
            for name, tensors in weights.items():
                contiguous = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
                save_file(contiguous, aside / f"{name}.safetensors")
            torch.save(state, aside / _STATE)
            hashes = {path.name: _finish_file(path) for path in sorted(aside.iterdir())}
            manifest = {
                "schema": SCHEMA,
                "iteration": iteration,
                "sha256": hashes,
                "environment": environment(),
                **about,
            }
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=2))
            _finish_file(aside / MANIFEST)
            sync_folder(aside)
            if final.exists():  # a stage that ended without an iteration
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            aside.rename(final)
            sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(
                f"checkpoint {final} could not be written ({error.strerror or error}); the last good one is kept. "
                "Free disk space and run the same command again."
            ) from error
        for old in self.complete()[: -self.keep]:
            # Renamed first, so that a kill in between leaves nothing that looks like a checkpoint.
            old.rename(self.folder / f"{_REMOVED}{old.name}")
        for path in (*self.folder.glob(f"{_REMOVED}*"), replaced):
            shutil.rmtree(path, ignore_errors=True)
        return final

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


def load_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint; raises UserError that names the file if a hash or the schema does not fit."""
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
    return Checkpoint(weights, state, manifest)


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
