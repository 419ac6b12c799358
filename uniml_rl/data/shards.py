"""Webdataset shards: tar files whose members of one key (`000017.json`, `000017.png`) make one record."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modalities.errors import UserError

_TEXT = ("txt", "text", "caption")


@dataclass(frozen=True)
class RawRecord:
    """One record and the place that an error message names."""

    fields: Mapping[str, Any]
    place: str
    file: Path = Path()
    """The file that holds it; names of other files in its fields are relative to that."""


@dataclass(frozen=True)
class StoredBytes:
    """A member of a shard that was not read: an image, a sound."""

    shard: Path
    offset: int
    length: int
    name: str

    def read(self) -> bytes:
        """The member's bytes. Raises UserError if the shard has become shorter since it was indexed."""
        with self.shard.open("rb") as handle:
            handle.seek(self.offset)
            content = handle.read(self.length)
        if len(content) < self.length:
            raise UserError(
                f"{self.shard}: member {self.name!r} at byte {self.offset} is cut off; fetch the shard again."
            )
        return content


def read_shard(path: Path) -> Iterator[RawRecord]:
    """The records of an uncompressed tar shard, in order.

    A member's key is its path up to the first dot of the file name, its ending the rest. Fields of a record: those of
    its `.json` object, the text of `.txt`, `.text` and `.caption` members under their ending, every other member as
    `StoredBytes` under its ending, and `__key__`. Raises UserError that names the shard and the byte or member.
    """
    key: str | None = None
    fields: dict[str, Any] = {}
    for member, content in _members(path):
        folder, _, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        if not stem or not ending:
            continue  # by webdataset's convention these belong to no record
        member_key = f"{folder}/{stem}" if folder else stem
        if member_key != key:
            if key is not None:
                yield RawRecord(fields, f"{path}, record {key!r}", path)
            key, fields = member_key, {"__key__": member_key}
        place = f"{path}, member {member.name!r} at byte {member.offset_data}"
        for name, value in _fields(ending.lower(), content, place).items():
            if name in fields:
                raise UserError(f"{place}: its record already has a field {name!r}; keys must be unique in a shard.")
            fields[name] = value
    if key is not None:
        yield RawRecord(fields, f"{path}, record {key!r}", path)


def _fields(ending: str, content: StoredBytes, place: str) -> dict[str, Any]:
    if ending != "json" and ending not in _TEXT:
        return {ending: content}
    try:
        text = content.read().decode()
        if ending != "json":
            return {ending: text.strip()}
        fields = json.loads(text)
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError
        raise UserError(f"{place}: not valid UTF-8 {ending}: {error}") from None
    if not isinstance(fields, dict):
        raise UserError(f"{place}: expected a JSON object, found {type(fields).__name__}.")
    return fields


def _members(path: Path) -> Iterator[tuple[tarfile.TarInfo, StoredBytes]]:
    """The regular files of a tar, payloads skipped; also finds damage that `tarfile` takes for the archive's end."""
    with path.open("rb") as handle:
        if handle.read(2) == b"\x1f\x8b":
            raise UserError(f"{path} is compressed, so records cannot be read at random; unpack it with gunzip first.")
        length = handle.seek(0, 2)
        handle.seek(0)
        position = 0
        try:
            with tarfile.open(fileobj=handle, mode="r:") as archive:
                while (member := archive.next()) is not None:
                    position = archive.offset
                    if position > length:
                        raise UserError(
                            f"{path}: cut off in member {member.name!r} at byte {member.offset_data}: the file has "
                            f"{length} bytes, the member needs {position}. Fetch the shard again."
                        )
                    if member.isfile():
                        yield member, StoredBytes(path, member.offset_data, member.size, member.name)
                    archive.members.clear()  # type: ignore[attr-defined]  # the index would be kept twice
        except tarfile.TarError as error:
            raise UserError(f"{path}: not a readable tar at byte {position}: {error}. Fetch the shard again.") from None
        handle.seek(position)
        end = handle.read(tarfile.BLOCKSIZE)
        if len(end) < tarfile.BLOCKSIZE or any(end):
            raise UserError(
                f"{path}: {'cut off' if len(end) < tarfile.BLOCKSIZE else 'damaged'} at byte {position}: expected a "
                "member or the archive's end. Fetch the shard again."
            )
