"""A diffusers pipeline folder: what is in it, loading it, counting its parameters, writing it with another denoiser."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from modalities.errors import UserError, did_you_mean
from modalities.lora import lora_layers, merged_state_dict, save_adapter
from modalities.sources import loading, resolve_model

INDEX = "model_index.json"


def pipeline_folder(model: str) -> Path:
    """The local folder of the pipeline `model`; one that is named by a hub id is fetched into the hub's cache."""
    source = resolve_model(model, kind="diffusers")
    if isinstance(source, Path):
        return source
    from diffusers import DiffusionPipeline

    with loading(model):
        return Path(DiffusionPipeline.download(source))


def read_index(folder: Path) -> dict[str, Any]:
    """The folder's `model_index.json`."""
    return dict(json.loads((folder / INDEX).read_text()))


def pipeline_class(folder: Path, supported: Iterable[str]) -> str:
    """The class that the folder's index names; UserError with the supported list if it is another."""
    supported = sorted(supported)
    name = str(read_index(folder).get("_class_name"))
    if name not in supported:
        raise UserError(
            f"model: {str(folder)!r} is a {name}, which this policy cannot train; supported are {', '.join(supported)}"
            f"{did_you_mean(name, supported)}."
        )
    return name


def component_config(folder: Path, component: str) -> dict[str, Any]:
    """The configuration of a component; UserError if the folder lacks it."""
    name = "scheduler_config.json" if component == "scheduler" else "config.json"
    path = folder / component / name
    if not path.is_file():
        raise UserError(f"model: {str(folder)!r} is incomplete, it has no {component}/{name}.")
    return dict(json.loads(path.read_text()))


def load_pipeline(folder: Path, dtype: torch.dtype, trust_remote_code: bool, **components: Any) -> Any:
    """The pipeline with every component that its index lists; entries that it lists as null stay None."""
    import diffusers

    index = read_index(folder)
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] is None:
            components.setdefault(name, None)
    if trust_remote_code:
        components["trust_remote_code"] = True
    with loading(str(folder)), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # `torch_dtype` has a new name that older releases lack
        pipeline = getattr(diffusers, index["_class_name"]).from_pretrained(
            folder, torch_dtype=dtype, local_files_only=True, **components
        )
    for component, module in pipeline.components.items():
        parameters = module.named_parameters() if isinstance(module, nn.Module) else ()
        if missing := [name for name, parameter in parameters if parameter.is_meta]:
            raise UserError(f"model: {str(folder)!r} is incomplete, {component} lacks the weights {missing[:5]}.")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def empty_module(folder: Path, component: str) -> nn.Module:
    """One component of diffusers' own classes, from its configuration, on the meta device."""
    import diffusers

    config = component_config(folder, component)
    with torch.device("meta"):
        module: nn.Module = getattr(diffusers, config["_class_name"]).from_config(config)
    return module


def frozen_parameters(folder: Path, denoiser: str) -> int:
    """Number of parameters of every component but the denoiser, from the headers of their files."""
    paths = (
        path
        for component, entry in read_index(folder).items()
        if component != denoiser and isinstance(entry, list) and entry[0] is not None
        for path in (folder / component).glob("*.safetensors")
    )
    return sum(_elements(path) for path in paths)


def _elements(path: Path) -> int:
    with loading(str(path)), safe_open(path, framework="pt") as tensors:
        return sum(prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118


def export_pipeline(source: Path, target: Path, component: str, denoiser: nn.Module) -> None:
    """Writes to `target` the pipeline folder `source` with the denoiser's present weights in place of its own.

    Other components are copied as they are. An adapter is merged, and stands by itself in `target/adapter`.
    """
    target.mkdir(parents=True, exist_ok=True)
    for name, entry in read_index(source).items():
        if isinstance(entry, list) and name != component and (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".md", ".txt", ".py"):
            shutil.copy2(path, target / path.name)
    plain = denoiser
    if lora_layers(denoiser):
        save_adapter(denoiser, target / "adapter")
        plain = empty_module(source, component)
        plain.load_state_dict(merged_state_dict(denoiser), assign=True)
    plain.save_pretrained(target / component)  # type: ignore[operator]
