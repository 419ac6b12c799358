"""A trained reward model as a reward: of texts, or of images and their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from modalities.errors import UserError
from modalities.samples import Prompt
from modalities.scorers import Scorer, TooLongError, load_scorer
from rewards.base import Reward, RewardConfig
from rewards.isolation import ScoringError

_POLICY = "policy:"


class ModelRewardConfig(RewardConfig):
    """The score of a reward model: of texts, or of images and their prompts; differentiable for images.

    Texts: any sequence classifier of transformers with one label, read at the last token of prompt and response.
    Images: any CLIP model of transformers; the score is exp(logit_scale) times the cosine (as PickScore).
    """

    type: Literal["reward_model"] = "reward_model"
    """What a model has learned from preferences."""
    model: str
    """A folder (such as one that a stage exported), a hub id or another source of a model; or `policy:NAME`, the reward
    model that an earlier stage of this run has trained under this name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the model's weights."""

    @property
    def policy(self) -> str | None:
        """NAME of `model: policy:NAME`, else None."""
        return self.model.removeprefix(_POLICY) if self.model.startswith(_POLICY) else None

    def with_model(self, folder: Path) -> ModelRewardConfig:
        """The same reward of the model in `folder`: how a run puts its own export in the place of `policy:NAME`."""
        return self.model_copy(update={"model": str(folder)})

    def build(self, device: str) -> ModelReward:
        """Raises UserError if the model cannot be found or gives no single score."""
        if self.policy is not None:
            raise UserError(
                f"reward_model: {self.model!r} is not trained yet; the stage that trains policy {self.policy!r} comes "
                "first."
            )
        return ModelReward(load_scorer(self.model, getattr(torch, self.dtype)).to(device))


class ModelReward(Reward):
    """See `ModelRewardConfig`."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer.requires_grad_(False)
        self.kinds = frozenset({scorer.kind})
        self.differentiable = scorer.kind == "image"
        self.reads = scorer.reads

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32. Raises ScoringError for a text that is longer than the model reads: that sample has failed."""
        try:
            inputs = self._scorer.inputs(prompts, samples)
        except TooLongError as error:
            raise ScoringError("too_long", str(error)) from error
        scores: Tensor = self._scorer(inputs)
        return scores
