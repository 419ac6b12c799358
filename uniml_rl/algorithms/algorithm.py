"""What every algorithm says of itself, whatever its objective."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, ClassVar, Literal

from pydantic import Field

from modalities.base import LogProbUnit, PolicySummary
from modalities.errors import UserError
from modalities.settings import Settings


def sample_limit(sampling: Any) -> int:
    """The most tokens that a sample drawn with a policy's `sampling` has; 0 where it sets no such limit."""
    return getattr(sampling, "max_new_tokens", 0)


LearnsFrom = Literal["rollouts", "records"]


class AlgorithmSettings(Settings):
    """What every algorithm has. `name` picks a row of the table in `presets.py`; every other key replaces a part of
    it."""

    learns_from: ClassVar[frozenset[LearnsFrom]] = frozenset({"rollouts"})
    """Its own rollouts, given records, or either."""

    kinds: ClassVar[frozenset[str]] = frozenset({"tokens", "denoising"})
    """Decisions that it can train."""

    follows_gradient: ClassVar[bool] = False
    """Whether a reward's own gradient is followed, so that every reward with a weight must have one."""

    learns_from_whole_samples: ClassVar[bool] = True
    """Whether it takes a sample as the work of one model, so that a chain of several has no part in it."""

    name: str
    """The preset."""
    epochs: int = Field(default=1, ge=1)
    """Passes over each rollout."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass."""

    @property
    def needs_critic(self) -> bool:
        """Whether the stage must give a `critic` block."""
        return False

    @property
    def compares_groups(self) -> bool:
        """Whether a prompt's samples are compared with each other, so that one alone teaches nothing."""
        return False

    @property
    def per_reward(self) -> bool:
        """Whether each of the stage's rewards is compared by itself, and not their sum."""
        return False

    def check(self, group_size: int | None, log_prob_unit: LogProbUnit | None = None, kind: str | None = None) -> None:
        """Raises UserError where the algorithm does not fit the group size (or a record's number of samples) or, where
        they are known, a segment's unit of log-probs and its kind ("tokens", "denoising")."""
        if kind is not None and kind not in self.kinds:
            raise UserError(
                f"algorithm {self.name!r} trains {' or '.join(sorted(self.kinds))}, but this policy makes {kind}. "
                + ("A reward model learns by algorithm: reward_model." if kind == "scores" else "Choose another one.")
            )
        if self.compares_groups and group_size is not None and group_size < 2:
            of_records = "records" in self.learns_from
            raise UserError(
                f"algorithm {self.name!r} compares the samples of a prompt with each other, but "
                f"{'a record holds' if of_records else 'the group size is'} {group_size}: nothing could be learned. "
                + ("Use records of `type: preferences`" if of_records else "Use at least 2")
                + (", or advantage.type: batch or running_prompt." if hasattr(self, "advantage") else ".")
            )

    def check_policy(self, policy: PolicySummary, group_size: int | None = None) -> None:
        """Raises UserError where the algorithm does not fit the group size (see `check`), or what the policy decides,
        offers and is sampled with."""
        for kind, unit in policy.decisions:
            self.check(group_size, unit, kind)
        if self.learns_from_whole_samples and len(policy.decisions) != 1:
            raise UserError(
                f"algorithm {self.name!r} learns from samples that one model makes by itself; this policy "
                f"({policy.model}) makes them in {len(policy.decisions)} segments. Train its parts."
            )

    @property
    def policy_waits(self) -> int:
        """Iterations at the start of the stage in which the policy does not learn yet."""
        return 0

    def doubts(self, kind: str) -> list[str]:
        """What is allowed, and hardly meant for decisions of this kind."""
        return []

    def check_labels(self, labels: Set[float]) -> None:
        """Raises UserError if records whose samples have these labels (1 good, 0 bad) alone teach nothing."""
