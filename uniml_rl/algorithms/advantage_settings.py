"""How good each decision was: the blocks that `algorithm.advantage` may hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from modalities.errors import UserError
from modalities.settings import Settings

_NEEDS_A_CRITIC = {
    "lambda": "it trades the bias of a critic's values against the variance of returns",
    "gamma": "it discounts from decision to decision, but a sample has one advantage here (type returns discounts)",
}


class Advantage(Settings):
    """What all estimators have."""

    clip: float | None = Field(default=None, gt=0)
    """Bound of the advantage's absolute value; null: none."""

    @property
    def compares_groups(self) -> bool:
        """Whether a prompt's samples are compared with each other."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _nothing_to_bootstrap_from(cls, block: Any) -> Any:
        keys = {field.alias or name for name, field in cls.model_fields.items()}
        for key, meaning in _NEEDS_A_CRITIC.items():
            if isinstance(block, Mapping) and key in block and key not in keys:
                raise UserError(
                    f"{key}: {meaning}, and advantage.type {block.get('type')!r} has no critic to bootstrap from. "
                    "Remove the key, or take type: gae with a `value` block."
                )
        return block


class SampleAdvantage(Advantage):
    """One number for each sample, which all of its decisions share."""

    whiten: bool = False
    """Normalise to mean 0 and standard deviation 1 over the iteration's samples, before the clip."""


class GroupAdvantage(SampleAdvantage):
    """(r - mean of the group) / (std + epsilon): GRPO, Dr. GRPO, Flow-GRPO."""

    type: Literal["group"] = "group"
    """Compare the samples of one prompt with each other."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What divides: the group's own standard deviation, that of all rewards of the batch, or nothing."""
    normalisation: Literal["total", "per_reward"] = "total"
    """Compare the weighted sum of the rewards, or each reward by itself and then take the weighted sum (GDPO), so that
    rewards of unlike spread count by their weights alone."""
    epsilon: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation."""

    @property
    def compares_groups(self) -> bool:
        return True


class LeaveOneOutAdvantage(SampleAdvantage):
    """r minus the mean of the group's other samples: RLOO."""

    type: Literal["leave_one_out"] = "leave_one_out"
    """Compare each sample of a prompt with the others."""

    @property
    def compares_groups(self) -> bool:
        return True


class RunningPromptAdvantage(SampleAdvantage):
    """(r - mean) / (std + epsilon) over the prompt's last rewards, whichever iterations they come from: DDPO."""

    type: Literal["running_prompt"] = "running_prompt"
    """Compare a sample with what its prompt got before."""
    buffer_size: int = Field(default=16, ge=1)
    """Rewards remembered per prompt."""
    min_count: int = Field(default=16, ge=1)
    """With fewer remembered rewards, the batch's mean and standard deviation are taken."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    clip: float | None = Field(default=5.0, gt=0)
    """Bound of the advantage's absolute value; null: none."""

    @model_validator(mode="after")
    def _reachable(self) -> RunningPromptAdvantage:
        if self.min_count > self.buffer_size:
            raise UserError(
                f"min_count {self.min_count} can never be reached with buffer_size {self.buffer_size}: "
                "the statistics per prompt would never be used. Raise buffer_size or lower min_count."
            )
        return self


class BatchAdvantage(Advantage):
    """(r - mean of the batch) / (std + epsilon), one number per sample: REINFORCE with normalised rewards."""

    type: Literal["batch"] = "batch"
    """Compare a sample with all samples of the iteration."""
    scale: Literal["batch_std", "none"] = "batch_std"
    """What divides: the standard deviation of the batch, or nothing."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class ReturnsAdvantage(Advantage):
    """Each decision's own discounted return of reward minus KL, whitened: REINFORCE++."""

    type: Literal["returns"] = "returns"
    """Compare what followed each decision with what followed all others."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per decision."""
    baseline: Literal["none", "group"] = "none"
    """Subtract the mean reward of the prompt's samples first, or nothing."""
    whiten: bool = True
    """Normalise to mean 0 and standard deviation 1 over all trained decisions of the iteration, before the clip."""
    epsilon: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation when whitening."""

    @property
    def compares_groups(self) -> bool:
        return self.baseline == "group"


class GAEAdvantage(Advantage):
    """Generalised advantage estimation with a critic: PPO."""

    model_config = ConfigDict(serialize_by_alias=True)

    type: Literal["gae"] = "gae"
    """Compare each decision's outcome with a critic's expectation."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per decision."""
    lambda_: float = Field(default=0.95, ge=0, le=1, alias="lambda")
    """Trades the critic's bias (0) against the return's variance (1)."""
    whiten: bool = True
    """Normalise to mean 0 and standard deviation 1 over all trained decisions of the iteration, before the clip."""
    epsilon: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation when whitening."""


AdvantageSettings = Annotated[
    GroupAdvantage | LeaveOneOutAdvantage | RunningPromptAdvantage | BatchAdvantage | ReturnsAdvantage | GAEAdvantage,
    Field(discriminator="type"),
]
