"""Parameters of which a process may hold only a part: how to reach that part, and the whole.

Two kinds are known: DTensors, which PyTorch's FSDP makes, and parameters under DeepSpeed's ZeRO-3, whose data are empty
between passes: `ds_tensor` is the part, flat, equally long on all ranks and padded at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor


class ZeroShard(Tensor):
    """What a process holds of a tensor that is divided as ZeRO-3 divides it; only functions of this file read it."""

    whole_shape: torch.Size
    group: Any


def _zero_shard(part: Tensor, whole_shape: torch.Size, group: Any) -> ZeroShard:
    shard = part.as_subclass(ZeroShard)
    shard.whole_shape, shard.group = whole_shape, group
    return shard


def shard_of(tensor: Tensor) -> Tensor:
    """The tensor without gradient, in the same memory; of a parameter under ZeRO-3 its shard."""
    if hasattr(tensor, "ds_tensor"):
        divided: Any = tensor
        return _zero_shard(divided.ds_tensor.detach(), divided.ds_shape, divided.ds_process_group)
    return tensor if isinstance(tensor, ZeroShard) else tensor.detach()


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, without gradient and in the same memory: all of it if it is not sharded."""
    shard = shard_of(tensor)
    return shard.to_local() if isinstance(shard, DTensor) else shard.as_subclass(Tensor)


def whole(tensor: Tensor) -> Tensor:
    """The tensor with all of its parts, without gradient; of a sharded one every rank must ask."""
    shard = shard_of(tensor)
    if isinstance(shard, DTensor):
        return shard.full_tensor()
    if not isinstance(shard, ZeroShard):
        return shard
    part = local_part(shard)
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(shard.group))]
    dist.all_gather(parts, part, group=shard.group)
    return torch.cat(parts)[: shard.whole_shape.numel()].view(shard.whole_shape)


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape of the tensor with all of its parts."""
    shard = shard_of(tensor)
    return shard.whole_shape if isinstance(shard, ZeroShard) else shard.shape


def divided_like(tensor: Tensor, example: Tensor) -> Tensor:
    """A whole tensor that every rank has, sharded as `example` is. Nothing is sent."""
    shard = shard_of(example)
    if isinstance(shard, DTensor) and not isinstance(tensor, DTensor):
        return _distributed(tensor.to(shard.to_local()), shard.device_mesh, shard.placements)
    if not isinstance(shard, ZeroShard):
        return tensor.to(shard)
    part = local_part(shard)
    if isinstance(tensor, ZeroShard):
        return _zero_shard(local_part(tensor).to(part), shard.whole_shape, shard.group)
    own, flat = torch.zeros_like(part), tensor.flatten()[dist.get_rank(shard.group) * part.numel() :][: part.numel()]
    own[: flat.numel()] = flat
    return _zero_shard(own, shard.whole_shape, shard.group)


def rows_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A whole tensor that every rank has, sharded evenly along its longest dimension; a number stays whole."""
    shape = list(tensor.shape)
    return _distributed(tensor, mesh, [Shard(shape.index(max(shape)))]) if shape else tensor.clone()


def _distributed(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """In memory of its own: what torch cuts out of the tensor keeps all of it."""
    divided = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return divided.clone(memory_format=torch.contiguous_format)


def copy_of(tensor: Tensor) -> Tensor:
    """A tensor of its own with the same values, sharded in the same way."""
    shard = shard_of(tensor)
    if isinstance(shard, ZeroShard):
        return _zero_shard(local_part(shard).clone(), shard.whole_shape, shard.group)
    return shard.clone()


def is_divided(tensor: Tensor) -> bool:
    """Whether the tensor is sharded."""
    return isinstance(shard_of(tensor), DTensor | ZeroShard)


def give_back(module: nn.Module) -> None:
    """Frees parameters of `module` that a forward pass has gathered, so that its parameters are the shards again."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    divided: list[Any] = [parameter for parameter in module.parameters() if hasattr(parameter, "ds_tensor")]
    for parameter in divided:
        if parameter.ds_status.name == "AVAILABLE":
            parameter.ds_active_sub_modules.clear()
            parameter.partition()


@torch.no_grad()
def is_zero(tensor: Tensor) -> bool:
    """Whether every element is 0, on all ranks; of a sharded tensor every rank must ask."""
    return not bool(whole(tensor).any())


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises FloatingPointError that names tensors of which this process's part holds NaN or infinity."""
    # Two numbers instead of a mask: weights may fill the memory.
    extremes = {
        key: part.aminmax()
        for key, part in ((key, local_part(tensor)) for key, tensor in tensors.items())
        if part.numel() and part.is_floating_point()
    }
    wrong = sorted(key for key, (low, high) in extremes.items() if not (low.isfinite() and high.isfinite()))
    if wrong:
        raise FloatingPointError(f"{', '.join(wrong[:3])}{' ...' if len(wrong) > 3 else ''}: not finite.")


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a model that its library says must not be split, or the members of its lists of layers."""
    named = {name for part in module.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    blocks = [part for part in module.modules() if type(part).__name__ in named]
    if not blocks:
        blocks = [part for layers in module.modules() if isinstance(layers, nn.ModuleList) for part in layers]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner and any(True for _ in block.parameters())]


def compute_rows_alone(module: nn.Module) -> None:
    """Makes each pass run every block once, whatever the rank's own rows are."""
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "shares_prompts")]
    for part in parts:
        part.shares_prompts = False
