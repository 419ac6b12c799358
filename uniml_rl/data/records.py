"""Prompts with given samples: demonstrations, preference pairs and labelled samples, each block building its stream."""

from __future__ import annotations

import heapq
import io
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import PIL.Image
import PIL.ImageOps
import torch
from einops import rearrange
from pydantic import model_validator

from modalities.errors import UserError
from modalities.samples import Image, Prompt, Sample, Text
from uniml_rl.data.record_files import RecordFiles, digest, missing
from uniml_rl.data.shards import RawRecord, StoredBytes
from uniml_rl.data.streams import DrawnPrompt, RecordPromptStream

_IMAGE_ENDINGS = ("png", "jpg", "jpeg", "webp")
_DEFAULT_FIELDS = {"text": ("response",), "image": ("image", *_IMAGE_ENDINGS)}

Given = str | StoredBytes
"""A sample as the data holds it: a text, or an image that is still encoded."""


@dataclass(frozen=True)
class Record:
    """One prompt, the samples given for it and a label for each: to an objective a rollout with rewards 1 and 0."""

    index: int
    """Global index in the data source, as of a prompt."""
    prompt: Prompt
    samples: list[Sample]
    labels: list[float]
    """1 for a sample to learn, 0 for one to avoid; in the order of the samples."""


@dataclass(frozen=True)
class DrawnRecord(Record):
    """A record as a stream hands it out."""

    repeat: int = 0
    """How often the same record came before it in the same `take`, over all ranks; see `DrawnPrompt.repeat`."""


@dataclass(frozen=True)
class _Entry:
    """One record before its samples are decoded."""

    prompt: Prompt
    given: tuple[Given, ...]
    labels: tuple[float, ...]
    place: str


class RecordStream:
    """One global endless sequence of records, in the order of a prompt stream over the same data."""

    def __init__(self, entries: Sequence[_Entry], config: RecordsConfig, seed: int) -> None:
        prompts = [entry.prompt for entry in entries]
        fingerprint = digest([e.prompt.text, e.prompt.negative, e.given, e.labels] for e in entries)
        self.kind = config.kind
        """Kind of the samples."""
        self.size = len(entries)
        """Number of records in one epoch."""
        self.labels = frozenset(label for entry in entries for label in entry.labels)
        """Every label that a sample has."""
        self._what = config.what
        self._entries = {prompt.index: entry for prompt, entry in zip(prompts, entries, strict=True)}
        self._order = RecordPromptStream(self.size, prompts.__getitem__, seed, config.shuffle, fingerprint, config.what)

    def take(self, count: int, rank: int = 0, world_size: int = 1) -> list[DrawnRecord]:
        """Rank `rank`'s contiguous share of the next `count` records, images decoded; see `PromptStream.take`.

        Raises UserError for an image that cannot be decoded.
        """
        return [self._drawn(prompt) for prompt in self._order.take(count, rank, world_size)]

    def first(self, count: int) -> list[DrawnRecord]:
        """The first `count` records in the data's own order; see `PromptStream.first`."""
        return [self._drawn(prompt) for prompt in self._order.first(count)]

    def longest(self, count: int) -> list[Record]:
        """The `count` records of texts with the most characters."""
        found = heapq.nlargest(count, self._entries.values(), key=_characters)
        return [Record(e.prompt.index, e.prompt, [_sample(g, e.place) for g in e.given], list(e.labels)) for e in found]

    def state_dict(self) -> dict[str, Any]:
        """The position; see `PromptStream.state_dict`."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`. Raises UserError if the data changed."""
        self._order.load_state_dict(state)

    def check_kind(self, sample_kind: str) -> None:
        """Raises UserError if a policy that makes `sample_kind` cannot learn from these samples."""
        if sample_kind != self.kind:
            raise UserError(
                f"{self._what} holds samples of {self.kind} (`kind: {self.kind}`), but the policy makes {sample_kind}. "
                f"Use data of {sample_kind}, or another policy."
            )

    def _drawn(self, prompt: DrawnPrompt) -> DrawnRecord:
        entry = self._entries[prompt.index]
        samples = [_sample(given, entry.place) for given in entry.given]
        return DrawnRecord(prompt.index, prompt, samples, list(entry.labels), prompt.repeat)


class RecordsConfig(RecordFiles):
    """What every block of records with given samples has."""

    kind: Literal["text", "image"] = "text"
    """What the samples are. A text stands in its field. An image is a member of the shard, or a file named relative to
    the file that names it."""

    @property
    def what(self) -> str:
        """The data, as a message names it."""
        return f"records {self.path!r}"

    def build(self, seed: int) -> RecordStream:
        """The stream. Every record is checked now, and its images when they are drawn. Raises UserError that names the
        file, the place and the field."""
        entries = [
            _Entry(self.prompt(index, record), *self.samples_and_labels(record), record.place)
            for index, record in self.read()
        ]
        stream = RecordStream(entries, self, seed)
        stream.first(1)  # images of a kind that cannot be read at all are found before the training starts
        return stream

    @abstractmethod
    def samples_and_labels(self, record: RawRecord) -> tuple[tuple[Given, ...], tuple[float, ...]]:
        """The samples of a record as it holds them, and the label of each."""

    def given(self, record: RawRecord, key: str, names: Sequence[str]) -> Given:
        """The sample in the first of the fields `names` that the record has; `key` is the setting that names them."""
        if self.kind == "image":
            names = [*names, *(f"{name}.{ending}" for name in names for ending in _IMAGE_ENDINGS)]
        field = next((name for name in names if name in record.fields), None)
        if field is None:
            raise missing(key, names[0], record)
        value = record.fields[field]
        if self.kind == "text":
            if not isinstance(value, str) or not value.strip():
                hint = "; for images set `kind: image`" if isinstance(value, StoredBytes) else ""
                raise UserError(
                    f"{record.place}: {field!r} must be a text that is not blank, but is {_shown(value)}{hint}."
                )
            return value
        if isinstance(value, StoredBytes):
            return value
        if not isinstance(value, str) or not value:
            raise UserError(
                f"{record.place}: {field!r} must be a member of the shard or the path of an image, but is "
                f"{_shown(value)}."
            )
        return _image_file(value, field, record)


