"""The reward protocol: samples and prompts in, float32 scores out, failures as NaN with a reason, never as a number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn

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
    separate_process: bool = False
    """Whether a time-out needs a process of its own: for code over strings that may hold Python's interpreter lock for
    ever (a regular expression that backtracks, a verifier's big integers), which no thread can interrupt."""
    reads: int | None = None
    """Tokens of prompt and sample together that it can score; None: any number."""
    fields: frozenset[str] = frozenset()
    """Fields of the prompts' records that it reads."""

    @abstractmethod
    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32, one score per sample in the given order; NaN where there is nothing to score against."""

    def models(self) -> list[nn.Module]:
        """The models that it computes with, whose weights count in the plan of memory: its attributes that are."""
        return [value for value in vars(self).values() if isinstance(value, nn.Module)]

    def state_dict(self) -> dict[str, Any]:
        """What the next score depends on beyond the configuration (running statistics); checkpointed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but the checkpoint holds {sorted(state)}.")


class RewardConfig(Settings):
    """What every reward's block has; a reward adds its own keys and builds itself."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the weighted sum; 0 measures without training on it."""
    micro_batch_size: int = Field(default=32, ge=1)
    """Samples in one call of `score`."""
    on_error: Literal["mask", "fail"] = "mask"
    """`mask` leaves a failed sample out and counts it; `fail` ends the run."""
    timeout_seconds: float | None = Field(default=None, gt=0)
    """Longest time for one call of `score`; None waits for ever. A micro-batch that takes longer is scored again sample
    by sample, each within this time."""
    fade_in_iterations: int = Field(default=0, ge=0)
    """The weight rises linearly from 0 (at the stage's iteration 0) to `weight` over this many iterations."""

    @property
    def policy(self) -> str | None:
        """The reward model of the same run that it scores with, if it is one that a stage trains."""
        return None

    def with_model(self, folder: Path) -> RewardConfig:
        """The same reward of the model in `folder`, once the run has trained it."""
        raise NotImplementedError

    def weight_at(self, iteration_in_stage: int) -> float:
        """The weight in force at an iteration of the stage."""
        if iteration_in_stage >= self.fade_in_iterations:
            return self.weight
        return self.weight * iteration_in_stage / self.fade_in_iterations

    def build(self, device: str) -> Reward:
        """The reward itself, its models on `device`."""
        raise NotImplementedError
