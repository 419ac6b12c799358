"""The base of every configuration block: strict, immutable, documented by the docstring under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A block of the YAML file. Unknown keys are errors; each component owns its block and builds itself from it.

    The string literal under a field is its documentation: the config reference in `docs/` is generated from it.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True, protected_namespaces=()
    )
