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
from modalities.shards import divided_like, local_part
from uniml_rl.engines.base import PRECISIONS, Engine, Splits, StepReport
from uniml_rl.engines.groups import Launch, join, mesh_of
from uniml_rl.engines.loss_scale import LossScale
from uniml_rl.engines.optimizers import OptimizerSettings, learning_rate_at
from uniml_rl.engines.ranks import launched
from uniml_rl.engines.settings import EngineSettings
from uniml_rl.engines.stored_tensors import as_read
from uniml_rl.engines.tensor_group import AXIS, TensorGroup


class TorchEngineConfig(EngineSettings):
    """PyTorch itself, in one process or in several that a launcher starts (docs/scaling.md)."""

    type: Literal["torch"] = "torch"
    """Name of the engine."""
    shard: Literal["none", "ddp", "fsdp", "hsdp"] = "none"
    """What several processes share: none is one process; ddp keeps the whole model in each, splits the samples and sums
    the gradients; fsdp also divides weights, gradients and moments over all processes; hsdp over groups of
    `shard_ranks`, whose gradients are then summed. In one process each is the same as none."""
    shard_ranks: int | None = Field(default=None, ge=2)
    """Processes over which `hsdp` divides the model; None is the number on each node. Must divide their number."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Processes that train on the same samples, each with its part of the weights along heads and features, beside what
    `shard` divides over the others. Must divide the numbers of processes and of heads; 1 divides nothing. For text
    policies that train all weights of a model with a plan for it (docs/scaling.md). In one process the same as 1."""
    rollout_weights: Literal["auto", "gathered", "sharded"] = "auto"
    """How divided weights sample: gathered collects them once per rollout, sharded anew in each forward pass, for
    models that do not fit whole; auto is gathered if whole weights and the cache fit, and says so."""

    @model_validator(mode="after")
    def _keys_are_read(self) -> TorchEngineConfig:
        if self.shard != "hsdp" and self.shard_ranks is not None:
            raise ValueError(f"shard_ranks: shard: {self.shard} does not read it; remove it or take shard: hsdp")
        if self.shard in ("none", "ddp") and self.rollout_weights != "auto":
            raise ValueError(f"rollout_weights: with shard: {self.shard} weights are whole; remove it or take fsdp")
        if self.shard == "none" and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel: shard: none is one process; take shard: ddp, fsdp or hsdp")
        return self

    @property
    def most_ranks(self) -> int | None:
        return 1 if self.shard == "none" else None

    @property
    def fewest_ranks(self) -> int:
        return 1 if self.shard == "none" else max(2, (self.shard_ranks or 1) * self.tensor_parallel)

    def require_optimizer(self, settings: OptimizerSettings) -> None:
        super().require_optimizer(settings)
        if self.shard in ("fsdp", "hsdp") and settings.type in ("adafactor", "adamw_8bit"):
            raise UserError(
                f"type: {settings.type} reads each weight whole, and engine.shard: {self.shard} divides it; use adamw "
                "or sgd, or engine.shard: ddp."
            )

    def splits(self, world_size: int) -> Splits:
        """What `world_size` processes divide. UserError for more of them than `shard` is for."""
        launch = launched()
        if launch.world_size != world_size:  # a plan for other processes: all on one node
            launch = Launch(world_size=world_size, local_world_size=world_size)
        self._require_shard(launch)
        sizes = self._mesh(launch)
        size = sizes.get("shard", 1)
        return Splits(size, size, size, tensor=sizes.get(AXIS, 1))

    def _require_shard(self, launch: Launch) -> None:
        if self.shard == "none" and launch.world_size > 1:
            raise UserError(
                f"shard: none is for one process, and each of {launch.world_size} would train by itself; take ddp, "
                "fsdp or hsdp, or one process."
            )

    def build(self) -> TorchEngine:
        """The engine; sets the number of threads and, with several processes, joins the others.

        Raises UserError if a launcher has started more processes than `shard` is for.
        """
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        launch, device = launched(), self.resolve_device()
        if launch.world_size == 1:
            return TorchEngine(device, self.precision, self.max_skipped_steps)
        self._require_shard(launch)
        from uniml_rl.engines.replicated import ReplicatedEngine  # these stand on this file
        from uniml_rl.engines.sharded import ShardedEngine

        sizes = self._mesh(launch)
        join(launch, device, self.timeout_seconds)
        mesh = mesh_of(sizes, device)
        tensor = TensorGroup(mesh) if AXIS in sizes else None
        if self.shard == "ddp":
            return ReplicatedEngine(device, self.precision, self.max_skipped_steps, tensor)
        of_samples = tuple(name for name in sizes if name != AXIS)
        gathered = self.rollout_weights != "sharded"
        return ShardedEngine(device, mesh[of_samples], gathered, self.precision, self.max_skipped_steps, tensor)

    def _mesh(self, launch: Launch) -> dict[str, int]:
        """Dimensions over which processes are laid out, those that train on the same samples next to each other.

        UserError if groups would be unequal.
        """
        if launch.world_size == 1:
            return {"replicate": 1}
        ranks = self._groups(launch.world_size, self.tensor_parallel, "tensor_parallel", "processes")
        tensor = {AXIS: self.tensor_parallel} if self.tensor_parallel > 1 else {}
        if self.shard != "hsdp":
            return {"shard" if self.shard == "fsdp" else "replicate": ranks, **tensor}
        size = self.shard_ranks or max(1, launch.local_world_size // self.tensor_parallel)
        what = "processes" if not tensor else f"groups of {self.tensor_parallel} processes"
        return {"replicate": self._groups(ranks, size, "shard_ranks", what), "shard": size, **tensor}

    @staticmethod
    def _groups(count: int, size: int, key: str, what: str) -> int:
        if count % size:
            raise UserError(
                f"{key}: {count} {what} cannot be divided into groups of {size}; it must divide their number."
            )
        return count // size


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
        self._loss_scale: LossScale | None = None

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        self._optimizers, self._settings, self._skipped_in_a_row = {}, {}, 0
        everything = [
            p for modules, _ in optimizers.values() for module in modules.values() for p in module.parameters()
        ]
        types = {PRECISIONS[self.precision], *(p.dtype for p in everything)}  # a frozen base may compute in its own
        self._loss_scale = LossScale() if torch.float16 in types else None
        for name, (modules, settings) in optimizers.items():
            parameters = [p for module in modules.values() for p in module.parameters() if p.requires_grad]
            if not parameters:
                raise ValueError(f"optimizer {name!r} has no trainable parameter in {sorted(modules)}.")
            self._optimizers[name] = settings.build(parameters)
            self._settings[name] = settings

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor) -> None:
        scaled = loss if self._loss_scale is None else loss * self._loss_scale.value
        scaled.backward()  # type: ignore[no-untyped-call]

    def _parameters(self, name: str) -> list[nn.Parameter]:
        return [p for group in self._optimizers[name].param_groups for p in group["params"]]

    def _total_norm(self, parameters: list[nn.Parameter], tensors: list[Tensor]) -> float:
        """L2 norm over all elements, on whatever rank they are; `tensors` are the parts that are here, divided as
        `parameters` are."""
        return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0

    @torch.no_grad()
    def step(self, iteration: int) -> StepReport:
        scale, norms = self._loss_scale, {}
        for name in self._optimizers:
            used = [parameter for parameter in self._parameters(name) if parameter.grad is not None]
            gradients = [local_part(parameter.grad) for parameter in used if parameter.grad is not None]
            if gradients and scale is not None:
                torch._foreach_mul_(gradients, 1 / scale.value)
            norms[name] = self._total_norm(used, gradients)
        skipped = not all(math.isfinite(norm) for norm in norms.values())
        ratios = {} if skipped else {name: self._step_one(name, norms[name], iteration) for name in self._optimizers}
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        report = StepReport(norms, ratios, skipped, None if scale is None else scale.value)
        self._count(report)
        return report

    def _count(self, report: StepReport) -> None:
        """Ends the run after too many skipped steps in a row that no smaller loss scale can prevent."""
        blames_scale = self._loss_scale is not None and self._loss_scale.update(overflow=report.skipped)
        if not blames_scale:
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if report.skipped else 0
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise FloatingPointError(
                f"{self._skipped_in_a_row} optimizer steps in a row had a non-finite gradient (norms "
                f"{report.gradient_norm}), as many as engine.max_skipped_steps."
            )

    def _step_one(self, name: str, norm: float, iteration: int) -> float:
        """Steps one optimizer; the L2 norm of the update over that of the weights."""
        optimizer, settings, parameters = self._optimizers[name], self._settings[name], self._parameters(name)
        if settings.gradient_clip is not None:
            share = (settings.gradient_clip / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
            for parameter in parameters:
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(share)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(settings.learning_rate, settings.schedule, iteration)
        before = [local_part(p).clone() for p in parameters]
        optimizer.step()
        update = self._total_norm(parameters, [local_part(p) - b for p, b in zip(parameters, before, strict=True)])
        return update / max(self._total_norm(parameters, before), 1e-30)

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
            "loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["optimizers"].keys() != self._optimizers.keys():
            raise ValueError(
                f"the checkpoint's optimizers are {sorted(state['optimizers'])}, the run's {sorted(self._optimizers)}."
            )
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(_divided(state["optimizers"][name], self._parameters(name)))
        self._skipped_in_a_row = state["skipped_in_a_row"]
        if self._loss_scale is not None:
            self._loss_scale.load_state_dict(state["loss_scale"])


def _divided(state: dict[str, Any], parameters: list[nn.Parameter]) -> dict[str, Any]:
    """An optimizer's state with what is stored read, and what is shaped like its parameter sharded like it."""
    moments = {}
    for index, kept in state["state"].items():
        like = parameters[index]
        read = {key: as_read(value) for key, value in kept.items()}
        moments[index] = {key: divided_like(v, like) if _is_like(v, like) else v for key, v in read.items()}
    return {**state, "state": moments}


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
