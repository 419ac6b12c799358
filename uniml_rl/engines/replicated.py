"""PyTorch on several ranks, each with the whole model (`shard: ddp`): gradients are summed at the optimizer step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modalities.errors import UserError
from uniml_rl.engines.base import StepReport
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.ranks import exchanging, patient_group
from uniml_rl.engines.torch_engine import TorchEngine

_BUCKET_ELEMENTS = 32 << 20
"""Elements of the gradients that one all-reduce sums: few calls, and a buffer of 128 MiB if they are float32."""


class ReplicatedEngine(TorchEngine):
    """Data parallelism over torch's process group, which exists already.

    Gradients add up over micro-batches on each rank, and are summed over ranks by an all-reduce once per optimizer
    step. DistributedDataParallel (and its composable form, `replicate`) does that inside of each backward pass, which
    it prepares in `forward` of the module that it wraps, and wants as many on every rank. Policies are called through
    methods of their own, a step has as many backward passes as the rank has micro-batches, one rank may have none, and
    a critic trains under the same loss; DDP's overlap of an all-reduce with the last backward pass is what this gives
    up. Sums, and no means: losses are normalised over all ranks already.
    """

    def __init__(self, device: str, precision: str = "fp32", max_skipped_steps: int = 5) -> None:
        super().__init__(device, precision, max_skipped_steps)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._modules: dict[str, nn.Module] = {}
        self._patient = patient_group()

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        super().attach(optimizers)
        self._modules = {
            f"{name}.{part}": module for name, (modules, _) in optimizers.items() for part, module in modules.items()
        }

    def check_equal_start(self) -> None:
        digest = torch.frombuffer(bytearray(_digest(self._modules)), dtype=torch.int64).unsqueeze(0)
        digests = self.gather_rows(digest)
        others = [rank for rank, row in enumerate(digests) if not torch.equal(row, digests[0])]
        if others:
            raise UserError(
                f"rank {', '.join(map(str, others))} would start with other weights of {', '.join(self._modules)} than "
                "rank 0, and training would not be one run. Do all nodes read the same files of the model? New weights "
                "must be drawn from the seed that the policy is built with."
            )

    def step(self, iteration: int) -> StepReport:
        self._sum_gradients()
        return super().step(iteration)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        """A non-finite gradient of one rank is one of the sum, so all ranks skip the same steps."""
        parameters = [parameter for name in self._optimizers for parameter in self._parameters(name)]
        used = self.sum_over_ranks(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64))
        # What no rank has used has no gradient, as in one process: an optimizer would move it by its decay.
        for bucket in _buckets([p for p, ranks in zip(parameters, used.tolist(), strict=True) if ranks]):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            with exchanging("summing gradients"):
                dist.all_reduce(flat)
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.detach().clone(memory_format=torch.contiguous_format)
        with exchanging("summing numbers"):
            dist.all_reduce(total)
        return total

    def union_of_names(self, names: list[str]) -> list[str]:
        everyone: list[list[str]] = [[] for _ in range(self.world_size)]
        with exchanging("comparing names"):
            dist.all_gather_object(everyone, names)
        return sorted(set().union(*everyone))

    def wait(self) -> None:
        with exchanging("waiting for all"):
            dist.barrier(self._patient)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device each, as many as one all-reduce takes."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        fits = size + parameter.numel() <= _BUCKET_ELEMENTS
        if bucket and not (fits and (parameter.dtype, parameter.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel()
    if bucket:
        yield bucket


@torch.no_grad()
def _digest(modules: Mapping[str, nn.Module]) -> bytes:
    """SHA-256 of all parameters and buffers, frozen ones included."""
    digest = hashlib.sha256()
    for name, module in modules.items():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            digest.update(f"{name}.{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.digest()
