"""Tensor parallelism: the ranks that compute the same samples together, each with its part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from modalities.shards import local_part
from modalities.tensor_parallel import has_partial_gradient
from uniml_rl.engines.base import Value
from uniml_rl.engines.buckets import sum_gradients
from uniml_rl.engines.groups import row_of
from uniml_rl.engines.ranks import exchanging

AXIS = "tensor"
"""Name of the mesh's last dimension, along which these ranks lie."""


class TensorGroup:
    """The ranks along the last dimension of a mesh; `samples` are those that hold the same part of the weights."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh[AXIS]
        self.group: dist.ProcessGroup = self.mesh.get_group()
        self.samples = row_of(mesh.mesh.flatten(0, -2).T)

    def divide(self, modules: Iterable[nn.Module]) -> None:
        """By the modules' own plans; what has none, as the head of a critic, stays whole on each rank."""
        for module in modules:
            if hasattr(module, "divide_heads"):
                with exchanging("dividing weights"):
                    cast(Any, module).divide_heads(self.mesh)

    @staticmethod
    def reduce(parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of which each of these ranks has a share although all hold the parameter: some biases."""
        for parameter in parameters:
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                with exchanging("summing gradients"):
                    parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def agree(self, modules: Iterable[nn.Module]) -> None:
        """Makes the gradients of parameters that all hold whole the same to the last bit, so that they stay alike.

        Each rank has computed all of such a gradient, but for modules that see only the rank's own heads.
        """
        found = {
            id(parameter): (local_part(parameter.grad), has_partial_gradient(part))
            for module in modules
            for part in module.modules()
            for parameter in part.parameters(recurse=False)
            if parameter.grad is not None and not _is_divided(parameter)
        }
        sum_gradients([gradient for gradient, _ in found.values()], self.group)
        for gradient, is_partial in found.values():
            if not is_partial:
                gradient.div_(self.mesh.size())

    def sum_of_squares(self, parameters: Iterable[Tensor], tensors: Iterable[Tensor]) -> Tensor:
        """[] float64: of all elements of tensors of which each rank has parts as of `parameters`, or all."""
        whole, parts = torch.zeros(2, dtype=torch.float64, device=self.mesh.device_type).unbind()
        for parameter, tensor in zip(parameters, tensors, strict=True):
            (parts if _is_divided(parameter) else whole).add_(tensor.double().square().sum())
        with exchanging("summing numbers"):
            dist.all_reduce(parts, group=self.group)
        return whole + parts

    def from_first(self, compute: Callable[[], Value]) -> Value:
        """What the first of these ranks has computed, which alone does."""
        value = [compute() if self.mesh.get_local_rank() == 0 else None]
        with exchanging("handing on results"):
            dist.broadcast_object_list(value, group=self.group, group_src=0)
        return value[0]  # type: ignore[return-value]


def _is_divided(parameter: Tensor) -> bool:
    """Along this dimension, whatever else divides it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(name == AXIS and place.is_shard() for name, place in zip(names, parameter.placements, strict=True))
