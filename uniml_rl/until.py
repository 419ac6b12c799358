"""When a stage ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, model_validator

from modalities.settings import Settings


class RewardThreshold(Settings):
    """Ends a stage when its reward is high enough for long enough."""

    threshold: float
    """Mean total reward of an iteration's rollout that counts as reached."""
    patience: int = Field(default=1, ge=1)
    """Iterations in a row that must reach it."""


class Plateau(Settings):
    """Ends a stage when its reward no longer rises."""

    window: int = Field(default=10, ge=1)
    """Compares the mean total reward of the last `window` iterations with that of the `window` before."""
    minimum_gain: float = 0.0
    """The stage ends when the later mean is not larger by more than this."""


class UntilSettings(Settings):
    """When a stage ends: as soon as any of the given conditions holds."""

    iterations: int | None = Field(default=None, ge=0)
    """Number of iterations (one rollout and its updates)."""
    reward: RewardThreshold | None = None
    """A reward threshold with patience."""
    plateau: Plateau | None = None
    """A plateau of the reward."""

    @model_validator(mode="after")
    def _at_least_one(self) -> UntilSettings:
        if self.iterations is None and self.reward is None and self.plateau is None:
            raise ValueError("a stage without an end: give `iterations`, `reward` or `plateau`")
        return self

    def in_words(self) -> str:
        """The conditions as a person says them."""
        conditions = []
        if self.iterations is not None:
            conditions.append(f"{self.iterations} iteration{'s' * (self.iterations != 1)}")
        if self.reward is not None:
            patience = f", {self.reward.patience} times in a row" if self.reward.patience > 1 else ""
            conditions.append(f"a reward of {self.reward.threshold:g}{patience}")
        if self.plateau is not None:
            conditions.append(f"a plateau over twice {self.plateau.window} iterations")
        return " or ".join(conditions)


def why_ended(until: UntilSettings, iteration: int, rewards: Sequence[float]) -> str | None:
    """The condition that ends a stage after `iteration` iterations with these mean rewards, in words; None goes on.

    An iteration without a single valid reward (NaN) reaches no threshold, and a plateau does not see it.
    """
    if until.iterations is not None and iteration >= until.iterations:
        return f"{iteration} iterations"
    if until.reward is not None:
        last = rewards[-until.reward.patience :]
        if len(last) == until.reward.patience and all(reward >= until.reward.threshold for reward in last):
            return f"reward >= {until.reward.threshold:g} in {until.reward.patience} iterations in a row"
    known = [reward for reward in rewards if math.isfinite(reward)]
    if until.plateau is not None and len(known) >= 2 * until.plateau.window:
        window = until.plateau.window
        gain = math.fsum(known[-window:]) / window - math.fsum(known[-2 * window : -window]) / window
        if gain <= until.plateau.minimum_gain:
            return f"reward gained {gain:.4g} over {window} iterations, not more than {until.plateau.minimum_gain:g}"
    return None
