"""Micro-batches of an optimizer step, the same number on every rank where the engine needs that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from modalities.base import Cut
from uniml_rl.engines.base import Engine


@dataclass(frozen=True)
class Pass:
    """A micro-batch, and whether it counts: one that does not is computed for the other ranks' sake alone."""

    cut: Cut
    counts: bool = True


def passes(cuts: list[Cut], engine: Engine, all_cuts: Callable[[], list[Cut]]) -> list[Pass]:
    """The rank's own cuts and, if the engine's ranks must compute together, as many as the rank with the most.

    Cuts of the same segment and first step run the same modules in the same way, so they are filled up, and follow each
    other, kind by kind. A rank that has none of a kind repeats one of `all_cuts`, the cuts of all that it rolled out.
    """
    if not engine.passes_together:
        return [Pass(cut) for cut in cuts]
    own: dict[str, list[Cut]] = {}
    for cut in cuts:
        own.setdefault(_kind(cut), []).append(cut)
    kinds = engine.union_of_names(list(own))
    counts = torch.tensor([[len(own.get(kind, [])) for kind in kinds]], dtype=torch.long)
    result = []
    for kind, most in zip(kinds, engine.gather_rows(counts).amax(0).tolist(), strict=True):
        mine = own.get(kind, [])
        stand_in = mine[0] if mine else _most_like(kind, all_cuts())
        result += [Pass(cut) for cut in mine] + [Pass(stand_in, counts=False)] * (most - len(mine))
    return result


def _kind(cut: Cut) -> str:
    return f"{cut.segment:03d} {cut.steps.start or 0:06d}"


def _most_like(kind: str, cuts: list[Cut]) -> Cut:
    same = [cut for cut in cuts if _kind(cut) == kind]
    return (same or [cut for cut in cuts if _kind(cut)[:3] == kind[:3]] or cuts)[0]
