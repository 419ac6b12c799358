"""A diffusers pipeline folder: what is in it, loading it, counting its parameters, writing it with another denoiser."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from modalities.errors import UserError, did_you_mean
from modalities.lora import lora_layers, merged_state_dict, save_adapter
from modalities.sources import loading, resolve_model
from modalities.whole_models import load_model, load_tokenizer

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


def empty_components(folder: Path, absent: Container[str]) -> dict[str, Any]:
    """Every component that `load_pipeline` loads, its modules on the meta device, so that only headers are read.

    Components of custom code are left out, and so are those in `absent`. Raises UserError for an incomplete folder.
    """
    import diffusers
    import transformers

    libraries = {"diffusers": diffusers, "transformers": transformers}
    index = read_index(folder)
    signature = inspect.signature(getattr(diffusers, index["_class_name"]).__init__)
    for name, parameter in signature.parameters.items():
        if name != "self" and parameter.default is parameter.empty and name not in index and name not in absent:
            raise UserError(f"model: {str(folder)!r} is incomplete, its {INDEX} names no {name}.")
    components = {}
    for name, entry in index.items():
        if isinstance(entry, list) and entry[0] in libraries and name not in absent:
            library, class_name = entry
            component_class = getattr(libraries[library], class_name, None)
            if component_class is None:
                raise UserError(f"model: {str(folder)!r}: the {library} installed here has no {class_name} for {name}.")
            components[name] = _empty_component(folder, name, component_class)
    return components


def _empty_component(folder: Path, name: str, component_class: Any) -> Any:
    path = folder / name
    if not path.is_dir():
        raise UserError(f"model: {str(folder)!r} is incomplete, it has no folder {name}.")
    if issubclass(component_class, nn.Module):
        component_config(folder, name)
        return load_model(component_class, path, str(path), meta=True)
    if issubclass(component_class, PreTrainedTokenizerBase):
        return load_tokenizer(component_class, path, str(path))
    with loading(str(path)):
        return component_class.from_pretrained(path)


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
