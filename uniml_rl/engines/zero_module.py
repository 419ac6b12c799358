"""One module in DeepSpeed's hands: where its parts are, and everything that DeepSpeed does not promise to keep.

DeepSpeed's own `forward`, `backward` and `step` serve one model with a loss of its own, and passes whose number it
counts. Here several modules may train under one loss, each of any number of passes, so each has a DeepSpeed engine, and
what these would do around a pass is called for all of them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.opening import put_undivided
from modalities.shards import blocks_of, is_divided, whole_shape
from uniml_rl.engines.deepspeed_start import start

_LINEAR = F.linear
"""Torch's own, which a pass replaces."""
_ROOT = "root"
"""Stands for the pass of the whole module among the sub-modules that a parameter is in use by."""
_BUCKET_ELEMENTS = 32 << 20
"""Elements of the gradients that one exchange sums: 128 MiB in float32."""


class Fragment(NamedTuple):
    """Elements of a parameter in a flat tensor of this rank's."""

    parameter: int  # its number among the module's trainable ones
    flat: int
    start: int  # in the flat tensor
    offset: int  # in the parameter
    size: int


def keys_of(stage: int, offload: str) -> dict[str, Any]:
    """DeepSpeed's own configuration: float32, each step asked for, nothing that another rank cannot follow."""
    # Small parameters are divided, too, and nothing is fetched ahead: the passes of a policy differ from call to call.
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": offload != "none" and stage < 3,
        "overlap_comm": False,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
        "memory_efficient_linear": False,  # it would replace torch's function for good; see `saving_no_weights`
        "stage3_param_persistence_threshold": 0,
    }
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,  # the engine clips, by the norm over all modules of an optimizer
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's own steps what is offloaded
        "zero_optimization": zero,
    }


def divide(module: nn.Module, deepspeed: Any, keys: dict[str, Any], device: str) -> None:
    """Divides a module that is whole, in whatever memory: each parameter comes to the device alone.

    DeepSpeed's `initialize` would move the whole module there first.
    """
    if not any(is_divided(parameter) for parameter in module.parameters()):
        deepspeed.zero.Init(module=module, config_dict_or_path=keys, dtype=next(module.parameters()).dtype)
        put_undivided(module, device)


def require_no_single_number(module: nn.Module) -> None:
    """Raises UserError for what DeepSpeed cannot send from rank 0 to the others."""
    if numbers := [name for name, parameter in module.named_parameters() if parameter.ndim == 0]:
        raise UserError(
            f"engine.type: deepspeed cannot train {type(module).__name__}, in which {', '.join(numbers)} is a single "
            "number; take type: torch, which can with every `shard`."
        )


