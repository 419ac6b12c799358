"""Tensor parallelism: a language model's weights divided along heads and features, by the plan of its library."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from modalities.attention import attention_that_runs
from modalities.errors import UserError
from modalities.lora import lora_layers
from modalities.opening import put_undivided

_GATHERED = partial(ColwiseParallel, output_layouts=Replicate())
_SPLIT = partial(RowwiseParallel, input_layouts=Replicate())
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": _SPLIT,
}
"""transformers' names of what torch's styles do."""
_ALIKE = "replicated_with_grad_allreduce"
"""Of a norm of each head: the weights are whole, and a process sees the gradient of its own heads."""


def require_plan(causal_lm: PreTrainedModel, ranks: int) -> None:
    """Raises UserError, with the reason, if `ranks` processes cannot divide the model, which may be on the meta device.

    Layers and heads must divide evenly; the rows of the embeddings need not.
    """
    name = type(causal_lm).__name__
    if lora_layers(causal_lm):
        raise UserError("a low-rank adapter cannot be divided along heads; remove `lora`.")
    planned = list(_planned(causal_lm))
    if not any(style.startswith("rowwise") for _, _, style in planned):
        raise UserError(f"transformers has no plan that divides the layers of {name}.")
    for path, layer, style in planned:
        if style != _ALIKE and (style not in _STYLES or not isinstance(layer, nn.Linear | nn.Embedding)):
            raise UserError(
                f"the plan of {name} divides {path} as {style!r}, which is not supported; linear layers and embeddings "
                f"are, as {', '.join(_STYLES)}."
            )
    config: Any = causal_lm.config.get_text_config()
    sizes = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    sizes |= {f"out_features of {p}": layer.out_features for p, layer, s in planned if s == "colwise"}
    sizes |= {f"in_features of {p}": layer.in_features for p, layer, s in planned if s == "rowwise"}
    for what, size in sizes.items():
        if size is not None and size % ranks:
            raise UserError(f"{ranks} processes cannot divide {name} equally, which has {what} = {size}.")


def planned_parameters(causal_lm: PreTrainedModel) -> int:
    """How many parameters of a model with a plan are divided."""
    divided = {
        id(parameter): parameter.numel()
        for _, layer, style in _planned(causal_lm)
        for name, parameter in layer.named_parameters(recurse=False)
        if style.startswith("colwise") or (style in _STYLES and name == "weight")
    }
    return sum(divided.values())


@torch.no_grad()
def divide(causal_lm: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divides the model, in place, over a mesh of one dimension, on which it is whole and alike; nothing is sent.

    Its parts come to the mesh's device, layer by layer, from whatever memory it was in.

    Modules whose gradient is to be summed over the mesh are marked (`has_partial_gradient`). Raises UserError for a
    model that cannot be divided, or whose plan does not compute what the whole model does.
    """
    require_plan(causal_lm, mesh.size())
    expected = _some_logits(causal_lm)
    embedding, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    tied = head.weight is embedding.weight
    for _, layer, style in list(_planned(causal_lm)):
        if style == _ALIKE:
            layer.sums_gradient = True
        else:
            make: ParallelStyle = _STYLES[style]()
            parallelize_module(layer, mesh, make, src_data_rank=None)
    if tied:
        head.weight = embedding.weight
    put_undivided(causal_lm, mesh.device_type)
    if not torch.allclose(_some_logits(causal_lm).to(expected), expected, rtol=1e-2, atol=1e-2 * float(expected.std())):
        raise UserError(
            f"engine.tensor_parallel: the plan of transformers for {type(causal_lm).__name__} does not compute what "
            "the whole model does; take shard: fsdp."
        )


def has_partial_gradient(module: nn.Module) -> bool:
    """Whether each process has the gradient of its own heads for the weights of `module`, which all hold whole."""
    return bool(getattr(module, "sums_gradient", False))


def _planned(causal_lm: PreTrainedModel) -> Iterator[tuple[str, Any, str]]:
    """Path, module (or parameter) and style of everything that the model's plan names."""
    tied = causal_lm.get_input_embeddings().weight is causal_lm.get_output_embeddings().weight
    plan: dict[str, str] = getattr(causal_lm, "tp_plan", None) or {}
    named = {**dict(causal_lm.named_parameters()), **dict(causal_lm.named_modules())}
    found = {path: style for key, style in plan.items() for path in named if _matches(path, key)}
    ends = [p for p in found if named[p] in (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())]
    for path, style in found.items():
        if not (tied and len(ends) == 1 and path in ends):  # weights of both can only be divided alike
            yield path, named[path], style


def _matches(path: str, key: str) -> bool:
    parts, wanted = path.split("."), key.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _some_logits(causal_lm: PreTrainedModel) -> Tensor:
    tokens = torch.arange(2, device=causal_lm.device)[None]
    with attention_that_runs(causal_lm):
        return causal_lm(tokens, use_cache=False).logits.float()
