"""Rewards of video: smooth motion, and any image reward frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from modalities.samples import Image, Prompt
from rewards.base import Reward, RewardConfig
from rewards.clip import ClipScoreConfig, ImageTextScorerConfig
from rewards.image import JpegSizeConfig, MeanColourConfig


class FrameSmoothnessConfig(RewardConfig):
    """Minus the mean absolute difference of consecutive frames' pixels, in [-1, 0]; differentiable.

    A still image is smoothest: put a reward beside it that asks for motion or content.
    """

    type: Literal["frame_smoothness"] = "frame_smoothness"
    """No flicker."""

    def build(self, device: str) -> FrameSmoothness:
        """Computed where the videos are."""
        return FrameSmoothness()


class FrameSmoothness(Reward):
    """See `FrameSmoothnessConfig`."""

    kinds = frozenset({"video"})
    differentiable = True

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32; NaN for a video of one frame."""
        return torch.stack([-sample.unit().diff(dim=0).abs().mean() for sample in samples])


ImageRewardConfig = Annotated[
    JpegSizeConfig | MeanColourConfig | ClipScoreConfig | ImageTextScorerConfig, Field(discriminator="type")
]


class PerFrameConfig(RewardConfig):
    """An image reward on the frames of a video; differentiable if that reward is."""

    type: Literal["per_frame"] = "per_frame"
    """Frame by frame."""
    reward: ImageRewardConfig
    """The image reward's own block, without the keys that every reward has: those stand here."""
    every: int = Field(default=1, ge=1)
    """Scores every n-th frame, the first included."""
    reduce: Literal["mean", "min"] = "mean"
    """The video's score from its frames' scores."""

    @field_validator("reward")
    @classmethod
    def _common_keys_stand_outside(cls, reward: RewardConfig) -> RewardConfig:
        misplaced = sorted(reward.model_fields_set & RewardConfig.model_fields.keys())
        if misplaced:
            raise ValueError(f"{', '.join(misplaced)} belongs to per_frame itself, not to the image reward inside it")
        return reward

    def build(self, device: str) -> PerFrame:
        """Builds the image reward."""
        return PerFrame(self.reward.build(device), self.every, self.reduce)


class PerFrame(Reward):
    """See `PerFrameConfig`."""

    kinds = frozenset({"video"})

    def __init__(self, reward: Reward, every: int, reduce: str) -> None:
        self._reward = reward
        self._every = every
        self._reduce = reduce
        self.differentiable = reward.differentiable
        self.repeatable = reward.repeatable
        self.fields = reward.fields

    def models(self) -> list[nn.Module]:
        """The image reward's."""
        return self._reward.models()

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32."""
        scores = []
        for sample, prompt in zip(samples, prompts, strict=True):
            frames = [Image(frame) for frame in sample.frames[:: self._every]]
            frame_scores = self._reward.score(frames, [prompt] * len(frames))
            scores.append(frame_scores.mean() if self._reduce == "mean" else frame_scores.min())
        return torch.stack(scores)