class ZeroModule:
    """A module, the part of its optimizer that is here, and DeepSpeed's engine around both.

    Without a trainable parameter there is no optimizer; under ZeRO-3 its weights are divided all the same.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], Any],
        stage: int,
        offload: str,
        device: str,
    ) -> None:
        require_no_single_number(module)
        self.module, self.stage = module, stage
        self.offloads = offload != "none"
        self.parameters: list[Any] = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.sizes = [whole_shape(parameter) for parameter in self.parameters]
        self.touched = False  # by a backward pass of this optimizer step, on any rank
        optimizer = make_optimizer(self.parameters) if self.parameters else None
        deepspeed, keys = start(device), keys_of(stage, offload)
        if stage == 3:
            divide(module, deepspeed, keys, device)
        self._engine = deepspeed.initialize(model=module, optimizer=optimizer, config=keys, dist_init_required=False)[0]
        self.zero: Any = self._engine.optimizer
        if stage == 3:
            self._divide()
        self.fragments = list(self._fragments()) if self.parameters else []

    # -- what is where ---------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Torch's own, over the flat tensors."""
        optimizer: torch.optim.Optimizer = self.zero.optimizer
        return optimizer

    @property
    def flats(self) -> list[Tensor]:
        """This rank's trainable weights, each a flat float32 tensor that ends with zeros where sizes do not divide."""
        name = "fp32_partitioned_groups_flat" if self.stage == 3 else "single_partition_of_fp32_groups"
        flats: list[Tensor] = getattr(self.zero, name)
        return flats

    def _fragments(self) -> Iterator[Fragment]:
        for index, parameter in enumerate(self.parameters):
            if self.stage == 3:
                flat, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
                offset = size * parameter.ds_zero_partition_rank
                held = min(size, self.sizes[index].numel() - offset)
                if held > 0:
                    yield Fragment(index, flat, start, offset, held)
            elif (mapping := parameter._hp_mapping) is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                yield Fragment(index, mapping.param_group_index, here.start, there.start, here.numel)

    def gradients(self, flat: int) -> list[Tensor]:
        """The gradient of a flat tensor in pieces, as DeepSpeed averaged it over the ranks."""
        if self.offloads:
            gradient = self.flats[flat].grad
            return [] if gradient is None else [gradient]
        pieces: list[Tensor] = self.zero.averaged_gradients[flat]
        return pieces

    # -- a step ----------------------------------------------------------------------------------------------------

    def reduce(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """After the last backward pass of a step: `touched` and `gradients` are what all ranks have made of it."""
        if self.stage > 1:
            if self.touched:
                self.zero.finalize_gradient_accumulation_boundary()
            return
        used = sum_over_ranks(torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.long)).tolist()
        self.touched = any(used)
        for parameter, ranks in zip(self.parameters, used, strict=True):
            if ranks and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.touched:
            self.zero.set_gradient_accumulation_boundary(True)
            self.zero.reduce_gradients()

    def step(self, learning_rate: float, factor: float) -> tuple[Tensor, Tensor]:
        """Steps the optimizer with `factor` times the gradient; the sums of squares here of update and weights."""
        self.zero.refresh_fp32_params()  # the module's weights count, whoever has put them there
        before = [flat.detach().clone() for flat in self.flats]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.zero.override_loss_scale(1 / factor)
        self.zero.step()
        self.zero.zero_grad()
        self._forget()
        update = [flat.detach() - old for flat, old in zip(self.flats, before, strict=True)]
        return sum_of_squares(update), sum_of_squares(before)

    def discard(self) -> None:
        """Forgets the gradient."""
        self.zero.zero_grad()
        if self.offloads:
            self.zero.reset_cpu_buffers()
        self.zero.averaged_gradients = dict.fromkeys(self.zero.averaged_gradients)
        if self.stage < 3:
            self.zero.all_grad_tensors = dict.fromkeys(self.zero.all_grad_tensors)
            self.zero.micro_step_id = -1
        self._forget()

    def _forget(self) -> None:
        """What the next step must not find: in the CPU's memory DeepSpeed writes over gradients, or adds to them."""
        self.touched = False
        if self.offloads:
            for flat in self.flats:
                if flat.grad is not None:
                    flat.grad.zero_()
            if self.stage < 3:
                self.zero.accumulated_grads_in_cpu.clear()

    # -- passes ----------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Before a backward pass through this and other modules."""
        if self.stage == 3:
            if self._gathered_for_backward:
                self.gather(self.module)
            if self.parameters and not self.touched:
                # DeepSpeed writes a step's first gradients over the old ones and adds the others; a parameter that the
                # first pass leaves out would keep its old one.
                self.zero.grad_partitions_flat_buffer.zero_()
        if self.stage > 1 and self.parameters:
            self.zero.clear_backward_seen_flag()
            if self.stage == 3:
                self.zero.micro_step_id = 1
            self._engine._running_engine_backward = True
            self.zero.enter_backward()

    def end_backward(self) -> None:
        """After it: sums and scatters what is left of the gradients."""
        if self.stage > 1 and self.parameters:
            if self.zero._hooks_fired_this_backward:
                self.touched = True
                self._engine._backward_epilogue()
            else:
                self.zero.exit_backward()
            self._engine._running_engine_backward = False
        if self.stage == 3:
            self._offload.release_backward_leftovers()
            self._gathered_for_backward = False
            self.give_back(self.module)

    # -- ZeRO-3 ----------------------------------------------------------------------------------------------------

    def _divide(self) -> None:
        """What is left of a divided module when DeepSpeed has done its part."""
        self._offload: Any = getattr(self.zero, "parameter_offload", self.zero)
        # Passes of one kind follow passes of another, and ranks that do not sample together need not agree on an order.
        self._offload.fwd_pre_hook.remove()
        blocks = blocks_of(self.module)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        self._weights: dict[nn.Module, list[Any]] = {block: list(block.parameters()) for block in blocks}
        self._weights[self.module] = [p for p in self.module.parameters() if id(p) not in inside]
        self.units = [self.module, *(block for block in blocks if block is not self.module)]
        self._sampling = self._gathered_for_backward = False
        self._passes: list[ExitStack] = []
        self._handles = [
            self.module.register_forward_pre_hook(lambda *_: self._begin_pass(), prepend=True),
            self.module.register_forward_hook(lambda *_: self._end_pass(), always_call=True),
        ]
        for parameter in chain.from_iterable(self._weights.values()):
            # DeepSpeed leaves the elements after the last one as they were in memory; norms would see them.
            part = parameter.ds_tensor.detach()
            part[max(0, parameter.ds_numel - parameter.ds_zero_partition_rank * part.numel()) :] = 0
        if self.parameters:
            self.zero.refresh_fp32_params()

    def _begin_pass(self) -> None:
        if self._sampling:
            return
        # Modules outside of the blocks may be called as often as a rank's own samples need (a head, chunk by chunk),
        # so their weights are gathered once for the whole pass, and, since they are needed again at once, for its
        # backward pass.
        self.gather(self.module)
        self._gathered_for_backward |= torch.is_grad_enabled()
        self._passes.append(ExitStack())
        self._passes[-1].enter_context(saving_no_weights())

    def _end_pass(self) -> None:
        if self._sampling:
            return
        self._passes.pop().close()
        if not torch.is_grad_enabled():
            self.give_back(self.module)

    def gather(self, unit: nn.Module) -> None:
        """Collects the weights of a block, or of the module without its blocks."""
        weights = self._weights[unit]
        if weights:
            weights[0].all_gather(param_list=weights)
        for weight in weights:
            weight.ds_active_sub_modules.add(_ROOT)

    def give_back(self, unit: nn.Module) -> None:
        """Frees what `gather` has collected."""
        for weight in self._weights[unit]:
            weight.ds_active_sub_modules.clear()
            weight.partition()

    @contextmanager
    def sampling(self, gathered: bool) -> Iterator[None]:
        """Within it DeepSpeed does nothing in a pass: weights are whole, or each unit gathers its own."""
        for handle in (*self._offload.forward_hooks, *self._offload.backward_hooks):
            handle.remove()
        self._offload.forward_hooks.clear()
        self._offload.backward_hooks.clear()
        self._sampling, handles = True, []
        if gathered:
            for weights in self._weights.values():
                if weights:
                    weights[0].all_gather(param_list=weights)
        else:
            for unit in self.units:
                handles.append(unit.register_forward_pre_hook(lambda unit, *_: self.gather(unit), prepend=True))
                handles.append(unit.register_forward_hook(lambda unit, *_: self.give_back(unit)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for unit in self._weights:
                self.give_back(unit)
            self._sampling = False
            self._offload._register_deepspeed_module(self.module)

    # -- the end ---------------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Frees what DeepSpeed holds beside the module, and takes its hooks away; divided weights stay divided."""
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        if self.stage == 3:
            for handle in self._handles:
                handle.remove()
            stack: list[nn.Module] = import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
            stack[:] = [each for each in stack if each is not self.module]  # else the module would never be freed
            for part in self.module.modules():
                # Else the next engine would go on with these, which know only this one.
                part.__dict__.pop("pre_bwd_fn", None)
                part.__dict__.pop("post_bwd_fn", None)
        self._engine.destroy()


@contextmanager
def saving_no_weights() -> Iterator[None]:
    """Within it linear layers remember parameters for the backward pass, and not the memory that they are gathered in.

    Torch's own keeps a view of the weight, and so all weights of a pass whole until its backward pass.
    """
    before, F.linear = F.linear, _remembering_linear
    try:
        yield
    finally:
        F.linear = before


def _remembering_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return _linear_function().apply(input, weight, bias)


@cache
def _linear_function() -> Any:
    """DeepSpeed's function with torch's forward pass. Its own rounds twice in half precision, before and after the
    bias: a denoiser's gradients in bf16 were ten times as far from one process's as FSDP's are."""
    theirs: Any = import_module("deepspeed.runtime.zero.linear").LinearFunctionForZeroStage3

    class RememberingLinear(theirs):  # type: ignore[misc]
        @staticmethod
        def forward(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _LINEAR(input, weight, bias)

    return RememberingLinear


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Of all elements, a float64 scalar on their device."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
