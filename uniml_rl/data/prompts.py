"""Where prompts come from: the configuration blocks, each of which builds its stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator

from modalities.errors import UserError, did_you_mean
from modalities.samples import Prompt
from modalities.settings import Settings
from uniml_rl.data.files import Record, read_records
from uniml_rl.data.streams import DrawnPrompt, MixedPromptStream, PromptStream, RecordPromptStream

__all__ = [
    "DrawnPrompt",
    "FilePromptsConfig",
    "MixedPromptStream",
    "PromptStream",
    "ReasoningGymPromptsConfig",
]

_TEXT_FIELDS = ("prompt", "text", "caption", "txt", "question")


def _check_template(template: str | None) -> str | None:
    if template is None:
        return None
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r} is no format string: {error}; a literal brace is written twice") from None
    if not fields:
        raise ValueError(f"template {template!r} holds no {{field}}, so every prompt would be the same")
    if any(not field or field[0].isdigit() or "._" in field for field in fields):
        raise ValueError(f"template {template!r}: placeholders are names of the record's fields, such as {{text}}")
    return template


class FilePromptsConfig(Settings):
    """Prompts from text files, JSON lines or webdataset shards."""

    type: Literal["file"] = "file"
    """Reads files."""
    path: str | list[str] = Field(min_length=1)
    """One or several files, read in order. Wildcards (`data/*.txt`) and braces (`shard-{000..011}.tar`) are expanded;
    `bundled:` names the repository's own `assets` folder (`bundled:prompts/image_train.txt`)."""
    format: Literal["auto", "txt", "jsonl", "webdataset"] = "auto"
    """`txt`: one prompt per line, its field is `text`. `jsonl`: one JSON object per line. `webdataset`: tar shards whose
    members `KEY.txt`, `KEY.json`, `KEY.png` ... make one record; the fields are the JSON object's and one per ending.
    `auto` goes by the file's ending (.txt, .jsonl, .tar)."""
    text_field: str | None = None
    """Field that holds the prompt; None takes the first that exists of prompt, text, caption, txt, question."""
    negative_field: str | None = None
    """Field that holds the negative prompt; a record without it uses the policy's own."""
    template: str | None = None
    """A Python format string over the record's fields that makes the prompt, such as `"Write a story about {text}"`."""
    shuffle: bool = True
    """A new order in every epoch, drawn from the run's seed; off reads in file order."""
    skip: int = Field(default=0, ge=0)
    """Leaves out the first N records, for example those that evaluation uses."""
    limit: int | None = Field(default=None, ge=1)
    """Uses at most N records after `skip`; None uses all."""

    _template = field_validator("template")(_check_template)

    def build(self, seed: int) -> PromptStream:
        """The stream; every record is read and checked now. Raises UserError that names the file and place."""
        raise NotImplementedError


class ReasoningGymPromptsConfig(Settings):
    """Puzzles that reasoning-gym generates and can verify."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Generates puzzles."""
    dataset: str
    """Name of a reasoning-gym dataset, such as `chain_sum`."""
    size: int = Field(default=1000, ge=1)
    """Number of puzzles in an epoch."""
    seed: int = 0
    """Seed of the puzzles themselves; evaluation takes another one."""
    options: dict[str, Any] = {}
    """The dataset's own options, such as `{max_terms: 3}`."""
    template: str = "{question}"
    """A Python format string over `question` that makes the prompt."""
    shuffle: bool = True
    """A new order in every epoch, drawn from the run's seed."""

    _template = field_validator("template")(_check_template)

    def build(self, seed: int) -> PromptStream:
        """The stream; puzzles are generated when drawn. Each record holds `dataset` and the whole `entry`."""
        raise NotImplementedError
