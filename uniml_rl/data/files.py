"""Reads records from text files and JSON lines, and finds the files that a path names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """One record and the place that an error message names."""

    fields: Mapping[str, Any]
    place: str


def read_records(paths: str | list[str], format: str) -> list[Record]:
    """All records of all files, in order. Raises UserError that names the file and place."""
    raise NotImplementedError
