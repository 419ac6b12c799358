"""PyTorch on several ranks, each with the whole model (`shard: ddp`): gradients are summed at the optimizer step."""

from __future__ import annotations

from torch import Tensor, nn

from uniml_rl.engines.base import StepReport
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
        parameters = [parameter for name in self._optimizers for parameter in self._parameters(name)]
        if self.tensor is not None:
            self.tensor.reduce(parameters)
        self._sum_gradients(parameters)
        return super().step(iteration)

    def _total_norm(self, parameters: list[nn.Parameter], tensors: list[Tensor]) -> float:
        if self.tensor is None:
            return super()._total_norm(parameters, tensors)
        return float(self.tensor.sum_of_squares(parameters, tensors).sqrt())
