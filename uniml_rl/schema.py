"""Blocks chosen by `type`, and what a schema allows in words: for messages and for the config reference."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, SerializationInfo, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from modalities.errors import UserError, did_you_mean
from modalities.settings import Settings
from uniml_rl.yaml_files import inline_yaml

COMPONENT_ERROR = "component"
OWN_PACKAGES = ("uniml_rl", "modalities", "rewards")


@dataclass(frozen=True, eq=False)
class TypedBlock:
    """Metadata of a field whose block states its `type`: the settings class of that type validates the other keys."""

    registry: Mapping[str, str]
    what: str
    default: str | None = None

    def import_class(self, name: str) -> type[Settings]:
        """The settings class of a registered name or of a user's own "module:Class".

        Raises UserError: no such name, module or class, a package that is not installed, not a settings class.
        """
        target = self.registry.get(name, name)
        module_name, colon, class_name = target.partition(":")
        if not colon:
            allowed = ", ".join(self.registry) or "none yet"
            raise UserError(f"must be one of {allowed}, or your own 'module:Class'{did_you_mean(name, self.registry)}")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name not in self.registry and f"{module_name}.".startswith(f"{missing}."):
                raise UserError(
                    f"there is no module {missing!r}; start the command in the folder that holds it, or put that "
                    "folder on PYTHONPATH"
                ) from None
            if missing.split(".")[0] in OWN_PACKAGES:
                raise
            raise UserError(f"needs the package {missing!r}: `pip install {missing}`") from None
        found = getattr(module, class_name, None)
        if not (isinstance(found, type) and issubclass(found, Settings)):
            classes = [
                key for key, item in vars(module).items() if isinstance(item, type) and issubclass(item, Settings)
            ]
            raise UserError(
                f"module {module_name!r} has no class {class_name!r} that derives from modalities.settings.Settings"
                f"{did_you_mean(class_name, classes)}"
            )
        return found

    def class_of(self, values: Any) -> type[Settings] | None:
        """The settings class that a block's values ask for; None if they ask for none that exists."""
        if isinstance(values, Settings):
            return type(values)
        name = values.get("type", self.default) if isinstance(values, Mapping) else None
        try:
            return self.import_class(name) if isinstance(name, str) else None
        except UserError:
            return None

    def types_with(self, key: str) -> list[str]:
        """The registered types whose blocks have the key."""
        classes = {name: self.class_of({"type": name}) for name in self.registry}
        return [name for name, found in classes.items() if found is not None and key in keys_of(found)]

    def type_of(self, block: Settings) -> str:
        """The `type` under which a validated block is found again."""
        own = f"{type(block).__module__}:{type(block).__qualname__}"
        return next((name for name, target in self.registry.items() if target == own), own)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def serialize(block: Settings, info: SerializationInfo) -> dict[str, Any]:
            values = block.model_dump(mode=info.mode, by_alias=info.by_alias)
            return {"type": self.type_of(block), **{key: item for key, item in values.items() if key != "type"}}

        return core_schema.with_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(serialize, info_arg=True),
        )

    def _validate(self, values: Any, info: ValidationInfo) -> Settings:
        if isinstance(values, Settings):
            return values
        if not isinstance(values, Mapping):
            raise PydanticCustomError(COMPONENT_ERROR, "{reason}", {"reason": f"must be {_describe_block(self)}"})
        name = values.get("type", self.default)
        try:
            if not isinstance(name, str):
                wanted = "must be" if "type" in values else "required:"
                raise UserError(f"{wanted} one of {', '.join(self.registry)}, or your own 'module:Class'")
            block = self.import_class(name)
        except UserError as error:
            raise mistake_at(("type",), str(error), values.get("type", {})) from None
        # A class that declares its own `type` gets it, unless it was found by its import path.
        states_type = "type" in block.model_fields and name in self.registry
        rest = {key: value for key, value in values.items() if key != "type"} | ({"type": name} if states_type else {})
        return block.model_validate(rest, context=info.context)


