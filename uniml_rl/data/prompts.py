"""Where prompts come from: the configuration blocks, each of which builds its stream."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any, Literal

from pydantic import Field, field_validator

from modalities.errors import UserError, did_you_mean
from modalities.randomness import seeded_generator
from modalities.samples import Prompt
from modalities.settings import Settings
from uniml_rl.data.record_files import RecordFiles, check_template, digest, fill
from uniml_rl.data.shards import RawRecord
from uniml_rl.data.streams import DrawnPrompt, MixedPromptStream, PromptStream, RecordPromptStream

__all__ = [
    "DrawnPrompt",
    "FilePromptsConfig",
    "MixedPromptStream",
    "PromptStream",
    "ReasoningGymPromptsConfig",
]


class FilePromptsConfig(RecordFiles):
    """Prompts from text files, JSON lines or webdataset shards."""

    type: Literal["file"] = "file"
    """Reads files."""

    def build(self, seed: int) -> PromptStream:
        """The stream; every record is read and checked now. Raises UserError that names the file and place."""
        prompts = [self.prompt(index, record) for index, record in self.read()]
        fingerprint = digest([p.text, p.negative, p.record] for p in prompts)
        return RecordPromptStream(len(prompts), prompts.__getitem__, seed, self.shuffle, fingerprint, self.what)


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

    _template = field_validator("template")(check_template)

    def build(self, seed: int) -> PromptStream:
        """The stream; a puzzle is generated when it is drawn, and its record is what a verifier needs: reasoning-gym's
        entry (`question`, `answer`, `metadata`) and `dataset`. Raises UserError for an unknown dataset or option."""
        puzzles = self._puzzles()

        def read(index: int) -> Prompt:
            record = {**puzzles[index], "dataset": self.dataset}
            return Prompt(fill(self.template, RawRecord(record, f"{self.dataset}[{index}]")), index, record=record)

        read(0)
        identity = [self.model_dump(exclude={"shuffle"}), version("reasoning-gym")]
        what = f"reasoning_gym dataset {self.dataset!r}"
        return RecordPromptStream(self.size, read, seed, self.shuffle, digest([identity]), what)

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
