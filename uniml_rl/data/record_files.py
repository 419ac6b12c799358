"""The keys of every block that reads records from files, and the prompt that each record holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from modalities.errors import UserError, did_you_mean
from modalities.samples import Prompt
from modalities.settings import Settings
from uniml_rl.data.files import read_records
from uniml_rl.data.shards import RawRecord

_TEXT_FIELDS = ("prompt", "text", "caption", "txt", "question")


def check_template(template: str | None) -> str | None:
    """A validator: raises ValueError for a template that fills nothing in."""
    if template is None:
        return None
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"template {template!r} is no format string: {error}; a literal brace is written twice"
        ) from None
    if not fields:
        raise ValueError(f"template {template!r} holds no {{field}}, so every prompt would be the same")
    if any(not field or field[0].isdigit() or "._" in field for field in fields):
        raise ValueError(f"template {template!r}: placeholders are names of the record's fields, such as {{text}}")
    return template


class RecordFiles(Settings):
    """Records from text files, JSON lines or webdataset shards, each with a prompt."""

    path: str | list[str] = Field(min_length=1)
    """One or several files, read in order. Wildcards (`data/*.txt`) and braces (`shard-{000..011}.tar`) are expanded;
    `bundled:` names the repository's own `assets` folder (`bundled:prompts/image_train.txt`)."""
    format: Literal["auto", "txt", "jsonl", "webdataset"] = "auto"
    """`txt`: one prompt per line, in the field `text`. `jsonl`: one JSON object per line. `webdataset`: tar shards
    whose members `KEY.txt`, `KEY.json`, `KEY.png` ... make one record; its fields are the JSON object's and one per
    other ending. `auto` goes by the file's ending (.txt, .jsonl, .tar)."""
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

    _template = field_validator("template")(check_template)

    @model_validator(mode="after")
    def _one_source_of_text(self) -> RecordFiles:
        if self.template is not None and self.text_field is not None:
            raise ValueError(
                f"text_field {self.text_field!r} is not read when there is a template; remove one of the two, or write "
                f"{{{self.text_field}}} in the template"
            )
        return self

    def read(self) -> list[tuple[int, RawRecord]]:
        """The chosen records, each with its place in the whole source. Raises UserError that names file and place."""
        records = read_records(self.path, self.format)
        chosen = list(enumerate(records))[self.skip :][: self.limit]
        if not chosen:
            raise UserError(f"{self.what}: skip: {self.skip} leaves none of the {len(records)} records.")
        if self.negative_field and all(self.negative_field not in record.fields for _, record in chosen):
            raise missing("negative_field", self.negative_field, chosen[0][1])
        return chosen

    @property
    def what(self) -> str:
        """The data, as a message names it."""
        return f"prompts {self.path!r}"

    def prompt(self, index: int, record: RawRecord) -> Prompt:
        """The prompt of a record. Raises UserError if it holds none."""
        text = self._text(record)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{record.place}: the prompt must be a text that is not blank, but is {text!r}.")
        negative = record.fields.get(self.negative_field) if self.negative_field else None
        if not (negative is None or isinstance(negative, str)):
            raise UserError(
                f"{record.place}: negative_field {self.negative_field!r} must be a text, but is {negative!r}."
            )
        return Prompt(text, index, negative, record.fields)

    def _text(self, record: RawRecord) -> Any:
        if self.template is not None:
            return fill(self.template, record)
        if self.text_field is not None:
            if self.text_field not in record.fields:
                raise missing("text_field", self.text_field, record)
            return record.fields[self.text_field]
        for name in _TEXT_FIELDS:
            if name in record.fields:
                return record.fields[name]
        raise UserError(
            f"{record.place}: none of the fields {', '.join(_TEXT_FIELDS)} exists; the record has "
            f"{_names(record.fields)}. Set `text_field`."
        )


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(fields)) or "no fields"


def missing(key: str, field: str, record: RawRecord) -> UserError:
    """The error for a key whose field is not in a record."""
    return UserError(
        f"{record.place}: {key} {field!r} is not in the record, which has {_names(record.fields)}"
        f"{did_you_mean(field, record.fields)}"
    )


def fill(template: str, record: RawRecord) -> str:
    """The template with the record's fields. Raises UserError for one that does not fit."""
    try:
        return template.format_map(record.fields)
    except KeyError as error:
        raise missing("template field", str(error.args[0]), record) from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{record.place}: template {template!r} does not fit the record: {error}") from None


def digest(parts: Iterable[Any]) -> str:
    """A hash of plain values and stored members (by length), in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(
            json.dumps(part, sort_keys=True, default=lambda stored: getattr(stored, "length", str(stored))).encode()
        )
    return digest.hexdigest()
