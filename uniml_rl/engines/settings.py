"""Keys that the blocks of all engines share."""

from __future__ import annotations

import os
from typing import Literal

import torch
from pydantic import Field, model_validator

from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.engines.meeting import PATIENCE
from uniml_rl.engines.optimizers import OptimizerSettings


class EngineSettings(Settings):
    """Device, precision, and how long is waited for what."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models live; auto takes the GPU if there is one."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward passes: bf16 and fp16 are autocast over float32 trainable weights. fp16 scales the losses up
    before the backward pass, by as much as no gradient overflows; take it where a GPU has no bf16."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of torch in each process; None leaves torch's own choice. More than the machine has CPUs is slower,
    and warned of. A resumed run is equal bit for bit only with the same."""
    timeout_seconds: float = Field(default=1800.0, ge=1, le=7 * 24 * 3600)
    """Longest wait for the other processes in one exchange, after which the run ends."""
    start_timeout_seconds: float = Field(default=PATIENCE, ge=1, le=7 * 24 * 3600)
    """Longest wait at the start of a run for the last of its processes."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Ends the run after this many optimizer steps in a row that were skipped for a non-finite gradient."""

    def resolve_device(self) -> str:
        """The device that `auto` stands for on this machine. UserError if the one that is asked for is not there."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device: cuda: torch finds no CUDA device on this machine; use auto or cpu.")
        return self.device

    @model_validator(mode="after")
    def _waits_are_read(self) -> EngineSettings:
        """The first process asks before it knows how many there are, so only a block for one process is refused."""
        for key in ("timeout_seconds", "start_timeout_seconds"):
            if self.most_ranks == 1 and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: one process waits for no other; remove it or take shard: ddp")
        return self

    @property
    def most_ranks(self) -> int | None:
        """Processes that the block is for at most; None is any number."""
        return None

    @property
    def fewest_ranks(self) -> int:
        """Processes from which on the block divides all that it names; with one it is a block for one process."""
        return 2

    def doubts(self, processes: int) -> list[tuple[str, str]]:
        """Keys with values that are hardly meant where so many processes share this machine, and why."""
        cpus = os.cpu_count() or 1
        if self.threads is None or self.threads * processes <= cpus:
            return []
        each = f" in each of {processes} processes" if processes > 1 else ""
        return [("threads", f"{self.threads}{each}, and this machine has {cpus} CPUs: they would wait for each other")]

    def require(self) -> None:
        """Raises UserError if a package that this engine needs is missing."""

    def require_optimizer(self, settings: OptimizerSettings) -> None:
        """Raises UserError if this engine cannot run the optimizer."""
        settings.require(self.resolve_device())