class DemonstrationsConfig(RecordsConfig):
    """Prompts with one sample to imitate each: label 1."""

    type: Literal["demonstrations"] = "demonstrations"
    """One sample to imitate per record."""
    sample_field: str | None = None
    """Field of the sample; None takes `response` for text, and for images the first that exists of image, png, jpg,
    jpeg, webp."""

    def samples_and_labels(self, record: RawRecord) -> tuple[tuple[Given, ...], tuple[float, ...]]:
        """One sample, label 1."""
        return (self.given(record, "sample_field", _fields(self.sample_field, self.kind)),), (1.0,)


class PreferencesConfig(RecordsConfig):
    """Prompts with a chosen and a rejected sample each: labels 1 and 0."""

    type: Literal["preferences"] = "preferences"
    """A pair of samples per record."""
    chosen_field: str = "chosen"
    """Field of the better sample. In a shard, an image is a member such as `KEY.chosen.png`."""
    rejected_field: str = "rejected"
    """Field of the worse sample."""

    @model_validator(mode="after")
    def _two_fields(self) -> PreferencesConfig:
        if self.chosen_field == self.rejected_field:
            raise ValueError(f"chosen_field and rejected_field are both {self.chosen_field!r}; name two fields")
        return self

    def samples_and_labels(self, record: RawRecord) -> tuple[tuple[Given, ...], tuple[float, ...]]:
        """The chosen sample, label 1, and the rejected one, label 0."""
        chosen = self.given(record, "chosen_field", [self.chosen_field])
        rejected = self.given(record, "rejected_field", [self.rejected_field])
        if chosen == rejected:
            raise UserError(
                f"{record.place}: {self.chosen_field!r} and {self.rejected_field!r} are the same, so the pair teaches "
                "nothing; remove the record."
            )
        return (chosen, rejected), (1.0, 0.0)


class LabelledConfig(RecordsConfig):
    """Prompts with one sample each and whether it is desirable: label 1 or 0."""

    type: Literal["labelled"] = "labelled"
    """One good or bad sample per record."""
    sample_field: str | None = None
    """Field of the sample; None takes `response` for text, and for images the first that exists of image, png, jpg,
    jpeg, webp."""
    label_field: str = "label"
    """Field of the label: 1 or true for a desirable sample, 0 or false for an undesirable one."""

    def samples_and_labels(self, record: RawRecord) -> tuple[tuple[Given, ...], tuple[float, ...]]:
        """One sample and its label."""
        given = self.given(record, "sample_field", _fields(self.sample_field, self.kind))
        if self.label_field not in record.fields:
            raise missing("label_field", self.label_field, record)
        label = record.fields[self.label_field]
        if not isinstance(label, int | float) or label not in (0, 1):
            raise UserError(
                f"{record.place}: {self.label_field!r} is {_shown(label)}; allowed are 1 or true (desirable) and 0 or "
                "false (undesirable)."
            )
        return (given,), (float(label),)


def _characters(entry: _Entry) -> int:
    return len(entry.prompt.text) + max(len(text) for text in entry.given if isinstance(text, str))


def _fields(name: str | None, kind: str) -> Sequence[str]:
    return _DEFAULT_FIELDS[kind] if name is None else [name]


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."


def _image_file(name: str, field: str, record: RawRecord) -> StoredBytes:
    path = Path(name).expanduser()
    if not path.is_absolute():
        path = record.file.parent / path
    if not path.is_file():
        raise UserError(f"{record.place}: {field!r} names the image {name!r}, but there is no file {path}.")
    return StoredBytes(path, 0, path.stat().st_size, path.name)


def _sample(given: Given, place: str) -> Sample:
    if isinstance(given, str):
        return Text(given, num_tokens=0, finished=True)  # no token of it was chosen by a model
    try:
        with PIL.Image.open(io.BytesIO(given.read())) as opened:
            if opened.mode[0] in "IF":  # which becomes white: the conversion to 8 bits cuts off and does not scale
                raise UserError(f"{place}: {given.name!r} has more than 8 bits per channel; save it with 8 bits.")
            picture = PIL.ImageOps.exif_transpose(opened)
            if picture.has_transparency_data:
                above = picture.convert("RGBA")
                picture = PIL.Image.alpha_composite(PIL.Image.new("RGBA", above.size, "white"), above)
            pixels_HWC = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
            size = (picture.height, picture.width, 3)
    except UserError:
        raise
    except Exception as error:  # a damaged file raises whatever its decoder stumbles over
        unknown = isinstance(error, PIL.UnidentifiedImageError)  # its own words hold the address of an object
        reason = "it is damaged or of an unknown format" if unknown else error
        raise UserError(f"{place}: {given.name!r} is no image that can be decoded: {reason}") from error
    return Image(rearrange(pixels_HWC.view(size), "h w c -> c h w").contiguous())
