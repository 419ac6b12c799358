"""The engine interface: who owns precision, gradients, optimizers and, when there are several, the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from modalities.opening import waiting_for_division
from uniml_rl.engines.optimizers import OptimizerSettings

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type in which forward passes compute; a lower one than float32 is autocast."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Splits:
    """Over how many ranks an engine divides what a process would hold alone; 1 is not divided."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    on_cpu: frozenset[str] = frozenset()  # names of the above that lie in the machine's memory, not the device's
    steps_a_copy: bool = False  # of the trainable weights, which is divided like the optimizer's state
    tensor: int = 1  # on top of the first three, what a model's plan divides along heads and features


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, per optimizer name."""

    gradient_norm: dict[str, float]  # before clipping
    update_weight_ratio: dict[str, float]  # |delta w| / |w| over the trainable parameters
    skipped: bool  # a non-finite gradient: no optimizer stepped
    loss_scale: float | None = None  # the factor of the losses in float16, which the norms are free of


class Engine(ABC):
    """Trains named modules under losses that are already normalised over every rank and every micro-batch.

    The trainer divides by global denominators, so gradients are *summed* over micro-batches and ranks, never averaged.
    """

    rank: int
    """Of the ranks that share the samples between them: which one this is."""
    world_size: int
    """How many ranks share the samples."""
    precision: str
    gathered_rollouts: bool = True
    """Whether `sampling` gathers divided weights once, or each pass anew."""
    passes_together: bool = False
    """Whether all ranks must run equally many forward and backward passes, because they exchange in each."""
    divides_weights: bool = False
    """Whether a rank holds but a part of the attached modules' weights."""

    @property
    def process(self) -> int:
        """Which of all processes this is: the rank, unless several train on the same samples and have one rank."""
        return self.rank

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes what there is one of."""
        return self.process == 0

    @abstractmethod
    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        """Makes one optimizer per name over the trainable parameters of its modules; replaces earlier ones.

        Raises ValueError for an optimizer without a trainable parameter.
        """

    def opening(self) -> AbstractContextManager[None]:
        """Within it policies are built: what `attach` will divide waits in host memory, so no device holds it whole."""
        return waiting_for_division() if self.divides_weights else nullcontext()

    def sampling(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Within the context each rank may run as many passes of `modules` without gradient as it likes, or none.

        All ranks enter and leave it. Weight sets are put in place outside of it.
        """
        return nullcontext()

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the attached modules with all their parts, one at a time; every rank asks for all of them."""
        yield from tensors.items()

    def stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of the attached modules as a checkpoint keeps them: torch's sharded tensors, or whole ones.

        Whole tensors of other modules may be given, too; all ranks give the same names.
        """
        return tensors

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which forward passes run."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a micro-batch's share of the loss."""

    @abstractmethod
    def step(self, iteration: int) -> StepReport:
        """Clips, steps every optimizer at the learning rate of `iteration` (of the stage) and clears the gradients.

        A non-finite gradient anywhere skips the step. Raises FloatingPointError after too many skipped steps in a row;
        those that lower the loss scale of float16 do not count.
        """

    @abstractmethod
    def learning_rates(self, iteration: int) -> dict[str, float]:
        """The learning rate of each optimizer at an iteration of the stage."""

    @abstractmethod
    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; processes of one rank count once."""

    def from_first(self, compute: Callable[[], Value]) -> Value:
        """The value of `compute`, which of the processes of one rank only the first calls. Values must pickle.

        For what need not be repeatable, as rewards: processes of one rank must go on alike.
        """
        return compute()

    def gather_rows(self, values: Tensor) -> Tensor:
        """The ranks' values [n_rank, ...] along the first dimension, in rank order, the same on each rank."""
        counts = torch.zeros(self.world_size, dtype=torch.long)
        counts[self.rank] = len(values)
        counts = self.sum_over_ranks(counts)
        first, total = int(counts[: self.rank].sum()), int(counts.sum())
        # A sum in which each rank fills only its own rows is a gather; bool has no sum.
        own = torch.zeros(total, *values.shape[1:], dtype=torch.long if values.dtype == torch.bool else values.dtype)
        own[first : first + len(values)] = values
        return self.sum_over_ranks(own).to(values.dtype)

    @abstractmethod
    def union_of_names(self, names: list[str]) -> list[str]:
        """The sorted union of all processes' names, so that ranks which log different metrics reduce the same keys."""

    def check_equal_start(self) -> None:
        """Raises UserError on every rank if the attached modules do not hold the same weights on all of them."""

    def wait(self) -> None:
        """Returns when every rank has called it, however long that takes: one of them may work alone meanwhile."""

    def close(self) -> None:
        """Lets go of what it holds beside the modules. Nothing is sent, so it waits for no rank, dead or alive."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments, step counts, loss scale and skip counters, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
