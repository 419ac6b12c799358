"""The folder of a run: who holds it, and which configuration it belongs to."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from modalities.errors import UserError
from uniml_rl.build import RunConfig
from uniml_rl.config import LoadedConfig, difference, load_yaml, resolved_dump, validate

CONFIG_FILE = "config.yaml"
_LOCK, _METRICS = ".lock", "metrics.jsonl"


def folder_of(config: RunConfig, folder: str | Path | None = None) -> Path:
    """Where the run is written."""
    return Path(folder or config.folder or Path("runs") / config.name)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run folder against a second process; the lock dies with the process.

    A run that is refused before it has claimed the folder (`save_config`) leaves nothing in it. Raises UserError if the
    folder is held, or if there can be no such folder.
    """
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    before = {name for name in (_LOCK, _METRICS) if (folder / name).exists()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / _LOCK).open("w")
    except OSError as error:
        raise UserError(f"folder {str(folder)!r} cannot be written: {error.strerror}. Choose another.") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"{folder} is in use by another process; wait for it or train into another folder."
            ) from error
        try:
            yield
        except BaseException:
            if not (folder / CONFIG_FILE).exists():
                _leave(folder, {_LOCK, _METRICS} - before, new)
            raise


def _leave(folder: Path, files: set[str], folders: list[Path]) -> None:
    for name in files:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # somebody else has put something there
        for path in folders:
            path.rmdir()


def save_config(folder: Path, config: RunConfig) -> None:
    """Saves the resolved configuration of a run that has passed every check: a wrong one claims no folder."""
    saved = folder / CONFIG_FILE
    aside = saved.with_suffix(".writing")
    aside.write_text(resolved_dump(config), encoding="utf-8")
    aside.rename(saved)


def engine_changes(folder: Path, config: RunConfig) -> list[str]:
    """A line for each key of the engine that the run had otherwise when it was last started."""
    saved = folder / CONFIG_FILE
    if not saved.exists():
        return []
    old = load_yaml(saved).values.get("engine", {})
    return difference({"engine": old}, {"engine": config.model_dump(mode="json", by_alias=True)["engine"]})


def _as_one_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run this one: not where it is written, nor how its work is divided, but what it rounds to."""
    engine = config.get("engine") or {}
    return {**config, "folder": None, "engine": {"precision": engine.get("precision", "fp32")}}


def check_folder(folder: Path, config: RunConfig, loaded: LoadedConfig) -> None:
    """Raises UserError with the differences, and where they are written, if the folder holds a run of another
    configuration. A run may go on with another engine, in the same precision.
    """
    saved = folder / CONFIG_FILE
    if not saved.exists():
        return
    old = load_yaml(saved).values
    with suppress(UserError):  # with the defaults of keys that an earlier version did not have
        old = validate(RunConfig, load_yaml(saved)).model_dump(mode="json", by_alias=True)
    new = config.model_dump(mode="json", by_alias=True)
    lines = difference(_as_one_run(old), _as_one_run(new))
    if lines:
        listed = "\n  ".join(f"{_where(loaded, line.partition(':')[0])}: {line}" for line in lines)
        raise UserError(
            f"{folder} holds a run of another configuration; {loaded.path} differs from it by\n  {listed}\n"
            f"Either change {loaded.path} back to continue that run, or start a new one with `--folder` and another "
            "name."
        )


def _where(loaded: LoadedConfig, key: str) -> str:
    """Where a key, as an override spells it, was written, or the nearest block around it."""
    written = {loaded.spell(path): where for path, where in loaded.locations.items()}
    while key not in written:
        key = key.rpartition(".")[0]
    return written[key]
