"""The table of algorithms by name. A new one that recombines parts is one more row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from modalities.errors import UserError, did_you_mean
from uniml_rl.algorithms.settings import AlgorithmSettings

PRESETS: dict[str, dict[str, Any]] = {
    # Schulman et al. 2017, in the form used on language models (Ouyang et al. 2022): docs/algorithms/ppo.md
    "ppo": {
        "advantage": {"type": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
        "aggregation": {"mode": "token_mean"},
        "value": {"clip": 0.2},
        "epochs": 4,
    },
    # Shao et al. 2024: docs/algorithms/grpo.md
    "grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.04, "estimator": "k2", "placement": "loss"},
        "aggregation": {"mode": "sequence_mean_token_mean"},
    },
    # Black et al. 2023: docs/algorithms/ddpo.md
    "ddpo": {
        "advantage": {"type": "running_prompt", "buffer_size": 16, "min_count": 16, "epsilon": 1e-6, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Liu et al. 2025 (Flow-GRPO): docs/algorithms/flow_grpo.md
    "flow_grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.04, "estimator": "gaussian", "placement": "loss"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
}


def merge_preset(block: Mapping[str, Any] | str) -> dict[str, Any]:
    """The preset that `block["name"]` picks, with the block's other keys laid over it. A bare name is that preset.

    Blocks merge key by key; a block whose `type` changes replaces the preset's whole, and null removes a part.
    Raises UserError if the name is missing or unknown.
    """
    given: Any = {"name": block} if isinstance(block, str) else block
    if not isinstance(given, Mapping):
        raise UserError(f"algorithm: {given!r} is neither a name nor a block with a name.")
    name = given.get("name")
    if name not in PRESETS:
        raise UserError(
            f"algorithm.name {name!r}: allowed are {', '.join(sorted(PRESETS))}{did_you_mean(str(name), PRESETS)}"
        )
    return _merge(PRESETS[name], given)


def resolve_algorithm(block: Mapping[str, Any] | str | AlgorithmSettings) -> AlgorithmSettings:
    """The settings of an `algorithm` block: its preset, overridden by the block. Resolved settings stay as they are.

    Raises UserError that names each wrong key, its value and what is allowed.
    """
    if isinstance(block, AlgorithmSettings):
        return block
    merged = merge_preset(block)
    try:
        return AlgorithmSettings.model_validate(merged)
    except ValidationError as error:
        raise UserError("\n".join(_explain(dict(detail)) for detail in error.errors())) from None


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("type", old.get("type")) == old.get("type")
        ):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _explain(detail: dict[str, Any]) -> str:
    """One sentence for one of pydantic's errors."""
    location, value = detail["loc"], detail["input"]
    owners: list[type[BaseModel]] = [AlgorithmSettings]
    siblings, path = owners, ["algorithm"]
    for part in location[:-1]:
        tagged = [owner for owner in owners if _type_of(owner) == part]
        if tagged:
            owners = tagged
        else:
            path.append(str(part))
            siblings = owners = [model for owner in owners for model in _models(owner, str(part))]
    key = ".".join([*path, *map(str, location[-1:])])
    if detail["type"] == "extra_forbidden":
        wrong = str(location[-1])
        allowed = sorted({name for owner in owners for name in _keys(owner)})
        readers = [_type_of(owner) for owner in siblings if wrong in _keys(owner)]
        whose = f" of type {_type_of(owners[0])!r}" if _type_of(owners[0]) else ""
        hint = f"; it is a key of type {' and '.join(map(repr, readers))}" if readers else did_you_mean(wrong, allowed)
        return f"{key}: no such key{whose}; allowed are {', '.join(allowed)}{hint}"
    if detail["type"] == "union_tag_invalid":
        allowed = [str(_type_of(model)) for owner in owners for model in _models(owner, str(location[-1]))]
        tag = value["type"]
        return f"{key}.type {tag!r}: allowed are {', '.join(allowed)}{did_you_mean(str(tag), allowed)}"
    message = f"{key}: {detail['msg'].removeprefix('Value error, ')}"
    return message if isinstance(value, Mapping) else f"{message} (given: {value!r})"


def _models(owner: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """The settings classes that the field `name` of `owner` may hold."""
    field = owner.model_fields.get(name)
    found: list[Any] = [field.annotation] if field else []
    while any(get_args(kind) for kind in found):
        found = [part for kind in found for part in (get_args(kind) or (kind,))]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _keys(owner: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in owner.model_fields.items()]


def _type_of(owner: type[BaseModel]) -> str | None:
    return owner.model_fields["type"].default if "type" in owner.model_fields else None
