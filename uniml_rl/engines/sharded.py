"""PyTorch's FSDP2 on several ranks (`shard: fsdp | hsdp`): each holds a part of weights, gradients and moments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from modalities.opening import put_undivided
from modalities.shards import blocks_of, compute_rows_alone, give_back, is_divided
from uniml_rl.engines.base import PRECISIONS, StepReport
from uniml_rl.engines.casts import casts_kept, saving_no_casts
from uniml_rl.engines.distributed import DistributedEngine
from uniml_rl.engines.lockstep import Lockstep
from uniml_rl.engines.ranks import exchanging
from uniml_rl.engines.tensor_group import TensorGroup


class ShardedEngine(DistributedEngine):
    """Fully sharded data parallelism over a mesh whose last dimension, "shard", is what a module is divided over; with
    `tensor`, what each rank of a tensor group holds of it.

    Parameters are gathered for each forward and backward pass, block by block, and gradients are reduced (summed, since
    losses are normalised over all ranks already) and scattered in each backward pass. So all ranks must run equally
    many passes of the same modules in training. For sampling, weights are either gathered once (`gathered`), or each
    pass gathers them anew and the ranks keep each other company (`sharded`).
    """

    passes_together = True
    divides_weights = True

    def __init__(
        self,
        device: str,
        mesh: DeviceMesh,
        gathered_rollouts: bool,
        precision: str = "fp32",
        max_skipped_steps: int = 5,
        tensor: TensorGroup | None = None,
    ) -> None:
        super().__init__(device, precision, max_skipped_steps, tensor)
        self.mesh = mesh
        self.gathered_rollouts = gathered_rollouts

    def _divide(self, modules: Mapping[str, nn.Module]) -> None:
        super()._divide(modules)
        for module in modules.values():
            shard(module, self.mesh)
            put_undivided(module, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype == torch.float32 else self._casting(dtype)

    @contextmanager
    def _casting(self, dtype: torch.dtype) -> Iterator[None]:
        # Autocast's cache would keep a cast copy of every divided weight that a pass has gathered.
        with torch.autocast(self.device.type, dtype=dtype, cache_enabled=False), saving_no_casts():
            yield

    @contextmanager
    def sampling(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        roots: list[FSDPModule] = [module for module in modules if isinstance(module, FSDPModule)]
        for root in roots:
            root._get_fsdp_state()._lazy_init()  # else only the first forward pass says which module is the root
        with self._gathered(roots) if self.gathered_rollouts else self._together(roots):
            yield

    @contextmanager
    def _together(self, roots: list[FSDPModule]) -> Iterator[None]:
        """Weights that each pass gathers anew, for the ranks that run it and for the others."""
        for root in roots:
            root.set_reshard_after_forward(True)
        units = [cast(list[nn.Module], units_of(root)) for root in roots]
        try:
            with Lockstep(units, _unshard, _reshard, self.sum_over_ranks).together():
                yield
        finally:
            for root in roots:
                root.set_reshard_after_forward(False, recurse=False)
                root.reshard()

    @contextmanager
    def _gathered(self, roots: list[FSDPModule]) -> Iterator[None]:
        """Whole weights: one gather of each parameter, whatever the number of passes."""
        units = [unit for root in roots for unit in units_of(root)]
        with exchanging("gathering weights"):
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
        try:
            with casts_kept():
                yield
        finally:
            for root in roots:
                for unit in units_of(root):
                    unit.set_reshard_after_forward(unit is not root, recurse=False)
                    unit.reshard()

    def backward(self, loss: Tensor) -> None:
        # Checkpointed layers compute their forward pass again there, and must save what they saved before.
        with exchanging("summing gradients"), saving_no_casts():
            super().backward(loss)

    def step(self, iteration: int) -> StepReport:
        for module in self._modules.values():
            give_back(module)
        if whole := [p for name in self._optimizers for p in self._parameters(name) if not is_divided(p)]:
            self._sum_gradients(whole)
        return super().step(iteration)

    def _total_norm(self, parameters: list[nn.Parameter], tensors: list[Tensor]) -> float:
        if self.mesh.get_local_rank("shard") > 0:  # what all hold whole counts once
            tensors = [tensor for parameter, tensor in zip(parameters, tensors, strict=True) if is_divided(parameter)]
            parameters = [parameter for parameter in parameters if is_divided(parameter)]
        if self.tensor is None:
            squares = [tensor.double().square().sum() for tensor in tensors]
            total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        else:
            total = self.tensor.sum_of_squares(parameters, tensors)
        with exchanging("summing numbers"):
            dist.all_reduce(total, group=self.mesh.get_group("shard"))
        return math.sqrt(float(total)) if total >= 0 else math.nan


def _unshard(unit: nn.Module) -> None:
    cast(FSDPModule, unit).unshard()


def _reshard(unit: nn.Module) -> None:
    cast(FSDPModule, unit).reshard()


def units_of(root: FSDPModule) -> list[FSDPModule]:
    """The root and the blocks in it whose parameters are gathered together."""
    return [module for module in cast(nn.Module, root).modules() if isinstance(module, FSDPModule)]


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divides the parameters of a module over the mesh, each of its blocks and then the rest as a unit.

    Single numbers (the scale of a CLIP's logits) stay whole: there is nothing to divide.
    """
    numbers = {parameter for parameter in module.parameters() if parameter.ndim == 0}
    for block in blocks_of(module):
        fully_shard(block, mesh=mesh, ignored_params=numbers)
    root = fully_shard(module, mesh=mesh, ignored_params=numbers)
    for unit in units_of(root):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        # What is left in the root is needed again at once in the backward pass.
        unit.set_reshard_after_forward(unit is not root, recurse=False)
    compute_rows_alone(module)
