"""PyTorch on several ranks, each with the whole model (`shard: ddp`): gradients are summed at the optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modalities.shards import local_part
from uniml_rl.engines.base import StepReport
from uniml_rl.engines.buckets import sum_gradients
from uniml_rl.engines.distributed import DistributedEngine


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
        if self.tensor is not None:
            self.tensor.reduce(parameters)
        used = self.sum_over_ranks(torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64))
        # What no rank has used has no gradient, as in one process: an optimizer would move it by its decay.
        parameters = [p for p, ranks in zip(parameters, used.tolist(), strict=True) if ranks]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        sum_gradients([local_part(p.grad) for p in parameters if p.grad is not None], self.samples)

    def _total_norm(self, parameters: list[nn.Parameter], tensors: list[Tensor]) -> float:
        if self.tensor is None:
            return super()._total_norm(parameters, tensors)
        return float(self.tensor.sum_of_squares(parameters, tensors).sqrt())