def mistake_at(location: tuple[str | int, ...], message: str, value: Any) -> ValidationError:
    """What a validator raises for a mistake deeper inside its value, so that the message names that key and line."""
    reason = PydanticCustomError(COMPONENT_ERROR, "{reason}", {"reason": message})
    details = InitErrorDetails(type=reason, loc=location, input=value)
    return ValidationError.from_exception_data("mistake", [details])


def typed_block(registry: Mapping[str, str], what: str, default: str | None = None) -> TypedBlock:
    """Marks a field as a block chosen by its `type`: `Annotated[Any, typed_block(REWARDS, "reward")]`.

    `registry` maps names to "module:Class" of settings classes, imported when a block asks for them; a `type` with a
    colon is such a path itself, so a user's own component needs no registration. `default` is the type of a block that
    states none. The dumped block states its `type` again.
    """
    return TypedBlock(registry, what, default)


@dataclass(frozen=True)
class Option:
    """One member of a union: a class, a generic type, a Literal or a TypedBlock, with its constraints."""

    kind: Any
    constraints: Mapping[str, Any]

    def model(self, values: Any) -> type[BaseModel] | None:
        """The settings class that validates `values`, if this is a block and not of another `type` than theirs."""
        if isinstance(self.kind, TypedBlock):
            return self.kind.class_of(values)
        if not (isinstance(self.kind, type) and issubclass(self.kind, BaseModel)):
            return None
        other_type = isinstance(values, Mapping) and not self.has_tag(values.get("type"))
        return None if other_type and isinstance(values.get("type"), str) else self.kind

    def has_tag(self, tag: Any) -> bool:
        """Whether this is a member of a union told apart by `type`, and `tag` is its type."""
        field = self.kind.model_fields.get("type") if hasattr(self.kind, "model_fields") else None
        return field is not None and tag in get_args(field.annotation)

    def has_label(self, label: Any) -> bool:
        """Whether pydantic may call this member of a union `label`: the one word that a field of it allows."""
        fields = self.kind.model_fields.values() if hasattr(self.kind, "model_fields") else ()
        return any(field.annotation == Literal[label] for field in fields)

    def below(self, key: str | int, values: Any) -> list[Option]:
        """What is allowed at `key` inside a value of this kind; nothing if there is no such key."""
        model, origin, arguments = self.model(values), get_origin(self.kind), get_args(self.kind)
        if model is not None and (field := keys_of(model).get(str(key))) is not None:
            return field_options(field)
        if isinstance(self.kind, TypedBlock) and key == "type":
            return options(str)
        if key == "type" and isinstance(self.kind, type) and issubclass(self.kind, BaseModel):
            field = self.kind.model_fields.get("type")  # of another `type` than this block's, the only one there is
            return field_options(field) if field is not None else []
        if not isinstance(origin, type) or not arguments:
            return []
        if issubclass(origin, Mapping):
            return options(arguments[1]) if isinstance(values, Mapping) and key in values else []
        if isinstance(key, int) and issubclass(origin, Sequence | AbstractSet):
            fixed = issubclass(origin, tuple) and Ellipsis not in arguments and key < len(arguments)
            return options(arguments[key] if fixed else arguments[0])
        return []


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a block by the key that the YAML file has for them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")


def options(annotation: Any, metadata: Sequence[Any] = ()) -> list[Option]:
    """The members of a type, its unions and annotations opened."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return options(inner, (*more, *metadata))
    flat = [part for item in metadata for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
    for item in flat:
        if isinstance(item, TypedBlock):
            return [Option(item, {})]
    if get_origin(annotation) in (Union, UnionType):
        return [option for member in get_args(annotation) for option in options(member, flat)]
    constraints = {name: getattr(item, name) for item in flat for name in CONSTRAINTS if hasattr(item, name)}
    return [Option(annotation, {name: value for name, value in constraints.items() if value is not None})]


def field_options(field: FieldInfo) -> list[Option]:
    """The members of a field's type."""
    return options(field.annotation, field.metadata)


