"""Keys that the blocks of all engines share."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.engines.optimizers import OptimizerSettings


class EngineSettings(Settings):
    """Device, precision, and how long is waited for what."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models live; auto takes the GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward passes: bf16 and fp16 are autocast over float32 trainable weights. fp16 scales the losses up
    before the backward pass, by as much as no gradient overflows; take it where a GPU has no bf16."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; None leaves torch's own choice. A resumed run is equal bit for bit only with the same."""
    timeout_seconds: float = Field(default=1800.0, ge=1, le=7 * 24 * 3600)
    """Longest wait for the other processes in one exchange, after which the run ends. At the start of a run the first
    process waits 10 minutes for the last one."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Ends the run after this many optimizer steps in a row that were skipped for a non-finite gradient."""

    def resolve_device(self) -> str:
        """The device that `auto` stands for on this machine. UserError if the one that is asked for is not there."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device: cuda: torch finds no CUDA device on this machine; use auto or cpu.")
        return self.device

    def require(self) -> None:
        """Raises UserError if a package that this engine needs is missing."""

    def require_optimizer(self, settings: OptimizerSettings) -> None:
        """Raises UserError if this engine cannot run the optimizer."""
        settings.require(self.resolve_device())
