"""Small files beside a model's weights, in a folder or in a hub repository alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import RemoteEntryNotFoundError

from modalities.errors import UserError
from modalities.sources import loading


def read_settings(model: Path | str, file: str) -> dict[str, Any] | None:
    """The JSON file of a model's folder (a path) or hub repository (its id); None if the model has no such file.

    Raises UserError if the repository cannot be reached and is not in the cache.
    """
    if isinstance(model, Path):
        path = model / file
        return json.loads(path.read_text()) if path.is_file() else None
    try:
        with loading(model):
            return json.loads(Path(hf_hub_download(model, file)).read_text())
    except UserError as error:
        known_absent = try_to_load_from_cache(model, file) is _CACHED_NO_EXIST
        if known_absent or isinstance(error.__cause__, RemoteEntryNotFoundError):
            return None
        raise
