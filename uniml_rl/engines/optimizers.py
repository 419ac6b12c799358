"""The optimizers that every engine offers: their settings, what each of them reads, and torch's objects for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from modalities.errors import UserError
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

_OWN_KEYS = {
    "adamw": ("betas", "epsilon"),
    "adamw_8bit": ("betas", "epsilon"),
    "adafactor": ("decay_exponent", "clip_threshold", "minimum_rms"),
    "sgd": (),
}
"""What an optimizer reads beside the keys that all of them read."""
_ADAFACTOR_EPSILON = 1e-18
"""Only against a division by 0: its square is still a float32. The paper adds 1e-30 to squared gradients; torch's own
default, a bound of 1e-7, is larger than those of losses that are normalised over a whole batch."""


class OptimizerSettings(Settings):
    """One optimizer over one set of modules (the policy's, or the critic's)."""

    type: Literal["adamw", "adamw_8bit", "adafactor", "sgd"] = "adamw"
    """AdamW (Loshchilov & Hutter 2017); the same with moments in 8 bits (Dettmers et al. 2022; needs the package
    bitsandbytes and a GPU); Adafactor without first moment (Shazeer & Stern 2018); or plain SGD without momentum."""
    learning_rate: float = Field(default=1e-5, gt=0, le=1e30)
    """Peak learning rate. Adafactor's is relative: it is multiplied by the root mean square of each weight tensor, and
    is never more than 1/√t at optimizer step t; 1e-3 to 1e-2 are usual."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment, in 32 and in 8 bits."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset, in 32 and in 8 bits."""
    decay_exponent: float = Field(default=-0.8, lt=0)
    """Adafactor's second moment forgets at the rate 1 - t^decay_exponent at optimizer step t."""
    clip_threshold: float = Field(default=1.0, ge=1)
    """Adafactor's largest root mean square of a weight tensor's update before the learning rate."""
    minimum_rms: float = Field(default=1e-3, gt=0)
    """Adafactor's smallest root mean square of a weight tensor that scales its step: new tensors of zeros move too."""
    weight_decay: float = Field(default=0.0, ge=0, le=1e6)
    """Decoupled weight decay."""
    gradient_clip: float | None = Field(default=1.0, gt=0)
    """Largest L2 norm of the gradient over all modules of this optimizer; None does not clip."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Warm-up and decay of the learning rate, in iterations."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> OptimizerSettings:
        for key in dict.fromkeys(key for keys in _OWN_KEYS.values() for key in keys):
            if key not in _OWN_KEYS[self.type] and getattr(self, key) != type(self).model_fields[key].default:
                readers = " or ".join(name for name, keys in _OWN_KEYS.items() if key in keys)
                raise ValueError(f"{key}: {self.type} does not read it; remove it, or take {readers}")
        return self

    def require(self, device: str) -> None:
        """Raises UserError if this optimizer cannot run here."""
        if self.type != "adamw_8bit":
            return
        _bitsandbytes()
        if device == "cpu":
            raise UserError("type: adamw_8bit computes on GPUs only, and this run's device is the CPU; use adamw.")

    def state_bytes(self, trainable: int, factored: int) -> int:
        """Bytes of the moments of `trainable` parameters, `factored` being the values of a mean per row and column."""
        return {"adamw": 8 * trainable, "adamw_8bit": 2 * trainable, "adafactor": 4 * factored}.get(self.type, 0)

    def build(self, parameters: Sequence[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
        """The optimizer over `parameters`, at the peak learning rate. UserError if its package is missing.

        With `fused` a step is one pass over the memory, which `adamw` and `sgd` can.
        """
        rates: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        rates |= {"fused": True} if fused else {}
        if self.type == "sgd":
            return torch.optim.SGD(parameters, **rates)
        if self.type == "adafactor":
            return torch.optim.Adafactor(
                parameters,
                beta2_decay=self.decay_exponent,
                eps=(_ADAFACTOR_EPSILON, self.minimum_rms),
                d=self.clip_threshold,
                **rates,
            )
        adamw = torch.optim.AdamW if self.type == "adamw" else _bitsandbytes().optim.AdamW8bit
        optimizer: torch.optim.Optimizer = adamw(parameters, betas=self.betas, eps=self.epsilon, **rates)
        return optimizer


def learning_rate_at(peak: float, schedule: ScheduleSettings, iteration: int) -> float:
    """The learning rate at an iteration of the stage, counted from 0."""
    if iteration < schedule.warm_up_iterations:
        return peak * (iteration + 1) / (schedule.warm_up_iterations + 1)
    if schedule.type == "constant" or schedule.decay_iterations is None:
        return peak
    progress = min(1.0, (iteration - schedule.warm_up_iterations) / schedule.decay_iterations)
    left = 1 - progress if schedule.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_share + (1 - schedule.final_share) * left)


def _bitsandbytes() -> Any:
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise UserError(
            f"type: adamw_8bit needs the package bitsandbytes, which does not import here ({error}): "
            "`pip install 'uniml-rl[bitsandbytes]'`, or use adamw or adafactor."
        ) from error
