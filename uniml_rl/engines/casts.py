"""Under autocast, what is kept of weights that are cast to half precision: of divided ones, nothing beyond a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

_LINEAR, _CONVOLUTIONS = F.linear, {"conv1d": F.conv1d, "conv2d": F.conv2d, "conv3d": F.conv3d}
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
    """Within it layers remember parameters for the backward pass, and not what autocast has made of them.

    Torch's own linear layers and convolutions keep the cast weight, and so, in half precision, all weights of a pass
    until its backward pass, though what they were cast from is divided again.
    """
    replaced = {"linear": _linear} | {name: partial(_convolution, own) for name, own in _CONVOLUTIONS.items()}
    before = {name: getattr(F, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def _saves_a_cast(weight: Tensor) -> bool:
    """Whether autocast casts the weight for a pass that is followed by a backward pass."""
    is_cast = torch.is_autocast_enabled(weight.device.type) and weight.dtype == torch.float32
    return is_cast and torch.is_grad_enabled() and not isinstance(weight, DTensor)


def _half(input: Tensor) -> Tensor:
    return input.to(torch.get_autocast_dtype(input.device.type))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if input.ndim < 2 or not _saves_a_cast(weight):
        return _LINEAR(input, weight, bias)
    apply: Any = _RememberingLinear.apply
    output: Tensor = apply(_half(input), weight, bias)
    return output


def _convolution(
    own: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    if isinstance(padding, str) or not _saves_a_cast(weight):
        return own(input, weight, bias, stride, padding, dilation, groups)
    sizes = [[each] * (weight.ndim - 2) if isinstance(each, int) else [*each] for each in (stride, padding, dilation)]
    apply: Any = _RememberingConvolution.apply
    output: Tensor = apply(_half(input), weight, bias, own, (*sizes, groups))
    return output


class _RememberingLinear(torch.autograd.Function):
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


class _RememberingConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, own: Callable[..., Tensor], shape: tuple[Any, ...]
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.shape, ctx.bias_sizes = shape, None if bias is None else bias.shape
        return own(input, weight, bias, *shape)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (input, weight), (stride, padding, dilation, groups) = ctx.saved_tensors, ctx.shape
        of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient,
            input,
            weight.to(gradient.dtype),
            ctx.bias_sizes,
            stride,
            padding,
            dilation,
            False,
            [0] * len(stride),
            groups,
            ctx.needs_input_grad[:3],
        )
        of_parameters = (None if each is None else each.to(weight.dtype) for each in (of_weight, of_bias))
        return (of_input, *of_parameters, None, None)
