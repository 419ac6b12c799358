"""The moments of a module that ZeRO divides, as whole tensors per parameter, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uniml_rl.engines.stored_tensors import as_read
from uniml_rl.engines.zero_module import ZeroModule


def whole_of(part: ZeroModule, flats: Sequence[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Per trainable parameter the whole tensor whose elements lie in `flats`, tensors like `part.flats`."""
    for index, size in enumerate(part.sizes):
        own = flats[0].new_zeros(size.numel())
        for fragment in part.fragments:
            if fragment.parameter == index:
                held = flats[fragment.flat][fragment.start : fragment.start + fragment.size]
                own[fragment.offset : fragment.offset + fragment.size] = held
        # A sum in which each rank fills only what it holds is a gather.
        yield sum_over_ranks(own).view(size)


def moments_of(
    part: ZeroModule, sum_over_ranks: Callable[[Tensor], Tensor], keep: Callable[[Tensor], Tensor]
) -> list[dict[str, Any]]:
    """The optimizer's state of each trainable parameter, as torch's own `state_dict` has it; empty before a step.

    Whole tensors exist one at a time; `keep` says what stays of each.
    """
    states = [part.optimizer.state.get(flat, {}) for flat in part.flats]
    moments: list[dict[str, Any]] = [{} for _ in part.parameters]
    for key, value in states[0].items() if states else ():
        if isinstance(value, Tensor) and value.shape == part.flats[0].shape:
            for state, tensor in zip(moments, whole_of(part, [s[key] for s in states], sum_over_ranks), strict=True):
                state[key] = keep(tensor)
        else:
            for state in moments:
                state[key] = torch.tensor(float(value))
    return moments


@torch.no_grad()
def put_moments(part: ZeroModule, moments: Sequence[Mapping[str, Any]]) -> None:
    """Restores what `moments_of` gave, by any engine and on any number of ranks; reads one tensor at a time.

    One count of steps holds for all parameters of a flat tensor: the largest that one of them has.
    """
    kept = {index: state for index, state in enumerate(moments) if state}
    keys = list(next(iter(kept.values()), {}))
    for flat in part.flats:
        part.optimizer.state.pop(flat, None)
        state = {key: torch.zeros_like(flat) for key in keys if key != "step"}
        if "step" in keys:
            state["step"] = torch.tensor(max(float(as_read(each["step"])) for each in kept.values()))
        if state:
            part.optimizer.state[flat] = state
    for index, each in kept.items():
        for key in keys:
            if key != "step":
                value = as_read(each[key]).flatten()
                for fragment in part.fragments:
                    if fragment.parameter == index:
                        held = value[fragment.offset : fragment.offset + fragment.size]
                        own = part.optimizer.state[part.flats[fragment.flat]][key]
                        own[fragment.start : fragment.start + fragment.size] = held
