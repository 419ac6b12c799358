"""Loading models that must be whole: missing weights would be random, a missing vocabulary would be empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from modalities.errors import UserError
from modalities.sources import loading


def load_model(model_class: Any, source: Path | str, name: str, *, meta: bool = False, **options: Any) -> nn.Module:
    """`model_class.from_pretrained(source)` of transformers or diffusers; `name` is the source in messages.

    `meta` puts the weights on the meta device: only the headers of their files are read, and every file must be there
    and as long as its header says. Raises UserError for what cannot be loaded, and for weights that no file holds.
    """
    with loading(name):
        model, report = model_class.from_pretrained(
            source, output_loading_info=True, **({"device_map": "meta"} if meta else {}), **options
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model {name!r} holds no weights for {len(missing)} tensors of {type(model).__name__}, for example "
            f"{missing[0]!r}; they would be random."
        )
    loaded: nn.Module = model
    return loaded


def load_tokenizer(tokenizer_class: Any, source: Path | str, name: str, **options: Any) -> Any:
    """`tokenizer_class.from_pretrained(source)`; `name` is the source in messages.

    Raises UserError for what cannot be loaded. transformers makes a tokenizer without words of a folder that has none
    of its files: an error too.
    """
    with loading(name):
        tokenizer = tokenizer_class.from_pretrained(source, **options)
    files = sorted(getattr(tokenizer, "vocab_files_names", {}).values())
    if files and isinstance(source, Path) and not any((source / file).is_file() for file in files):
        raise UserError(f"model {name!r} has no tokenizer: none of its files {', '.join(files)} is in {source}.")
    return tokenizer
