"""PyTorch's own engine: autocast, accumulation, clipping, schedules; `replicated.py` adds the other ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.settings import Settings
from uniml_rl.engines.base import Engine, OptimizerSettings, ScheduleSettings, StepReport
from uniml_rl.engines.ranks import join, launched


class TorchEngineConfig(Settings):
    """PyTorch itself, in one process or in several that a launcher starts (docs/scaling.md)."""

    type: Literal["torch"] = "torch"
    """Name of the engine."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where models live; auto takes the GPU if there is one."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision of forward passes: bf16 is autocast over float32 trainable weights."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; None leaves torch's own choice. A resumed run is equal bit for bit only with the same."""
    shard: Literal["none", "ddp"] = "none"
    """What several processes share: none is one process; ddp keeps the whole model in each, splits the samples and sums
    the gradients, and in one process is the same as none."""
    timeout_seconds: float = Field(default=1800.0, gt=0)
    """Longest wait for the other processes in one exchange, after which the run ends; not read with `shard: none`."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Ends the run after this many optimizer steps in a row that were skipped for a non-finite gradient."""

    @model_validator(mode="after")
    def _time_out_is_read(self) -> TorchEngineConfig:
        if self.shard == "none" and self.timeout_seconds != type(self).model_fields["timeout_seconds"].default:
            raise ValueError("timeout_seconds: one process waits for no other; remove it or take shard: ddp")
        return self

    def resolve_device(self) -> str:
        """The device that `auto` stands for on this machine. UserError if the one that is asked for is not there."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device: cuda: torch finds no CUDA device on this machine; use auto or cpu.")
        return self.device

    def build(self) -> TorchEngine:
        """The engine; sets the number of threads and, with several processes, joins the others.

        Raises UserError if a launcher has started more processes than `shard` is for.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        launch, device = launched(), self.resolve_device()
        if launch.world_size == 1:
            return TorchEngine(device, self.precision, self.max_skipped_steps)
        if self.shard == "none":
            raise UserError(
                f"{launch.world_size} processes were started, and each would train by itself: set engine.shard: ddp, "
                "or start one process."
            )
        from uniml_rl.engines.replicated import ReplicatedEngine  # which stands on this file

        join(launch, device, self.timeout_seconds)
        return ReplicatedEngine(device, self.precision, self.max_skipped_steps)


def learning_rate_at(peak: float, schedule: ScheduleSettings, iteration: int) -> float:
    """The learning rate at an iteration of the stage, counted from 0."""
    if iteration < schedule.warm_up_iterations:
        return peak * (iteration + 1) / (schedule.warm_up_iterations + 1)
    if schedule.type == "constant" or schedule.decay_iterations is None:
        return peak
    progress = min(1.0, (iteration - schedule.warm_up_iterations) / schedule.decay_iterations)
    left = 1 - progress if schedule.type == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_share + (1 - schedule.final_share) * left)


def _make_optimizer(settings: OptimizerSettings, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.type == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )


class TorchEngine(Engine):
    """One process with the whole model."""

    def __init__(self, device: str, precision: str = "fp32", max_skipped_steps: int = 5) -> None:
        self.rank, self.world_size = 0, 1
        self.device = torch.device(device)
        self.precision = precision
        self.max_skipped_steps = max_skipped_steps
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._settings: dict[str, OptimizerSettings] = {}
        self._skipped_in_a_row = 0

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        self._optimizers, self._settings, self._skipped_in_a_row = {}, {}, 0
        for name, (modules, settings) in optimizers.items():
            parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
            if not parameters:
                raise ValueError(f"optimizer {name!r} has no trainable parameter in {sorted(modules)}.")
            self._optimizers[name] = _make_optimizer(settings, parameters)
            self._settings[name] = settings

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [p for group in self._optimizers[name].param_groups for p in group["params"]]

    def step(self, iteration: int) -> StepReport:
        norms = {}
        for name in self._optimizers:
            gradients = [p.grad for p in self._parameters(name) if p.grad is not None]
            norms[name] = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        skipped = not all(math.isfinite(norm) for norm in norms.values())
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        ratios = {} if skipped else {name: self._step_one(name, norms[name], iteration) for name in self._optimizers}
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise RuntimeError(
                f"{self._skipped_in_a_row} optimizer steps in a row had a non-finite gradient (norms {norms}); the "
                "last checkpoint is intact. Lower the learning rate or the reward's scale, or use precision: fp32."
            )
        return StepReport(norms, ratios, skipped)

    @torch.no_grad()
    def _step_one(self, name: str, norm: float, iteration: int) -> float:
        """Steps one optimizer; the L2 norm of the update over that of the weights."""
        optimizer, settings, parameters = self._optimizers[name], self._settings[name], self._parameters(name)
        if settings.gradient_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, settings.gradient_clip, torch.tensor(norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(settings.learning_rate, settings.schedule, iteration)
        before = [p.detach().clone() for p in parameters]
        optimizer.step()
        update = torch.nn.utils.get_total_norm([p - b for p, b in zip(parameters, before, strict=True)])
        return float(update / torch.nn.utils.get_total_norm(before).clamp_min(1e-30))

    def learning_rates(self, iteration: int) -> dict[str, float]:
        return {
            name: learning_rate_at(settings.learning_rate, settings.schedule, iteration)
            for name, settings in self._settings.items()
        }

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return value

    def union_of_names(self, names: list[str]) -> list[str]:
        return sorted(set(names))

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["optimizers"].keys() != self._optimizers.keys():
            raise ValueError(
                f"the checkpoint's optimizers are {sorted(state['optimizers'])}, the run's {sorted(self._optimizers)}."
            )
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self._skipped_in_a_row = state["skipped_in_a_row"]
