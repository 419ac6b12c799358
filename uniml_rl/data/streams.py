"""Prompt streams: one global, endless, deterministic sequence that every rank reads its own share of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from modalities.errors import UserError
from modalities.randomness import seeded_generator
from modalities.samples import Prompt

SOURCE_STRIDE = 1 << 40
"""Distance between the prompt indices of two sources of a mixture, so that an index names one prompt of one source."""


@dataclass(frozen=True)
class DrawnPrompt(Prompt):
    """A prompt as a stream hands it out."""

    source: int = 0
    """Which stream of a mixture it came from; 0 is the stage's own data."""
    repeat: int = 0
    """How often the same prompt came before it in the same `take`, over all ranks.

    A stream wraps at an epoch's end, so a prompt may come twice in one batch. Each occurrence is a group of its own;
    sample s of a group of G is sample `repeat * G + s` of its prompt, so no two of them share random numbers.
    """


class PromptStream(ABC):
    """One global sequence of prompts without an end.

    The sequence is a function of the data and the seed alone; ranks only decide who reads which part. Every rank calls
    `take` with the same count. A reader implements `draw`, `first`, `size` and the state, whatever the data's scale.
    """

    size: int | None
    """Number of prompts in one epoch; None if only the end of the data could tell."""

    def take(self, count: int, rank: int = 0, world_size: int = 1) -> list[DrawnPrompt]:
        """Rank `rank`'s contiguous share of the next `count` prompts; the shares in rank order are the global list.

        The stream moves on by `count` on every rank. Shares differ by at most one prompt if `world_size` does not
        divide `count`. Raises ValueError for a rank outside the world or a negative count.
        """
        if not 0 <= rank < world_size or count < 0:
            raise ValueError(f"take(count={count}) for rank {rank} of {world_size} is not a share of a batch.")
        return self.draw(count, count * rank // world_size, count * (rank + 1) // world_size)

    @abstractmethod
    def draw(self, count: int, start: int, stop: int) -> list[DrawnPrompt]:
        """Moves on by `count` prompts and returns those at positions `start` to `stop` (exclusive) of them."""

    @abstractmethod
    def first(self, count: int) -> list[DrawnPrompt]:
        """The first `count` prompts in the data's own order: fixed prompts for evaluation; the stream does not move.

        Returns fewer if the data holds fewer.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values; with it, the same data and the same seed a new stream continues exactly."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict` at a cost that does not grow with the position. UserError if the data changed."""


class RecordPromptStream(PromptStream):
    """Endless epochs over `size` records that can be read by number.

    Epoch e visits the records in the order of a permutation drawn from (seed, e) alone, or in file order.
    """

    def __init__(
        self, size: int, read: Callable[[int], Prompt], seed: int, shuffle: bool, fingerprint: str, what: str
    ) -> None:
        if size < 1:
            raise ValueError(f"{what} holds no prompts.")
        self.size: int = size
        self._read = read
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = fingerprint
        self._what = what
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def _record_at(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            generator = seeded_generator(self._seed, epoch)
            self._epoch, self._order = epoch, torch.randperm(self.size, generator=generator).tolist()
        return self._order[offset]

    def draw(self, count: int, start: int, stop: int) -> list[DrawnPrompt]:
        records = [self._record_at(self._position + offset) for offset in range(stop)]
        self._position += count
        seen: Counter[int] = Counter(records[:start])
        prompts = []
        for record in records[start:]:
            prompts.append(_drawn(self._read(record), repeat=seen[record]))
            seen[record] += 1
        return prompts

    def first(self, count: int) -> list[DrawnPrompt]:
        return [_drawn(self._read(record), repeat=0) for record in range(min(count, self.size))]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "size": self.size, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (state["size"], state["fingerprint"]) != (self.size, self._fingerprint):
            raise UserError(
                f"{self._what}: not the data that the checkpoint was made with ({state['size']} then, {self.size} "
                "now; if equal, their content changed), so the run cannot continue where it was. Restore the data, or "
                "start a new run in another folder."
            )
        self._position = state["position"]


class MixedPromptStream(PromptStream):
    """Several streams as one: rehearsal of earlier stages' prompts beside the stage's own.

    Each position belongs to the stream that is furthest behind its share, so the first n prompts of two streams hold
    n * share of each to within one, and of k streams to within k. `DrawnPrompt.source` is the stream's place in
    `streams`, and prompt indices are `source * SOURCE_STRIDE + index`; those of source 0 are unchanged.
    """

    def __init__(self, streams: Sequence[PromptStream], shares: Sequence[float]) -> None:
        """Raises ValueError for unequal lengths, a nested mixture, or shares that are not positive."""
        if len(streams) != len(shares) or not streams or min(shares) <= 0:
            raise ValueError(f"{len(streams)} streams need as many positive shares, not {list(shares)}.")
        if any(isinstance(stream, MixedPromptStream) for stream in streams):
            raise ValueError("A mixture cannot be mixed again; give all streams to one MixedPromptStream.")
        self._streams = list(streams)
        self._shares = [share / sum(shares) for share in shares]
        self._drawn = [0] * len(streams)
        sizes = [stream.size for stream in streams]
        self.size = None if None in sizes else sum(size for size in sizes if size is not None)

    def _next_source(self) -> int:
        total = sum(self._drawn) + 1
        behind = [share * total - drawn for share, drawn in zip(self._shares, self._drawn, strict=True)]
        source = behind.index(max(behind))
        self._drawn[source] += 1
        return source

    def draw(self, count: int, start: int, stop: int) -> list[DrawnPrompt]:
        sources = [self._next_source() for _ in range(count)]
        total, before, until = Counter(sources), Counter(sources[:start]), Counter(sources[:stop])
        parts = [
            iter(stream.draw(total[source], before[source], until[source]))
            for source, stream in enumerate(self._streams)
        ]
        return [_from_source(next(parts[source]), source) for source in sources[start:stop]]

    def first(self, count: int) -> list[DrawnPrompt]:
        """The stage's own first prompts: evaluation does not mix."""
        return self._streams[0].first(count)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": list(self._drawn), "streams": [stream.state_dict() for stream in self._streams]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["streams"]) != len(self._streams):
            raise UserError(
                f"the checkpoint mixes {len(state['streams'])} prompt streams, the configuration {len(self._streams)}."
            )
        self._drawn = list(state["drawn"])
        for stream, part in zip(self._streams, state["streams"], strict=True):
            stream.load_state_dict(part)


def _drawn(prompt: Prompt, repeat: int) -> DrawnPrompt:
    return DrawnPrompt(prompt.text, prompt.index, prompt.negative, prompt.record, repeat=repeat)


def _from_source(prompt: DrawnPrompt, source: int) -> DrawnPrompt:
    return replace(prompt, source=source, index=source * SOURCE_STRIDE + prompt.index)
