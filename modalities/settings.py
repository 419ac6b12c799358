"""The base of every configuration block: strict, immutable, documented by the docstring under each field."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails


class Settings(BaseModel):
    """A block of the YAML file. Unknown keys are errors; each component owns its block and builds itself from it.

    The string literal under a field is its documentation: the config reference in `docs/` is generated from it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, values: Any) -> Any:
        # Pydantic takes true for 1, and 1 for true; its strict mode would refuse much that YAML may write for a number.
        if not isinstance(values, Mapping):
            return values
        kinds = {field.alias or name: field.annotation for name, field in cls.model_fields.items()}
        wrong = {key: value for key, value in values.items() if _is_true_or_false(kinds.get(key), value) is False}
        if wrong:
            details = [InitErrorDetails(type="bool_type", loc=(key,), input=value) for key, value in wrong.items()]
            raise ValidationError.from_exception_data(cls.__name__, details)
        return {key: _bool_as_word(value, kinds.get(key)) for key, value in values.items()}


def _is_true_or_false(kind: Any, value: Any) -> bool | None:
    """Whether the value is what a key for true or false alone (and null) asks for; None for other keys."""
    members = set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}
    return isinstance(value, bool | None) if bool in members and members <= {bool, type(None)} else None


def _bool_as_word(value: Any, kind: Any) -> Any:
    """`value`, with the word `true` or `false`, which is no number, for a bool where the type `kind` asks for one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bool_as_word(value, arguments[0])
    if origin in (Union, UnionType):
        if isinstance(value, bool):
            return _bool_as_word(value, bool if bool in arguments else int if {int, float} & set(arguments) else None)
        holding = [member for member in arguments if isinstance(value, list) and get_origin(member) in (list, tuple)]
        return _bool_as_word(value, holding[0]) if holding else value
    if isinstance(value, bool) and kind in (int, float):
        return str(value).lower()
    if isinstance(value, Mapping) and origin is dict:
        return {key: _bool_as_word(item, arguments[1]) for key, item in value.items()}
    if isinstance(value, list) and origin in (list, tuple):
        fixed = origin is tuple and Ellipsis not in arguments
        kinds = arguments if fixed and len(arguments) == len(value) else arguments[:1] * len(value)
        return [_bool_as_word(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return value
