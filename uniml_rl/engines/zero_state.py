"""The moments of a module that ZeRO divides, as whole tensors per parameter, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uniml_rl.engines.stored_tensors import as_read
from uniml_rl.engines.zero_module import ZeroModule


def whole_of(part: ZeroModule, flats: Sequence[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Per trainable parameter the whole tensor whose elements lie in `flats`, tensors like `part.flats`; on the CPU."""
    tensors = []
    for index, size in enumerate(part.sizes):
        own = flats[0].new_zeros(size.numel())
        for fragment in part.fragments:
            if fragment.parameter == index:
                held = flats[fragment.flat][fragment.start : fragment.start + fragment.size]
                own[fragment.offset : fragment.offset + fragment.size] = held
        # A sum in which each rank fills only what it holds is a gather.
        tensors.append(sum_over_ranks(own).view(size).cpu())
    return tensors


def moments_of(part: ZeroModule, sum_over_ranks: Callable[[Tensor], Tensor]) -> list[dict[str, Any]]:
    """The optimizer's state of each trainable parameter, as torch's own `state_dict` has it; empty before a step."""
    states = [part.optimizer.state.get(flat, {}) for flat in part.flats]
    moments: list[dict[str, Any]] = [{} for _ in part.parameters]
    for key, value in states[0].items() if states else ():
        if isinstance(value, Tensor) and value.shape == part.flats[0].shape:
            whole = whole_of(part, [state[key] for state in states], sum_over_ranks)
        else:
            whole = [torch.tensor(float(value)) for _ in moments]
        for state, tensor in zip(moments, whole, strict=True):
            state[key] = tensor
    return moments


@torch.no_grad()
def put_moments(part: ZeroModule, moments: Sequence[Mapping[str, Any]]) -> None:
    """Restores what `moments_of` gave, by any engine and on any number of ranks.

    One count of steps holds for all parameters of a flat tensor: the largest that one of them has.
    """
    kept = {i: {key: as_read(value) for key, value in state.items()} for i, state in enumerate(moments) if state}
    for number, flat in enumerate(part.flats):
        part.optimizer.state.pop(flat, None)
        state: dict[str, Any] = {}
        for key in next(iter(kept.values()), {}):
            if key == "step":
                state[key] = _count_like(part.optimizer, max(float(each[key]) for each in kept.values()))
                continue
            state[key] = torch.zeros_like(flat)
            for fragment in part.fragments:
                if fragment.flat == number and fragment.parameter in kept:
                    value = kept[fragment.parameter][key].flatten()
                    held = value[fragment.offset : fragment.offset + fragment.size]
                    state[key][fragment.start : fragment.start + fragment.size] = held.to(flat)
        if state:
            part.optimizer.state[flat] = state


def _count_like(optimizer: torch.optim.Optimizer, steps: float) -> Any:
    """Torch counts in a tensor, DeepSpeed's Adam in an int."""
    return torch.tensor(steps) if isinstance(optimizer, torch.optim.AdamW) else int(steps)
