"""From a YAML file to strict settings: one message for all mistakes, the resolved config, what differs between two.

Nothing here knows a component by name; `build.py` brings the schema, `families.py` the registries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import core_schema

from modalities.errors import UserError, did_you_mean
from uniml_rl.schema import Option, TypedBlock, describe, example, field_options, keys_of, options, typed_block
from uniml_rl.yaml_files import COMMAND_LINE, KeyPath, LoadedConfig, dump_yaml, inline_yaml, load_yaml, overlay, shown

__all__ = [
    "LoadedConfig",
    "TypedBlock",
    "difference",
    "load_yaml",
    "overlay",
    "resolved_dump",
    "typed_block",
    "validate",
]

Schema = TypeVar("Schema", bound=BaseModel)


def validate(schema: type[Schema], loaded: LoadedConfig) -> Schema:
    """The settings that the loaded values describe.

    Raises one UserError that lists every mistake as `file:line: key.path: value: what is allowed; did you mean 'x'?`.
    """
    try:
        config = schema.model_validate(loaded.values)
        found = [(path, "must be a number; NaN is none") for path in _nan_paths(config.model_dump(by_alias=True), ())]
    except ValidationError as error:
        found = _problems(error, schema, loaded.values)
    if not found:
        return config
    lines = [str(loaded.error(path, message + _meant(loaded, path))) for path, message in found]
    raise UserError(lines[0] if len(lines) == 1 else "\n  ".join([f"{loaded.path}: {len(lines)} problems", *lines]))


def _meant(loaded: LoadedConfig, path: KeyPath) -> str:
    """For a mistake in a block that only overrides have made: the neighbour that they may have meant."""
    for length in range(1, len(path)):
        *above, name = path[:length]
        block: Any = loaded.values
        for key in above:
            block = block[key]
        if loaded.where(path[:length]) == COMMAND_LINE and isinstance(block, Mapping) and isinstance(name, str):
            return did_you_mean(name, [key for key in block if loaded.where((*above, key)) != COMMAND_LINE])
    return ""


def _problems(error: ValidationError, schema: type[BaseModel], values: Any) -> list[tuple[KeyPath, str]]:
    """Key path and explanation of each mistake that `schema` found in `values`, without pydantic's own words."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors(include_url=False)]
    for item in items:
        if item["type"] == "missing" and isinstance(item["loc"][-1], int):  # the list is too short
            item.update(type="tuple_type", loc=item["loc"][:-1])
    found = dict.fromkeys(_explain(item, _locate(item, schema, values)) for item in items)
    # Of a union's complaints the one deeper inside the value is about the member that was meant.
    inside = {path[:length] for path, _, _ in found for length in range(len(path))}
    return [(path, message) for path, message, wrong_kind in found if not (wrong_kind and path in inside)]


@dataclass(frozen=True)
class _Place:
    """Where a mistake lies in the schema."""

    path: KeyPath
    allowed: list[Option]
    models: list[type[BaseModel]]
    """The blocks that the last key of the path was looked up in."""
    chosen_from: list[TypedBlock]
    """Those of them that a `type` chooses."""


def _locate(item: Mapping[str, Any], schema: type[BaseModel], values: Any) -> _Place:
    """Follows an error's location through schema and values, without pydantic's labels of the members of unions."""
    place, value, location = _Place((), options(schema), [], []), values, item["loc"]
    for key in location:
        below = [option for parent in place.allowed for option in parent.below(key, value)]
        held = key in value if isinstance(value, Mapping) else isinstance(value, list) and key in range(len(value))
        if below or held or (key == location[-1] and item["type"] in ("extra_forbidden", "missing")):
            models = [model for option in place.allowed if (model := option.model(value)) is not None]
            chosen_from = [option.kind for option in place.allowed if isinstance(option.kind, TypedBlock)]
            place, value = _Place((*place.path, key), below, models, chosen_from), value[key] if held else None
        else:
            tagged = [option for option in place.allowed if option.has_label(key)]
            place = replace(place, allowed=tagged or place.allowed)
    return place


def _explain(item: Mapping[str, Any], place: _Place) -> tuple[KeyPath, str, bool]:
    """Key path, explanation, and whether the mistake is a value of the wrong kind."""
    kind, path, allowed, given = item["type"], place.path, place.allowed, item["input"]
    if kind == "extra_forbidden":
        return path, _unknown_key(str(path[-1]), place), False
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        path, given = (*path, "type"), given.get("type", {}) if isinstance(given, Mapping) else given
        allowed = [one for option in allowed for one in option.below("type", None)]
    elif kind == "missing":
        return path, f"required: {describe(allowed)}; for example `{path[-1]}: {example(allowed)}`", False
    elif kind not in get_args(core_schema.ErrorType) or kind in ("value_error", "assertion_error"):
        return path, _shown(given) + str(item.get("ctx", {}).get("error") or item["msg"]), False
    words = [word for option in allowed for word in get_args(option.kind) if isinstance(word, str)]
    nearest = did_you_mean(given, words) if isinstance(given, str) else ""
    return path, f"{_shown(given)}must be {describe(allowed)}{nearest}", True


def _unknown_key(key: str, place: _Place) -> str:
    keys: list[str] = []
    elsewhere: list[str] = []
    for model in place.models:
        for name, field in keys_of(model).items():
            keys.append(name)
            inner = [option.model(None) for option in field_options(field)]
            elsewhere += [f"{name}.{key}" for block in inner if block and key in keys_of(block)]
    nearest = f"; did you mean {elsewhere[0]!r}?" if elsewhere else did_you_mean(key, keys)
    others = "" if nearest else ", ".join(name for block in place.chosen_from for name in block.types_with(key))
    hint = f"; {key!r} is a key of type: {others}" if others else nearest
    return f"unknown key; allowed here: {', '.join(dict.fromkeys(keys)) or 'nothing'}{hint}"


def _shown(value: Any) -> str:
    """`value: ` as a message repeats it; blocks are not repeated."""
    return "" if isinstance(value, BaseModel) else shown(value)


def _nan_paths(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, float) and value != value:
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nan_paths(item, (*path, key))
    elif isinstance(value, list | tuple):
        yield from _nan_paths(dict(enumerate(value)), path)


def resolved_dump(config: BaseModel) -> str:
    """The whole config as YAML, defaults included; loading and validating it again gives an equal config."""
    return dump_yaml(config.model_dump(mode="json", by_alias=True))


def difference(old: Any, new: Any, path: str = "") -> list[str]:
    """What changed between two resolved configs, a line per key: `stages.align.micro_batch: 8 -> 4`.

    Items of lists are told apart by their `name` where all have one.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = []
        for key in dict.fromkeys([*old, *new]):
            below = f"{path}.{key}" if path else str(key)
            if key not in new:
                lines.append(f"{below}: {inline_yaml(old[key])} -> (not there)")
            elif key not in old:
                lines.append(f"{below}: (not there) -> {inline_yaml(new[key])}")
            else:
                lines += difference(old[key], new[key], below)
        return lines
    old_items, new_items = _by_name(old), _by_name(new)
    if old_items is not None and new_items is not None:
        order = difference(list(old_items), list(new_items), f"{path} (order)")
        return order + difference(old_items, new_items, path)
    return [] if old == new and type(old) is type(new) else [f"{path}: {inline_yaml(old)} -> {inline_yaml(new)}"]


def _by_name(items: Any) -> dict[str, Any] | None:
    if not isinstance(items, list) or not all(isinstance(item, Mapping) and "name" in item for item in items):
        return None
    named = {item["name"]: item for item in items}
    return named if items and len(named) == len(items) else None
