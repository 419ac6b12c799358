"""Named weight sets of a policy: the current weights, a reference, an old policy, an exponential moving average."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modalities.lora import adapter_switched, is_untrained
from modalities.shards import copy_of, divided_like, give_back, is_divided, local_part, shard_of, whole, whole_shape

CURRENT = "current"
_ADAPTER_OFF = "adapter_off"


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read anew each time they are asked for, and whose shapes are known without."""

    @abstractmethod
    def shape(self, key: str) -> torch.Size:
        """Of one of them."""

    @abstractmethod
    def under(self, place: str) -> LazyTensors:
        """Those whose names begin with `place`, under what follows it."""


def under(tensors: Mapping[str, Tensor], place: str) -> Mapping[str, Tensor]:
    """Those whose names begin with `place`, under what follows it; lazy ones stay so."""
    if isinstance(tensors, LazyTensors):
        return tensors.under(place)
    return {key.removeprefix(place): value for key, value in tensors.items() if key.startswith(place)}


class WeightSets:
    """Copies of the trainable parameters of some modules under names, swapped in on request.

    Only trainable parameters are copied, shard by shard, so an adapter's sets are small and a sharded module's sets are
    sharded. The reference of an adapter that was never trained is no copy at all: it is the adapter switched off.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules = dict(modules)
        self._sets: dict[str, dict[str, Tensor]] = {}
        self._switched_off: set[str] = set()
        self._active = CURRENT
        self._live: dict[str, Tensor] = {}  # the current weights while another set is in their place

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by `module.parameter` name; of sharded modules the shards."""
        for module in self.modules.values():
            give_back(module)
        found = {
            f"{module_name}.{name}": parameter
            for module_name, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        for tensors in self._sets.values():  # kept or restored before an engine sharded the modules
            tensors |= {k: divided_like(v, found[k]) for k, v in tensors.items() if not is_divided(v)}
        return found

    def names(self) -> list[str]:
        """The sets that exist, "current" first."""
        return [CURRENT, *sorted(self._switched_off | set(self._sets))]

    def keep(self, name: str) -> None:
        """Makes or refreshes the set `name` from the current weights."""
        if name == CURRENT:
            raise ValueError("the current weights are kept by being there.")
        self._refuse_while_swapped()
        self._sets.pop(name, None)
        self._switched_off.discard(name)
        parameters = self.parameters()
        untrained = all(is_untrained(module) for module in self.modules.values())
        if name == "reference" and untrained and all("lora_" in key for key in parameters):
            self._switched_off.add(name)
        else:
            self._sets[name] = {key: copy_of(value) for key, value in parameters.items()}

    def drop(self, name: str) -> None:
        """Forgets a set; nothing happens if it does not exist."""
        self._refuse_while_swapped()
        self._sets.pop(name, None)
        self._switched_off.discard(name)

    @torch.no_grad()
    def average(self, name: str, decay: float) -> None:
        """name <- decay * name + (1 - decay) * current; makes the set from the current weights if it is new."""
        self._refuse_while_swapped()
        if name in self._switched_off:
            # An adapter switched off is the adapter with B = 0; only as such does it have an average.
            self._switched_off.discard(name)
            self._sets[name] = {key: copy_of(value) for key, value in self.parameters().items()}
            for key, tensor in self._sets[name].items():
                if "lora_B" in key:
                    local_part(tensor).zero_()
        if name not in self._sets:
            self.keep(name)
            return
        for key, parameter in self.parameters().items():
            local_part(self._sets[name][key]).lerp_(local_part(parameter), 1 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Within the context the modules compute with the set `name`, whatever was in use outside.

        Nothing is copied, except between the shards of sharded modules. Meant for computing without gradient: a
        backward pass must end before the context does. Raises KeyError if the set was never kept.
        """
        if name not in self.names():
            raise KeyError(f"no weight set {name!r} was kept; there are {self.names()}.")
        outside = self._active
        self._put_in_place(name)
        try:
            with adapter_switched(list(self.modules.values()), on=name not in self._switched_off):
                yield
        finally:
            self._put_in_place(outside)

    def _put_in_place(self, name: str) -> None:
        parameters = self.parameters()
        if not self._live and name in self._sets:
            self._live = {key: _taken_out(parameter) for key, parameter in parameters.items()}
        if self._live:
            for key, tensor in self._sets.get(name, self._live).items():
                _put(parameters[key], tensor)
            if name not in self._sets:
                self._live = {}
            torch.clear_autocast_cache()  # else autocast goes on with the casts of the weights that were here
        self._active = name

    def _refuse_while_swapped(self) -> None:
        if self._active != CURRENT:
            raise RuntimeError(f"weight sets cannot change while {self._active!r} is in use.")

    def state(self) -> dict[str, Tensor]:
        """The current trainable weights and every kept set, as `set/module.parameter`."""
        self._refuse_while_swapped()
        state = {f"{CURRENT}/{key}": shard_of(parameter) for key, parameter in self.parameters().items()}
        for name, tensors in self._sets.items():
            state |= {f"{name}/{key}": value for key, value in tensors.items()}
        for name in self._switched_off:
            state[f"{name}/{_ADAPTER_OFF}"] = torch.ones(())
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state`, whose tensors are asked for one at a time, in their order.

        Tensors may be sharded among all processes while the modules are not; then all call it. Raises ValueError that
        names missing and unexpected keys, or unequal shapes, before anything changes.
        """
        self._refuse_while_swapped()
        parameters = self.parameters()
        keys: dict[str, list[str]] = {CURRENT: []}
        switched_off = set()
        for full_key in state:
            name, _, key = full_key.partition("/")
            if key == _ADAPTER_OFF:
                switched_off.add(name)
            else:
                keys.setdefault(name, []).append(key)
        for name, own in keys.items():
            missing, unexpected = parameters.keys() - set(own), set(own) - parameters.keys()
            if missing or unexpected:
                raise ValueError(
                    f"weight set {name!r} does not fit the model: missing {sorted(missing)[:5]}, "
                    f"unexpected {sorted(unexpected)[:5]}."
                )
            unequal = [key for key in own if _shape(state, f"{name}/{key}") != whole_shape(parameters[key])]
            if unequal:
                raise ValueError(f"weight set {name!r} does not fit the model: other shapes for {sorted(unequal)[:5]}.")
        for key in keys.pop(CURRENT):
            local_part(parameters[key]).copy_(local_part(put_like(state[f"{CURRENT}/{key}"], parameters[key])))
        self._sets = {
            name: {key: copy_of(put_like(state[f"{name}/{key}"], parameters[key])) for key in own}
            for name, own in keys.items()
        }
        self._switched_off = switched_off


def _shape(tensors: Mapping[str, Tensor], key: str) -> torch.Size:
    return tensors.shape(key) if isinstance(tensors, LazyTensors) else whole_shape(tensors[key])


def put_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor sharded as the parameter is, or whole as it is; one that is sharded in another way all ask for."""
    alike = type(shard_of(tensor)) is type(shard_of(parameter))
    return divided_like(tensor if alike else whole(tensor), parameter)


def _taken_out(parameter: nn.Parameter) -> Tensor:
    # A sharded module computes from one buffer that its parameters are views of, so another tensor cannot replace them.
    return copy_of(parameter) if is_divided(parameter) else parameter.data


def _put(parameter: nn.Parameter, tensor: Tensor) -> None:
    if is_divided(parameter):
        local_part(parameter).copy_(local_part(tensor))
    else:
        parameter.data = tensor
