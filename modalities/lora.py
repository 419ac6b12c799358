"""Low-rank adapters on any module, through peft: attach, switch off, merge into plain weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from modalities.errors import UserError, did_you_mean
from modalities.randomness import global_generator_seeded
from modalities.settings import Settings
from modalities.shards import is_zero

ADAPTER = "default"
_ADAPTABLE = (nn.Linear, nn.Conv2d, Conv1D)


class LoraSettings(Settings):
    """A low-rank adapter (Hu et al. 2021): W + (alpha / rank) B A, B starts at zero. Its dropout is 0, always."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update."""
    alpha: float | None = Field(default=None, gt=0)
    """Scale of the update, divided by the rank; None takes the rank itself, a factor of 1."""
    targets: list[str] | None = None
    """Names (or endings of names) of the linear layers to adapt; None takes the policy family's attention and
    feed-forward projections."""


def require_float32_when_trained(dtype: str, lora: LoraSettings | None) -> None:
    """Raises ValueError for frozen weights' dtype on weights that are trained: without an adapter, all of them are."""
    if lora is None and dtype != "float32":
        raise ValueError(
            f"dtype: {dtype} is the type of frozen weights, but without `lora` every weight is trained, in float32. "
            "Remove dtype, or add a `lora` block."
        )


def attach_lora(module: nn.Module, settings: LoraSettings, default_targets: Sequence[str], seed: int) -> None:
    """Freezes `module` and adds a float32 adapter to it in place, initialised from `seed` alone.

    Raises UserError if a target names no layer.
    """
    # Conv1D is GPT-2's linear layer, its weight stored transposed.
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _ADAPTABLE)}
    endings = sorted({name.rsplit(".", 1)[-1] for name in layers})
    matching = []
    for target in settings.targets or default_targets:
        if any(name == target or name.endswith("." + target) for name in layers):
            matching.append(target)
        elif settings.targets is not None:
            raise UserError(
                f"lora.targets: {target!r} names no layer of the model; its layers end in {endings}"
                f"{did_you_mean(target, endings)}."
            )
    if not matching:
        raise UserError(
            f"lora.targets: none of the default targets {list(default_targets)} is in the model; name some of its own: "
            f"{endings}."
        )
    module.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha or settings.rank,  # type: ignore[arg-type]  # peft takes any number
        target_modules=matching,
        lora_dropout=0.0,
    )
    with global_generator_seeded(seed), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft sets it itself, per layer
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    for name, parameter in module.named_parameters():
        is_adapter = "lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()


def lora_layers(module: nn.Module) -> list[LoraLayer]:
    """The adapted layers of `module`, in order."""
    return [layer for layer in module.modules() if isinstance(layer, LoraLayer)]


def is_untrained(module: nn.Module) -> bool:
    """Whether the module has an adapter whose update is still exactly zero (every B is zero)."""
    layers = lora_layers(module)
    return bool(layers) and all(is_zero(layer.lora_B.get_parameter(f"{ADAPTER}.weight")) for layer in layers)


@contextmanager
def adapter_switched(modules: Sequence[nn.Module], on: bool) -> Iterator[None]:
    """Within the context the modules compute with their adapters on, or without them."""
    layers = [layer for module in modules for layer in lora_layers(module)]
    # The flag and not `enable_adapters`, which also flips requires_grad and so would stop training for good.
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = not on
    try:
        yield
    finally:
        for layer, flag in zip(layers, before, strict=True):
            layer._disable_adapters = flag


def merged_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of the plain architecture with the adapter's update added to its weights.

    The sum is made in float32. A base in a half precision rounds it: small updates are lost, and a warning says so.
    """
    adapted = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    state: dict[str, Tensor] = {}
    lossy = False
    for key, value in module.state_dict().items():
        if ".lora_" in key:
            continue
        owner, _, leaf = key.rpartition(".base_layer.")
        layer = adapted.get(owner)
        if layer is None:
            state[key] = value.detach().clone()
            continue
        if leaf == "weight" and not layer._disable_adapters:
            delta = layer.get_delta_weight(ADAPTER).float()  # type: ignore[attr-defined]
            lossy |= value.dtype in (torch.bfloat16, torch.float16)
            value = (value.float() + delta).to(value.dtype)
        state[f"{owner}.{leaf}"] = value.detach().clone()
    if lossy:
        warnings.warn(
            "merging the adapter into half-precision weights rounds away small updates; the adapter beside the export "
            "keeps them exactly.",
            stacklevel=2,
        )
    return state


def save_adapter(
    module: nn.Module, folder: Path, prefix: str = "", whole: Mapping[str, nn.Module] | None = None
) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, which `PeftModel.from_pretrained` loads.

    `prefix` is the name of `module` within the model that they are loaded into, with a dot after it; `whole` are other
    parts of that model by name, saved with all their weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {f"{prefix}{key}": value for key, value in get_peft_model_state_dict(module).items()}
    for name, part in (whole or {}).items():
        named |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
    # The names as PeftModel writes them; it takes an adapter without the prefix for one that lacks every key.
    state = {f"base_model.model.{key}": value.detach().cpu().contiguous() for key, value in named.items()}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: LoraConfig = copy(module.peft_config[ADAPTER])  # type: ignore[operator,index,assignment,arg-type]
    config.modules_to_save = list(whole) if whole else None
    config.save_pretrained(str(folder))