def describe(allowed: Sequence[Option]) -> str:
    """What a field allows, in words: `a whole number >= 1 or null`."""
    literals = [option.kind for option in allowed if get_origin(option.kind) is Literal]
    words = list(dict.fromkeys(word for kind in literals for word in get_args(kind)))
    others = [_describe(option) for option in allowed if get_origin(option.kind) is not Literal]
    literal = [f"one of {', '.join(map(_word, words))}" if len(words) > 1 else _word(words[0])] if words else []
    return " or ".join(dict.fromkeys(literal + others)) or "anything"


def example(allowed: Sequence[Option]) -> str:
    """A value of that kind as one would write it in YAML; `...` where only the user can know."""
    if not allowed:
        return "..."
    kind, model = allowed[0].kind, allowed[0].model({})
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if isinstance(kind, TypedBlock):
        return f"{{type: {next(iter(kind.registry), 'module:Class')}}}"
    if origin is Literal:
        return str(arguments[0])
    if kind in (int, float):
        return str(kind(_number_within(allowed[0].constraints)))
    if model is not None:
        required = [f"{key}: ..." for key, field in keys_of(model).items() if field.is_required()]
        return "{" + (", ".join(required) or "...") + "}"
    if origin in (list, tuple, set):
        members = arguments if origin is tuple else arguments[:1]
        return "[" + ", ".join(example(options(item)) for item in members if item is not Ellipsis) + "]"
    return {bool: "true", dict: "{name: ...}"}.get(origin, "...")


def _number_within(limits: Mapping[str, Any]) -> float:
    low, high = limits.get("ge", limits.get("gt", -math.inf)), limits.get("le", limits.get("lt", math.inf))
    middle = (low + high) / 2 if math.isfinite(low + high) else low + 1 if math.isfinite(low) else high - 1
    inside = low < 1 < high or 1 in (limits.get("ge"), limits.get("le"))
    return 1 if inside else limits.get("ge", limits.get("le", middle))


NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
BOUNDS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}", "multiple_of": "a multiple of {}"}


def _describe(option: Option) -> str:
    kind, limits = option.kind, option.constraints
    model = option.model({})
    if isinstance(kind, TypedBlock):
        return _describe_block(kind)
    if model is not None:
        return f"a block with the keys {', '.join(keys_of(model))}"
    if kind in (None, NoneType):
        return "null"
    if kind not in NAMES:
        return _describe_collection(kind, _size(limits, ""))
    bounds = " and ".join(text.format(f"{limits[name]:g}") for name, text in BOUNDS.items() if name in limits)
    text = f"{NAMES[kind]} {bounds}".rstrip() + _size(limits, " characters")
    return text + (f" that matches {limits['pattern']}" if "pattern" in limits else "")


def _size(limits: Mapping[str, Any], unit: str) -> str:
    low, high = limits.get("min_length"), limits.get("max_length")
    if low == high:
        return "" if low is None else f" of {low}{unit}"
    words = [f"at {word} {bound}" for word, bound in (("least", low), ("most", high)) if bound is not None]
    return f" of {' and '.join(words)}{unit.rstrip('s') if words[-1].endswith(' 1') else unit}"


def _describe_collection(kind: Any, size: str) -> str:
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return "anything"
    if not isinstance(origin, type) or not issubclass(origin, Mapping | Sequence | AbstractSet):
        return getattr(kind, "__name__", str(kind))
    if issubclass(origin, Mapping):
        return f"a mapping{size}" + (f" from names to {describe(options(arguments[1]))}" if arguments else "")
    if issubclass(origin, tuple) and arguments and Ellipsis not in arguments:
        return f"a list of {len(arguments)}: {', '.join(describe(options(item)) for item in arguments)}"
    return f"a list{size}" + (f", each {describe(options(arguments[0]))}" if arguments else "")


def _describe_block(block: TypedBlock) -> str:
    return f"a block whose `type` is one of {', '.join(block.registry) or 'none yet'}, or your own 'module:Class'"


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, str) else inline_yaml(value)
