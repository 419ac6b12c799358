"""Parameters of which a process may hold only a part: how to reach that part, and the whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without gradient and in the same memory: all of it if it is not sharded."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all of its parts, without gradient; of a sharded one every rank must ask."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def divided_like(tensor: Tensor, example: Tensor) -> Tensor:
    """A whole tensor that every rank has, sharded as `example` is. Nothing is sent."""
    if isinstance(example, DTensor) and not isinstance(tensor, DTensor):
        value = tensor.to(example.to_local())
        return distribute_tensor(value, example.device_mesh, example.placements, src_data_rank=None)
    return tensor.to(example)


def is_divided(tensor: Tensor) -> bool:
    """Whether the tensor is sharded."""
    return isinstance(tensor, DTensor)


def give_back(module: nn.Module) -> None:
    """Frees parameters of `module` that a forward pass has gathered, so that its parameters are the shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def is_zero(tensor: Tensor) -> bool:
    """Whether every element is 0, on all ranks; of a sharded tensor every rank must ask."""
    return not bool(whole(tensor).any())


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a model that its library says must not be split, or the members of its lists of layers."""
    named = {name for part in module.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    blocks = [part for part in module.modules() if type(part).__name__ in named]
    if not blocks:
        blocks = [part for layers in module.modules() if isinstance(layers, nn.ModuleList) for part in layers]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner and any(True for _ in block.parameters())]
