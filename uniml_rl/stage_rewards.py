"""A stage's rewards: its own, and those of rehearsed stages for the prompts that come from them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from modalities.randomness import seeded_generator
from modalities.samples import Prompt, Sample
from rewards.combine import RewardResult, RewardSet

FADED_IN = sys.maxsize
"""An iteration after which every reward has its full weight."""


class StageRewards:
    """Routes every sample to the reward set of the stage that its prompt comes from (`DrawnPrompt.source`)."""

    def __init__(self, sets: Sequence[RewardSet], control: str, run_seed: int, stage_index: int) -> None:
        self.sets = list(sets)
        self.control = control
        self.run_seed = run_seed
        self.stage_index = stage_index

    @property
    def own(self) -> RewardSet | None:
        """The stage's own rewards; None if it learns from records."""
        return self.sets[0] if self.sets else None

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        """The scores in the order of the samples; a rehearsed sample is NaN in the rewards of the other stages.

        With `control: shuffle` the totals are permuted among the iteration's samples.
        """
        shuffle = None
        if self.control == "shuffle":
            shuffle = seeded_generator(self.run_seed, self.stage_index, iteration)
        if len(self.sets) == 1:
            return self.sets[0].score(samples, prompts, iteration, shuffle)
        sources = torch.tensor([getattr(prompt, "source", 0) for prompt in prompts])
        count = len(samples)
        result = RewardResult(torch.full((count,), torch.nan), torch.zeros(count, dtype=torch.bool), {}, {}, {}, {})
        for source, rewards in enumerate(self.sets):
            rows = (sources == source).nonzero().flatten()
            picked = rows.tolist()
            # What an earlier stage faded in stays at its full weight.
            part = rewards.score(
                [samples[i] for i in picked], [prompts[i] for i in picked], FADED_IN if source else iteration
            )
            result.total[rows], result.valid[rows] = part.total.detach(), part.valid
            for name in part.raw:
                for into, values in ((result.raw, part.raw), (result.weighted, part.weighted)):
                    into.setdefault(name, torch.full((count,), torch.nan))[rows] = values[name]
                result.weights.setdefault(name, part.weights[name])
                result.failures.setdefault(name, Counter()).update(part.failures[name])
        if shuffle is not None:
            order = torch.randperm(count, generator=shuffle)
            result.total, result.valid = result.total[order], result.valid[order]
        return result

    def state_dict(self) -> dict[str, Any]:
        """The state of every set."""
        return {"sets": [rewards.state_dict() for rewards in self.sets]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        for rewards, part in zip(self.sets, state["sets"], strict=True):
            rewards.load_state_dict(part)

    def close(self) -> None:
        """Ends processes that rewards keep."""
        for rewards in self.sets:
            rewards.close()
