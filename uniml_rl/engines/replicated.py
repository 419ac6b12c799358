"""PyTorch on several ranks, each with the whole model (`shard: ddp`): gradients are summed at the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from uniml_rl.engines.base import StepReport
from uniml_rl.engines.distributed import DistributedEngine
from uniml_rl.engines.ranks import exchanging

_BUCKET_ELEMENTS = 32 << 20
"""Elements of the gradients that one all-reduce sums: few calls, and a buffer of 128 MiB if they are float32."""


class ReplicatedEngine(DistributedEngine):
    """Data parallelism.

    Gradients add up over micro-batches on each rank, and are summed over ranks by an all-reduce once per optimizer
    step. DistributedDataParallel (and its composable form, `replicate`) does that inside of each backward pass, which
    it prepares in `forward` of the module that it wraps, and wants as many on every rank. Policies are called through
    methods of their own, a step has as many backward passes as the rank has micro-batches, one rank may have none, and
    a critic trains under the same loss; DDP's overlap of an all-reduce with the last backward pass is what this gives
    up. Sums, and no means: losses are normalised over all ranks already.
    """

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
