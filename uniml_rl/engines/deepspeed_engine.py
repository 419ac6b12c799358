"""DeepSpeed's ZeRO: optimizer states, gradients and weights divided over ranks, or kept in the CPU's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import model_validator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from modalities.errors import UserError
from modalities.shards import compute_rows_alone, is_divided, rows_of
from uniml_rl.engines.base import PRECISIONS, Splits, StepReport
from uniml_rl.engines.casts import casts_kept
from uniml_rl.engines.deepspeed_start import require_deepspeed
from uniml_rl.engines.distributed import DistributedEngine, digest_of
from uniml_rl.engines.groups import end, join
from uniml_rl.engines.lockstep import Lockstep
from uniml_rl.engines.loss_scale import LossScale
from uniml_rl.engines.optimizers import OptimizerSettings, learning_rate_at
from uniml_rl.engines.ranks import exchanging, launched
from uniml_rl.engines.settings import EngineSettings
from uniml_rl.engines.zero_module import ZeroModule, saving_no_weights, sum_of_squares
from uniml_rl.engines.zero_state import moments_of, put_moments


class DeepSpeedEngineConfig(EngineSettings):
    """DeepSpeed, in one process or in several that a launcher starts (docs/scaling.md)."""

    type: Literal["deepspeed"] = "deepspeed"
    """Name of the engine."""
    zero: Literal[1, 2, 3] = 2
    """What is divided over all processes: 1 the optimizer's state; 2 gradients, too; 3 weights, too."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What is kept in the CPU's memory: optimizer is the optimizer's state, which then steps on the CPU, and from
    `zero: 2` on gradients; parameters is weights, too, and needs `zero: 3`."""
    rollout_weights: Literal["auto", "gathered", "sharded"] = "auto"
    """How weights that `zero: 3` divides sample: gathered collects them once per rollout, sharded anew in each forward
    pass, for models that do not fit whole; auto is gathered if whole weights and the cache fit, and says so."""

    @model_validator(mode="after")
    def _only_divided_weights_are_gathered(self) -> DeepSpeedEngineConfig:
        if self.zero < 3 and self.rollout_weights != "auto":
            raise ValueError(f"rollout_weights: with zero: {self.zero} weights are whole; remove it or take zero: 3")
        if self.zero < 3 and self.offload == "parameters":
            raise ValueError(f"offload: parameters: zero: {self.zero} keeps weights where it computes; take zero: 3")
        return self

    def require(self) -> None:
        require_deepspeed()

    def require_optimizer(self, settings: OptimizerSettings) -> None:
        if settings.type not in ("adamw", "sgd"):
            raise UserError(
                f"type: {settings.type} reads each weight as a tensor of its own, and engine.type: deepspeed gives an "
                "optimizer one long vector of them; use adamw or sgd, or engine.type: torch."
            )

    def splits(self, world_size: int) -> Splits:
        """What `world_size` processes divide, and what of it does not lie where they compute."""
        parameters, gradients, optimizer = (world_size if self.zero >= stage else 1 for stage in (3, 2, 1))
        offloaded = {"none": 0, "optimizer": min(self.zero, 2), "parameters": 3}[self.offload]
        on_cpu = ("optimizer", "gradients", "parameters")[: offloaded if self.resolve_device() != "cpu" else 0]
        return Splits(parameters, gradients, optimizer, frozenset(on_cpu), steps_a_copy=True)

    def build(self) -> DeepSpeedEngine:
        """The engine; sets the number of threads and joins the other processes.

        Raises UserError if DeepSpeed is missing or not of a known version.
        """
        self.require()
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        launch, device = launched(), self.resolve_device()
        made = join(launch, device, self.timeout_seconds)
        engine = DeepSpeedEngine(
            device,
            self.zero,
            self.offload,
            self.rollout_weights != "sharded",
            self.precision,
            self.max_skipped_steps,
        )
        engine.ends_group = made and launch.world_size == 1
        return engine


class DeepSpeedEngine(DistributedEngine):
    """ZeRO over torch's process group, which exists already.

    DeepSpeed computes in float32; precision and loss scale are this project's own, so that all engines round alike.
    Gradients are averaged by DeepSpeed, and multiplied by the number of ranks in the step, since losses are normalised
    over all ranks already. They are exchanged in every backward pass from ZeRO-2 on, and once a step by ZeRO-1.
    """

    ends_group: bool = False
    """Whether torch's process group was made for this engine alone."""

    def __init__(
        self,
        device: str,
        zero: int,
        offload: str = "none",
        gathered_rollouts: bool = True,
        precision: str = "fp32",
        max_skipped_steps: int = 5,
    ) -> None:
        super().__init__(device, precision, max_skipped_steps)
        self.zero, self.offload, self.gathered_rollouts = zero, offload, gathered_rollouts
        self.passes_together, self.divides_weights = zero > 1, zero == 3
        self._parts: dict[str, list[ZeroModule]] = {}
        self._digest_at_start = b""
        world = dist.group.WORLD
        self._rows = DeviceMesh.from_group(world, "cpu") if world is not None and self.world_size > 1 else None

    @property
    def _all_parts(self) -> list[ZeroModule]:
        return list(chain.from_iterable(self._parts.values()))

    def close(self) -> None:
        try:
            self._detach()
        finally:
            if self.ends_group:
                end()

    def _detach(self) -> None:
        for part in self._all_parts:
            part.detach()
        self._parts = {}

    def attach(self, optimizers: Mapping[str, tuple[Mapping[str, nn.Module], OptimizerSettings]]) -> None:
        self._detach()
        self._skipped_in_a_row = 0
        self._modules = {f"{name}.{part}": m for name, (parts, _) in optimizers.items() for part, m in parts.items()}
        self._settings = {name: settings for name, (_, settings) in optimizers.items()}
        # Taken before DeepSpeed hands out rank 0's weights, which would hide that others had different ones.
        self._digest_at_start = self._digest_of_whole_weights()
        types = {PRECISIONS[self.precision]}
        for module in self._modules.values():
            types |= {parameter.dtype for parameter in module.parameters()}
            if self.passes_together:
                compute_rows_alone(module)
        self._loss_scale = LossScale() if torch.float16 in types else None
        for name, (modules, settings) in optimizers.items():
            trained = [m for m in modules.values() if self.zero == 3 or any(p.requires_grad for p in m.parameters())]
            with exchanging("dividing weights"):
                self._parts[name] = [self._part(module, settings) for module in trained]
            if not any(part.parameters for part in self._parts[name]):
                raise ValueError(f"optimizer {name!r} has no trainable parameter in {sorted(modules)}.")

    def _part(self, module: nn.Module, settings: OptimizerSettings) -> ZeroModule:
        def optimizer(parameters: list[nn.Parameter]) -> Any:
            # Torch's own on a CPU too, in one pass over its memory: DeepSpeed's Adam would be compiled, for minutes.
            return settings.build(parameters, fused=self.offload != "none")

        return ZeroModule(module, optimizer, self.zero, self.offload, self.device.type)

    def _digest_of_whole_weights(self) -> bytes:
        held = {n: m for n, m in self._modules.items() if not any(is_divided(p) for p in m.parameters())}
        return digest_of(held)

    def _digest_of_weights(self) -> bytes:
        return self._digest_at_start[:16] + self._digest_of_whole_weights()[:16]

    # -- passes ----------------------------------------------------------------------------------------------------

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS[self.precision]
        if dtype == torch.float32:
            return nullcontext()
        # Its cache would keep a cast copy of every divided weight that a pass has gathered.
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=not self.divides_weights)

    @contextmanager
    def sampling(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        sampled = list(modules)
        parts = [part for part in self._all_parts if any(part.module is module for module in sampled)]
        if not self.divides_weights or not parts:
            yield
            return
        with ExitStack() as stack:
            with exchanging("gathering weights"):
                for part in parts:
                    stack.enter_context(part.sampling(self.gathered_rollouts))
            if self.gathered_rollouts:
                stack.enter_context(casts_kept())
            else:
                units = [part.units for part in parts]
                gather = {unit: part.gather for part in parts for unit in part.units}
                give_back = {unit: part.give_back for part in parts for unit in part.units}
                lockstep = Lockstep(
                    units, lambda unit: gather[unit](unit), lambda unit: give_back[unit](unit), self.sum_over_ranks
                )
                stack.enter_context(lockstep.together())
            yield

    def stored(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {key: self._own_rows(tensor) for key, tensor in self.whole(tensors)}

    def _own_rows(self, tensor: Tensor) -> Tensor:
        """Of a whole tensor what this rank writes into a checkpoint, in the machine's memory."""
        return tensor.cpu() if self._rows is None else rows_of(tensor.detach().cpu(), self._rows)

    def backward(self, loss: Tensor) -> None:
        parts = self._all_parts
        with exchanging("summing gradients"), saving_no_weights() if self.divides_weights else nullcontext():
            for part in parts:
                part.begin_backward()
            super().backward(loss)
            for part in parts:
                part.end_backward()

    # -- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, iteration: int) -> StepReport:
        for part in self._all_parts:
            if part.parameters:
                with exchanging("summing gradients"):
                    part.reduce(self.sum_over_ranks)
        return self._step_reduced(iteration)

    def _step_reduced(self, iteration: int) -> StepReport:
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        sums = scale / self.world_size
        touched = {name: [part for part in parts if part.touched] for name, parts in self._parts.items()}
        norms = {name: self._gradient_norm(parts) / sums for name, parts in touched.items()}
        skipped = not all(math.isfinite(norm) for norm in norms.values())
        ratios = {}
        for name, parts in touched.items():
            if skipped:
                for part in parts:
                    part.discard()
            else:
                ratios[name] = self._step_parts(name, parts, norms[name], sums, iteration)
        report = StepReport(norms, ratios, skipped, None if self._loss_scale is None else scale)
        self._count(report)
        return report

    def _gradient_norm(self, parts: list[ZeroModule]) -> float:
        pieces = [piece for part in parts for flat in range(len(part.flats)) for piece in part.gradients(flat)]
        # DeepSpeed skips steps by a norm in float32, so what overflows that has to count as not finite here, too.
        return math.sqrt(self._summed(sum_of_squares(pieces)).float()) if pieces or parts else 0.0

    def _summed(self, squares: Tensor) -> Tensor:
        return self.sum_over_ranks(squares.to(self.device))

    def _step_parts(self, name: str, parts: list[ZeroModule], norm: float, sums: float, iteration: int) -> float:
        """Steps the parts of one optimizer; the L2 norm of the update over that of the weights."""
        settings = self._settings[name]
        share = 1.0 if settings.gradient_clip is None else min(1.0, settings.gradient_clip / (norm + 1e-6))
        rate = learning_rate_at(settings.learning_rate, settings.schedule, iteration)
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in self._parts[name]:
            if part in parts:
                with exchanging("stepping the optimizer"):
                    squares += torch.stack(part.step(rate, share / sums)).to(self.device)
            elif part.parameters:
                squares[1] += sum_of_squares([flat.detach() for flat in part.flats]).to(self.device)
        update, weights = self._summed(squares).sqrt().tolist()
        return float(update / max(weights, 1e-30))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As of one process of PyTorch's engine, so that any engine can go on from it."""
        with exchanging("gathering moments"):
            return super().state_dict() | {"optimizers": {n: self._optimizer_state(n) for n in self._parts}}

    def _optimizer_state(self, name: str) -> dict[str, Any]:
        parts = [part for part in self._parts[name] if part.parameters]
        states = [state for part in parts for state in moments_of(part, self.sum_over_ranks, self._own_rows)]
        group = parts[0].optimizer.param_groups[0] | {"params": list(range(len(states))), "fused": None}
        return {"state": {index: state for index, state in enumerate(states) if state}, "param_groups": [group]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["optimizers"].keys() != self._parts.keys():
            raise ValueError(
                f"the checkpoint's optimizers are {sorted(state['optimizers'])}, the run's {sorted(self._parts)}."
            )
        for name, parts in self._parts.items():
            kept, first = state["optimizers"][name]["state"], 0
            for part in (part for part in parts if part.parameters):
                count = len(part.parameters)
                put_moments(part, [kept.get(index, {}) for index in range(first, first + count)])
                first += count
        super().load_state_dict({**state, "optimizers": {}})
