"""Finds the files that a path names, and reads their records."""

from __future__ import annotations

import codecs
import difflib
import glob
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from braceexpand import braceexpand

from modalities.errors import UserError, did_you_mean
from modalities.sources import assets
from uniml_rl.data.shards import RawRecord, read_shard

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".tar": "webdataset"}


def expand(patterns: str | list[str]) -> list[Path]:
    """The files that the patterns name: braces, then wildcards, in sorted order for each pattern.

    Raises UserError for a pattern that names no file; the message offers the nearest file that exists.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            names = list(braceexpand(pattern))
        except ValueError:
            raise UserError(
                f"path {pattern!r}: a brace is open; write shard-{{000..011}}.tar or {{a,b}}.txt."
            ) from None
        for name in names:
            path = _inside_bundled(name)
            found = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not found:
                raise UserError(f"path {name!r}: no such file{_nearest(path)}")
            for file in found:
                if file.is_dir():
                    raise UserError(f"path {name!r} is a folder; name its files, for example {str(file / '*.txt')!r}.")
            files += found
    return files


def _inside_bundled(name: str) -> Path:
    if name.startswith("bundled:"):
        return assets() / name.removeprefix("bundled:")
    return Path(name).expanduser()


def _nearest(path: Path) -> str:
    """What to try instead of a missing path: a similar name where the path stops existing."""
    missing = path.absolute()
    while not missing.parent.exists():
        missing = missing.parent
    siblings = sorted(entry.name for entry in missing.parent.iterdir()) if missing.parent.is_dir() else []
    close = difflib.get_close_matches(missing.name, siblings, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {str(missing.parent / close[0])!r}?"
    shown = ", ".join(siblings[:8]) + (", ..." if len(siblings) > 8 else "")
    return f"; {missing.parent} holds {shown or 'nothing'}."


def read_records(paths: str | list[str], format: str = "auto") -> list[RawRecord]:
    """All records of all files in order; `format` is auto, txt, jsonl or webdataset.

    Raises UserError that names the file and the line or member for anything that cannot be read.
    """
    records: list[RawRecord] = []
    for path in expand(paths):
        chosen = _format_of(path) if format == "auto" else format
        found = list(_READERS[chosen](path))
        if not found:
            raise UserError(f"{path} holds no prompts: it has no record, or only blank lines.")
        records += found
    return records


def _format_of(path: Path) -> str:
    if path.suffix not in FORMATS:
        hint = {".json": "; write one object per line", ".gz": "; unpack it first"}
        raise UserError(
            f"{path}: the ending {path.suffix!r} says no format; set `format`, or use one of {', '.join(FORMATS)}"
            f"{hint.get(path.suffix) or did_you_mean(path.suffix, FORMATS)}"
        )
    return FORMATS[path.suffix]


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of every line that is not blank."""
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            place = f"{path}:{number}"
            try:
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode().strip()
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{place}: not UTF-8 text ({error.reason} at byte {error.start} of the line)."
                ) from None
            if text:
                yield place, text


def read_text(path: Path) -> Iterator[RawRecord]:
    """One record `{"text": line}` per line; blank lines are skipped."""
    for place, text in _lines(path):
        yield RawRecord({"text": text}, place, path)


def read_json_lines(path: Path) -> Iterator[RawRecord]:
    """One record per line, which must be a JSON object; blank lines are skipped."""
    for place, text in _lines(path):
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            breaks_off = error.pos >= len(text) or error.msg.startswith("Unterminated")
            torn = "; the line breaks off, so the file may be cut" if breaks_off else ""
            raise UserError(
                f"{place}: not JSON, column {error.colno}: {error.msg}{torn}. Line: {text[:80]!r}"
            ) from None
        if not isinstance(fields, dict):
            raise UserError(f"{place}: expected a JSON object, found {type(fields).__name__}: {text[:80]!r}")
        yield RawRecord(fields, place, path)


_READERS: dict[str, Callable[[Path], Iterator[RawRecord]]] = {
    "txt": read_text,
    "jsonl": read_json_lines,
    "webdataset": read_shard,
}
