"""Markdown tables whose cells may hold any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MARKUP = {ord(character): f"&#{ord(character)};" for character in "&<>|`*_~[]\\"}
_LONGEST = 2000


def escape(text: str) -> str:
    """The text as the content of one Markdown table cell: markup inert, line breaks visible, nothing unprintable."""
    if len(text) > _LONGEST:
        text = text[:_LONGEST] + f" ... ({len(text) - _LONGEST} characters more)"
    lines = text.translate(_MARKUP).replace("\r\n", "\n").split("\n")
    printable = ("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line) for line in lines)
    return "<br>".join(printable)


class Markup(str):
    """A cell that is Markdown already."""


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; every cell is escaped, unless it is `Markup`."""
    lines = [headings, [Markup("---")] * len(headings), *rows]
    return [
        "| " + " | ".join(cell if isinstance(cell, Markup) else escape(cell) for cell in line) + " |" for line in lines
    ]
