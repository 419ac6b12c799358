"""Markdown tables whose cells may hold any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "&<>|`*_~[]\\"}
_LONGEST = 2000


def escape(text: str) -> str:
    """The text as the content of one Markdown table cell: markup inert, line breaks visible, nothing unprintable."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + f" ... ({len(text) - _LONGEST} characters more)"
    return "<br>".join(printable_lines(text.translate(_MARKUP)))


def printable_lines(text: str) -> list[str]:
    """The lines of a text, with an escape in place of everything that a terminal would obey and not show."""
    lines = text.replace("\r\n", "\n").split("\n")
    return ["".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines]


class Markup(str):
    """A cell that is Markdown already."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; every cell is escaped, unless it is `Markup`."""
    lines = [headings, [Markup("---")] * len(headings), *rows]
    return [
        "| " + " | ".join(cell if isinstance(cell, Markup) else escape(cell) for cell in line) + " |" for line in lines
    ]
