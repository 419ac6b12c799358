"""Whether the ranks have read the same: with another file on one node their shares would not be those of one run."""

from __future__ import annotations

import hashlib

from modalities.errors import UserError
from uniml_rl.engines.base import Engine


def check_alike(engine: Engine, what: str, content: str) -> None:
    """Every rank calls it with its own content. Raises UserError on all of them if they differ."""
    digest = hashlib.sha256(content.encode()).hexdigest()
    said = [each.split() for each in engine.union_of_names([f"{engine.process} {digest}"])]
    first = next(each for rank, each in said if rank == "0")
    others = sorted({rank for rank, each in said if each != first})
    if others:
        raise UserError(
            f"rank {', '.join(others)} has read another version of {what} than rank 0; the nodes must read the same "
            "files."
        )
