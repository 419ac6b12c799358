"""Random numbers that belong to a sample: a pure function of what the sample is, never of where it is computed."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from modalities.errors import UserError


@dataclass(frozen=True)
class SampleKey:
    """Names one sample's stream of random numbers.

    Two samples share numbers only if every field is equal, so samples do not depend on ranks, on batch composition or
    on micro-batches, and a resumed run draws the same numbers again.
    """

    run_seed: int
    stage: int
    iteration: int
    prompt: int
    """The prompt's global index in its data source."""
    sample: int
    """The sample's index within its group."""
    resampling_round: int = 0
    segment: int = 0

    def at_segment(self, segment: int) -> SampleKey:
        """The same sample's key for another segment of its trajectory."""
        return replace(self, segment=segment)

    def generator(self) -> torch.Generator:
        """A CPU generator whose seed is a 63-bit hash of all fields."""
        return seeded_generator(
            self.run_seed, self.stage, self.iteration, self.prompt, self.sample, self.resampling_round, self.segment
        )


def seeded_generator(*fields: int) -> torch.Generator:
    """A CPU generator seeded by a 63-bit BLAKE2b hash of the integer `fields`, in order."""
    try:
        packed = struct.pack(f"<{len(fields)}q", *fields)
    except struct.error:
        largest = max(fields, key=abs)
        raise UserError(f"seed: {largest} does not fit into 64 bits; take a smaller one.") from None
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


_GLOBAL = threading.Lock()


@contextmanager
def global_generator_seeded(seed: int) -> Iterator[None]:
    """Within the context torch's global CPU generator, which the initialisers of layers draw from, starts at `seed`.

    Its state is put back afterwards. Threads wait for each other, so each gets the numbers of its own seed.
    """
    with _GLOBAL, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
