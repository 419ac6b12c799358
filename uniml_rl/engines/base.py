"""The engine interface: who owns precision, gradients, optimizers and, when there are several, the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from modalities.settings import Settings


class ScheduleSettings(Settings):
    """The learning rate as a function of the stage's iteration; it has no state, so a resumed run cannot lose it."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or a decay to `final_share` over `decay_iterations`."""
    warm_up_iterations: int = Field(default=0, ge=0)
    """Linear rise from 1 / (n + 1) of the rate; 0 starts at the full rate."""
    decay_iterations: int | None = Field(default=None, ge=1)
    """Iterations of the decay, after the warm-up; needed by linear and cosine."""
    final_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the learning rate that is left at the end of the decay."""

    @model_validator(mode="after")
    def _decay_is_read(self) -> ScheduleSettings:
        if self.type != "constant" and self.decay_iterations is None:
            raise ValueError(f"type {self.type!r} without decay_iterations would never decay; say how long it takes")
        if self.type == "constant" and (self.decay_iterations is not None or self.final_share):
            raise ValueError("type 'constant' reads no decay_iterations and no final_share; take linear or cosine")
        return self


DecayRate = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSettings(Settings):
    """One optimizer over one set of modules (the policy's, or the critic's)."""

    type: Literal["adamw", "sgd"] = "adamw"
    """AdamW (Loshchilov & Hutter 2017) or plain SGD without momentum."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    gradient_clip: float | None = Field(default=1.0, gt=0)
    """Largest L2 norm of the gradient over all modules of this optimizer; None does not clip."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Warm-up and decay of the learning rate, in iterations."""

    @model_validator(mode="after")
    def _moments_are_read(self) -> OptimizerSettings:
        for key in ("betas", "epsilon"):
            if self.type == "sgd" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: plain SGD keeps no moments and does not read it; remove it or take adamw")
        return self


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, per optimizer name."""

    gradient_norm: dict[str, float]  # before clipping
    update_weight_ratio: dict[str, float]  # |delta w| / |w| over the trainable parameters
    skipped: bool  # a non-finite gradient: no optimizer stepped


class Engine(ABC):
    """Trains named modules under losses that are already normalised over every rank and every micro-batch.

    The trainer divides by global denominators, so gradients are *summed* over micro-batches and ranks, never averaged.
    """

    rank: int
    world_size: int
    precision: str

    @abstractmethod
    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        """Makes one optimizer per name over the trainable parameters of its modules; replaces earlier ones.

        Raises ValueError for an optimizer without a trainable parameter.
        """

    @abstractmethod
    def autocast(self) -> AbstractContextManager[Any]:
        """The precision in which forward passes run."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a micro-batch's share of the loss."""

    @abstractmethod
    def step(self, iteration: int) -> StepReport:
        """Clips, steps every optimizer at the learning rate of `iteration` (of the stage) and clears the gradients.

        A non-finite gradient anywhere skips the step. Raises RuntimeError after too many skipped steps in a row.
        """

    @abstractmethod
    def learning_rates(self, iteration: int) -> dict[str, float]:
        """The learning rate of each optimizer at an iteration of the stage."""

    @abstractmethod
    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each."""

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
        """The sorted union of all ranks' names, so that ranks which log different metrics reduce the same keys."""

    def check_equal_start(self) -> None:
        """Raises UserError on every rank if the attached modules do not hold the same weights on all of them."""

    def wait(self) -> None:
        """Returns when every rank has called it, however long that takes: one of them may work alone meanwhile."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments, step counts and skip counters, as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
