"""Under autocast, what is kept of weights that are cast to half precision: of divided ones, nothing beyond a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

_LINEAR = F.linear
"""Torch's own, which a pass replaces."""


@contextmanager
def casts_kept() -> Iterator[None]:
    """Autocast casts whole weights once, and not for every token."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()


@contextmanager
def saving_no_casts() -> Iterator[None]:
    """Within it linear layers remember parameters for the backward pass, and not what autocast has made of them.

    Torch's own keeps the cast weight, and so all weights of a pass in half precision until its backward pass, though
    what they were cast from is divided again.
    """
    before, F.linear = F.linear, _linear
    try:
        yield
    finally:
        F.linear = before


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    device = weight.device.type
    is_cast = torch.is_autocast_enabled(device) and weight.dtype == torch.float32 and input.ndim > 1
    if not is_cast or not torch.is_grad_enabled() or isinstance(weight, DTensor):
        return _LINEAR(input, weight, bias)
    apply: Any = _Remembering.apply
    output: Tensor = apply(input.to(torch.get_autocast_dtype(device)), weight, bias)
    return output


class _Remembering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _LINEAR(input, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        return (
            gradient @ weight.to(gradient.dtype) if of_input else None,
            (rows.T @ input.flatten(0, -2)).to(weight.dtype) if of_weight else None,
            rows.sum(0).to(weight.dtype) if of_bias else None,
        )
