"""PyTorch on several ranks: what `replicated.py` and `sharded.py` share. Losses are sums over ranks, never means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modalities.errors import UserError
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.ranks import exchanging, patient_group
from uniml_rl.engines.torch_engine import TorchEngine


class DistributedEngine(TorchEngine):
    """Over torch's process group, which exists already."""

    def __init__(self, device: str, precision: str = "fp32", max_skipped_steps: int = 5) -> None:
        super().__init__(device, precision, max_skipped_steps)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._modules: dict[str, nn.Module] = {}
        self._patient = patient_group()

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        self._modules = {
            f"{name}.{part}": module for name, (modules, _) in optimizers.items() for part, module in modules.items()
        }
        super().attach(optimizers)

    def check_equal_start(self) -> None:
        digest = torch.frombuffer(bytearray(self._digest_of_weights()), dtype=torch.int64).unsqueeze(0)
        digests = self.gather_rows(digest)
        others = [rank for rank, row in enumerate(digests) if not torch.equal(row, digests[0])]
        if others:
            raise UserError(
                f"rank {', '.join(map(str, others))} would start with other weights of {', '.join(self._modules)} than "
                "rank 0, and training would not be one run. Do all nodes read the same files of the model? New weights "
                "must be drawn from the seed that the policy is built with."
            )

    def _digest_of_weights(self) -> bytes:
        return digest_of(self._modules)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.detach().clone(memory_format=torch.contiguous_format)
        with exchanging("summing numbers"):
            dist.all_reduce(total)
        return total

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
