"""PyTorch on several ranks: what `replicated.py` and `sharded.py` share. Losses are sums over ranks, never means."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.shards import is_divided, local_part, whole
from uniml_rl.engines.base import StepReport, Value
from uniml_rl.engines.buckets import sum_gradients
from uniml_rl.engines.groups import patient_group
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.ranks import exchanging
from uniml_rl.engines.tensor_group import TensorGroup
from uniml_rl.engines.torch_engine import TorchEngine


class DistributedEngine(TorchEngine):
    """Over torch's process group, which exists already; with `tensor` its ranks share samples by groups."""

    def __init__(
        self,
        device: str,
        precision: str = "fp32",
        max_skipped_steps: int = 5,
        tensor: TensorGroup | None = None,
    ) -> None:
        super().__init__(device, precision, max_skipped_steps)
        self.tensor = tensor
        self.samples = None if tensor is None else tensor.samples
        self.rank, self.world_size = dist.get_rank(self.samples), dist.get_world_size(self.samples)
        self.divides_weights = self.divides_weights or tensor is not None
        self._modules: dict[str, nn.Module] = {}
        self._digest = b""
        self._patient = patient_group()

    @property
    def process(self) -> int:
        return dist.get_rank()

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        self._modules = {
            f"{name}.{part}": module for name, (modules, _) in optimizers.items() for part, module in modules.items()
        }
        if self.divides_weights:
            fresh = {name: m for name, m in self._modules.items() if not any(map(is_divided, m.parameters()))}
            self._digest = digest_of(fresh)
            self._divide(fresh)
        super().attach(optimizers)

    def _divide(self, modules: Mapping[str, nn.Module]) -> None:
        """Divides the weights of modules that are whole on every rank."""
        if self.tensor is not None:
            self.tensor.divide(modules.values())

    def check_equal_start(self) -> None:
        digest = self._digest_of_weights().hex()
        said = dict(each.split() for each in self.union_of_names([f"{self.process} {digest}"]))
        others = sorted(int(process) for process, each in said.items() if each != said["0"])
        if others:
            raise UserError(
                f"rank {', '.join(map(str, others))} would start with other weights of {', '.join(self._modules)} than "
                "rank 0, and training would not be one run. Do all nodes read the same files of the model? New weights "
                "must be drawn from the seed that the policy is built with."
            )

    def _digest_of_weights(self) -> bytes:
        return self._digest if self.divides_weights else digest_of(self._modules)

    @torch.no_grad()
    def _sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Of parameters that ranks with other samples hold alike.

        A non-finite gradient of one rank is one of the sum, so all ranks skip the same steps.
        """
        used = self.sum_over_ranks(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64))
        # What no rank has used has no gradient, as in one process: an optimizer would move it by its decay.
        parameters = [p for p, ranks in zip(parameters, used.tolist(), strict=True) if ranks]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients([local_part(p.grad) for p in parameters if p.grad is not None], self.samples)

    def step(self, iteration: int) -> StepReport:
        if self.tensor is not None:
            self.tensor.agree(self._modules.values())
        return super().step(iteration)

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for key, tensor in tensors.items():
            with exchanging("gathering weights"):
                found = whole(tensor)
            yield key, found

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.detach().clone(memory_format=torch.contiguous_format)
        with exchanging("summing numbers"):
            dist.all_reduce(total, group=self.samples)
        return total

    def from_first(self, compute: Callable[[], Value]) -> Value:
        return compute() if self.tensor is None else self.tensor.from_first(compute)

    def union_of_names(self, names: list[str]) -> list[str]:
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        with exchanging("comparing names"):
            dist.all_gather_object(everyone, names)
        return sorted(set().union(*everyone))

    def wait(self) -> None:
        with exchanging("waiting for all"):
            dist.barrier(self._patient)


@torch.no_grad()
def digest_of(modules: Mapping[str, nn.Module]) -> bytes:
    """SHA-256 of all parameters and buffers, frozen ones included."""
    digest = hashlib.sha256()
    for name, module in modules.items():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            digest.update(f"{name}.{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
