"""Optional packages: imported where a reward needs one, with the command that installs it when it is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from modalities.errors import UserError


def need_package(module: str, distribution: str) -> ModuleType:
    """The imported module; a UserError with the pip command if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise UserError(f"This reward needs the package {distribution}: pip install {distribution}") from error
