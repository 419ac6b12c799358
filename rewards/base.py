"""The reward protocol: samples and prompts in, float32 scores out, failures as NaN with a reason, never as a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from modalities.samples import Prompt, Sample
from modalities.settings import Settings

SampleKind = Literal["text", "image", "video", "audio"]


class Reward(ABC):
    """A function from samples to numbers.

    Built by `RewardConfig.build`; the composition calls `score` in micro-batches and turns an exception, a time-out or
    a non-finite value into a masked sample.
    """

    kinds: frozenset[SampleKind]
    """Kinds of samples that it can score; anything else is refused before training starts."""
    differentiable: bool = False
    """Whether `score` keeps the gradient with respect to the samples' tensors."""
    repeatable: bool = True
    """Whether equal samples always get equal scores."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32, one score per sample in the given order; NaN where there is nothing to score against."""

    def state_dict(self) -> dict[str, Any]:
        """What the next score depends on beyond the configuration (running statistics); checkpointed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but the checkpoint holds {sorted(state)}.")


class RewardConfig(Settings):
    """What every reward's block has; a reward adds its own keys and builds itself."""

    weight: float = 1.0
    """Factor in the weighted sum; 0 measures without training on it."""
    on_error: Literal["mask", "fail"] = "mask"
    """`mask` leaves a failed sample out and counts it; `fail` ends the run."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Longest time for one call of `score` on a micro-batch; None waits for ever."""
    fade_in_iterations: int = Field(default=0, ge=0)
    """The weight rises linearly from 0 to `weight` over this many iterations of the stage."""

    def build(self, device: str) -> Reward:
        """The reward itself, its models on `device`."""
        raise NotImplementedError
