"""Where prompts come from: the configuration blocks, each of which builds its stream."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from modalities.errors import UserError, did_you_mean
from modalities.randomness import seeded_generator
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
        raise ValueError(
            f"template {template!r} is no format string: {error}; a literal brace is written twice"
        ) from None
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

    _template = field_validator("template")(_check_template)

    @model_validator(mode="after")
    def _one_source_of_text(self) -> FilePromptsConfig:
        if self.template is not None and self.text_field is not None:
            raise ValueError(
                f"text_field {self.text_field!r} is not read when there is a template; remove one of the two, or write "
                f"{{{self.text_field}}} in the template"
            )
        return self

    def build(self, seed: int) -> PromptStream:
        """The stream; every record is read and checked now. Raises UserError that names the file and place."""
        records = read_records(self.path, self.format)
        chosen = list(enumerate(records))[self.skip :][: self.limit]
        what = f"prompts {self.path!r}"
        if not chosen:
            raise UserError(f"{what}: skip: {self.skip} leaves none of the {len(records)} records.")
        if self.negative_field and all(self.negative_field not in record.fields for _, record in chosen):
            raise _missing("negative_field", self.negative_field, chosen[0][1])
        prompts = [self._prompt(index, record) for index, record in chosen]
        return RecordPromptStream(
            len(prompts),
            prompts.__getitem__,
            seed,
            self.shuffle,
            _digest([p.text, p.negative, p.record] for p in prompts),
            what,
        )

    def _prompt(self, index: int, record: Record) -> Prompt:
        text = self._text(record)
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{record.place}: the prompt must be a text that is not blank, but is {text!r}.")
        negative = record.fields.get(self.negative_field) if self.negative_field else None
        if not (negative is None or isinstance(negative, str)):
            raise UserError(
                f"{record.place}: negative_field {self.negative_field!r} must be a text, but is {negative!r}."
            )
        return Prompt(text, index, negative, record.fields)

    def _text(self, record: Record) -> Any:
        if self.template is not None:
            return _fill(self.template, record)
        if self.text_field is not None:
            if self.text_field not in record.fields:
                raise _missing("text_field", self.text_field, record)
            return record.fields[self.text_field]
        for name in _TEXT_FIELDS:
            if name in record.fields:
                return record.fields[name]
        raise UserError(
            f"{record.place}: none of the fields {', '.join(_TEXT_FIELDS)} exists; the record has "
            f"{_names(record.fields)}. Set `text_field`."
        )


class ReasoningGymPromptsConfig(Settings):
    """Puzzles that reasoning-gym generates and can verify."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Generates puzzles."""
    dataset: str
    """Name of a reasoning-gym dataset, such as `chain_sum`."""
    size: int = Field(default=1000, ge=1)
    """Number of puzzles in an epoch."""
    seed: int = 0
    """Seed of the puzzles themselves; evaluation takes another one. It is hashed before reasoning-gym sees it, whose
    puzzle i of seed s is puzzle 0 of seed s + i, so that neighbouring seeds would share nearly all puzzles."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options, such as `{max_terms: 3}`."""
    template: str = "{question}"
    """A Python format string over `question` that makes the prompt."""
    shuffle: bool = True
    """A new order in every epoch, drawn from the run's seed."""

    _template = field_validator("template")(_check_template)

    def build(self, seed: int) -> PromptStream:
        """The stream; a puzzle is generated when it is drawn, and its record is what a verifier needs: reasoning-gym's
        entry (`question`, `answer`, `metadata`) and `dataset`. Raises UserError for an unknown dataset or option."""
        puzzles = self._puzzles()

        def read(index: int) -> Prompt:
            record = {**puzzles[index], "dataset": self.dataset}
            return Prompt(_fill(self.template, Record(record, f"{self.dataset}[{index}]")), index, record=record)

        read(0)
        identity = [self.model_dump(exclude={"shuffle"}), version("reasoning-gym")]
        what = f"reasoning_gym dataset {self.dataset!r}"
        return RecordPromptStream(self.size, read, seed, self.shuffle, _digest([identity]), what)

    def _puzzles(self) -> Any:
        from reasoning_gym.factory import DATASETS, create_dataset  # takes seconds, and most runs have no puzzles

        if self.dataset not in DATASETS:
            hint = did_you_mean(self.dataset, DATASETS) or f"; it has {', '.join(sorted(DATASETS))}."
            raise UserError(f"reasoning_gym has no dataset {self.dataset!r}{hint}")
        allowed = {field.name for field in dataclasses.fields(DATASETS[self.dataset][1])} - {"seed", "size"}
        for name in self.options:
            if name not in allowed:
                raise UserError(
                    f"reasoning_gym dataset {self.dataset!r} has no option {name!r}; allowed are "
                    f"{', '.join(sorted(allowed))}{did_you_mean(name, allowed)}"
                )
        try:
            return create_dataset(self.dataset, seed=_spread(self.seed), size=self.size, **self.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(
                f"reasoning_gym dataset {self.dataset!r} refuses options {self.options}: {error}"
            ) from error


def _spread(seed: int) -> int:
    """A 31-bit hash of the seed: more is not accepted by every dataset's generator."""
    return seeded_generator(seed).initial_seed() >> 32


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(sorted(fields)) or "no fields"


def _missing(key: str, field: str, record: Record) -> UserError:
    return UserError(
        f"{record.place}: {key} {field!r} is not in the record, which has {_names(record.fields)}"
        f"{did_you_mean(field, record.fields)}"
    )


def _fill(template: str, record: Record) -> str:
    try:
        return template.format_map(record.fields)
    except KeyError as error:
        raise _missing("template field", str(error.args[0]), record) from None
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UserError(f"{record.place}: template {template!r} does not fit the record: {error}") from None


def _digest(parts: Iterable[Any]) -> str:
    """A hash of plain values and stored members (by length), in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(
            json.dumps(part, sort_keys=True, default=lambda stored: getattr(stored, "length", str(stored))).encode()
        )
    return digest.hexdigest()
