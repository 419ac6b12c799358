"""Reward models as policies: they sample nothing, and what training makes likelier is their score.

The "log-prob" of a sample is its score, so an objective on pairs of samples without a reference trains it: with
beta = 1, DPO's -log sigmoid(beta (log p(chosen) - log p(rejected))) is the Bradley-Terry loss
-log sigmoid(score(chosen) - score(rejected)) (Christiano et al. 2017; Stiennon et al. 2020).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from pydantic import model_validator
from torch import Tensor, nn

from modalities.base import (
    Cut,
    LogProbUnit,
    Need,
    Policy,
    PolicyConfig,
    PolicySummary,
    Replay,
    Request,
    Segment,
    Trajectory,
)
from modalities.causal_lm import checkpoint_layers
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.lora import LoraSettings, require_float32_when_trained
from modalities.opening import put_trained
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample
from modalities.scorers import Scorer, ScorerInputs, load_clip_scorer, load_text_scorer
from modalities.segments import ROWS, STEPS, no_mask, no_table, no_tokens
from modalities.summary import sizes_of
from modalities.weights import WeightSets


class RewardModelConfig(PolicyConfig):
    """What the blocks of both reward models have."""

    model: str
    """Where the model to start from comes from: a hub id, a folder, `package:NAME==VERSION#FILE` or `bundled:PATH`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the frozen weights under an adapter; trainable weights are always float32."""
    lora: LoraSettings | None = None
    """A low-rank adapter; None trains every weight."""
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    sampling: None = None
    """A reward model samples nothing."""

    @model_validator(mode="after")
    def _keys_agree(self) -> RewardModelConfig:
        require_float32_when_trained(self.dtype, self.lora)
        return self

    @abstractmethod
    def load(self, seed: int, meta: bool = False) -> Scorer:
        """The model and what it reads prompts with; a new head is drawn from `seed`. `meta` reads no weights."""

    def inspect(self) -> PolicySummary:
        """Counts on the meta device, from the model's configuration and the headers of its weights."""
        scorer = self.load(0, meta=True)
        if self.lora is not None:
            scorer.adapt(self.lora, seed=0)
        return PolicySummary(
            model=f"{self.model} ({type(scorer.model).__name__})",
            sample_kind=scorer.kind,
            decisions=[("scores", "token")],
            offers=RewardModel.offers,
            weights=sizes_of([scorer], getattr(torch, self.dtype).itemsize),
            fit_given=scorer.inputs,
            reads=scorer.reads,
        )

    def build(self, name: str, device: str, seed: int) -> RewardModel:
        """See `PolicyConfig.build`."""
        return RewardModel(name, self.load(seed), self, torch.device(device), seed)


class TextRewardModelConfig(RewardModelConfig):
    """A language model with a scalar head, read at the last token of prompt and response, as a policy.

    It becomes transformers' sequence classification with one label. A causal language model gets a new head; a model
    that has one already is trained on.
    """

    type: Literal["text_reward_model"] = "text_reward_model"
    """Scores texts."""
    chat_template: bool | None = None
    """Wrap prompts in the tokenizer's chat template; None does where it has one."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""

    def load(self, seed: int, meta: bool = False) -> Scorer:
        """See `RewardModelConfig.load`."""
        return load_text_scorer(
            self.model,
            getattr(torch, self.dtype),
            head_seed=seed,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
            meta=meta,
        )


class ImageTextRewardModelConfig(RewardModelConfig):
    """A CLIP model as a policy: its score of an image is exp(logit_scale) times the cosine with the prompt."""

    type: Literal["image_text_reward_model"] = "image_text_reward_model"
    """Scores images."""

    def load(self, seed: int, meta: bool = False) -> Scorer:
        """See `RewardModelConfig.load`; there is no head to draw."""
        return load_clip_scorer(self.model, getattr(torch, self.dtype), meta=meta)


@dataclass
class ScoreSegment(Segment):
    """One decision per row: the score of a given sample. Nothing was rolled out: `rollout_log_probs` are NaN.

    The text that the model reads is the prompt and the response, or the prompt of an image.
    """

    tokens: Tensor = field(default_factory=no_tokens, metadata=STEPS)  # [B, L] int64
    token_mask: Tensor = field(default_factory=no_mask, metadata=STEPS)  # [B, L] bool
    pixels: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, 3, h, w] float32, preprocessed; or [B, 0]
    kind: str = "scores"


class RewardModel(Policy):
    """A scorer as a policy that takes given samples and has no others."""

    offers: frozenset[Need] = frozenset({"log_prob"})

    def __init__(self, name: str, scorer: Scorer, config: RewardModelConfig, device: torch.device, seed: int) -> None:
        self.name = name
        self.config = config
        self.device = device
        self.dtype = getattr(torch, config.dtype)
        self.sample_kind = scorer.kind
        if config.lora is not None:
            scorer.adapt(config.lora, seed)
        else:
            scorer.requires_grad_(True)
        put_trained(scorer, device)
        self.scorer = scorer.eval()
        if config.gradient_checkpointing:
            checkpoint_layers(scorer.model)
        self.weight_sets = WeightSets(self.trainable_modules())

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        """See `Policy.decisions`: one score per sample."""
        return [("scores", "token")]

    def rollout(self, requests: Sequence[Request], sampling: Any = None) -> NoReturn:
        """Raises UserError: there is nothing to sample."""
        raise UserError(
            f"policy {self.name!r} is a reward model and samples nothing; use it in a stage whose algorithm learns "
            "from records."
        )

    def encode(self, prompts: Sequence[Prompt], samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Trajectory:
        """See `Policy.encode`. Raises UserError for a text that is longer than the model reads."""
        requests = [Request(prompt, prompt.index, key) for prompt, key in zip(prompts, keys, strict=True)]
        exists = torch.ones(len(requests), 1, dtype=torch.bool)
        segment = ScoreSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.full(exists.shape, torch.nan),
            trained_mask=exists,
            length_mask=exists,
            context_mask=torch.zeros_like(exists),
            log_prob_unit="token",
            version=self.version,
            ended=["complete"] * len(requests),
            keys=list(keys),
            **{name: value.detach().cpu() for name, value in self.scorer.inputs(prompts, samples)._asdict().items()},
        )
        return Trajectory([segment], requests)

    def as_likelihood(self, trajectory: Trajectory, settings: ForwardProcessSettings, round: int = 0) -> Trajectory:
        """See `Policy.as_likelihood`: the trajectory itself, since the score stands for the log-likelihood."""
        return trajectory

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """See `Policy.replay`: the "log-prob" [b, 1] float32 is the score."""
        if not needs <= self.offers:
            raise ValueError(f"a reward model offers {sorted(self.offers)}, not {sorted(needs - self.offers)}.")
        segment = trajectory.segments[cut.segment]
        assert isinstance(segment, ScoreSegment)
        rows = cut.rows
        scores = self.scorer(ScorerInputs(segment.tokens[rows], segment.token_mask[rows], segment.pixels[rows]))
        return Replay(log_prob=scores[:, None])

    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> NoReturn:
        """Raises ValueError: the samples were given."""
        raise ValueError(f"policy {self.name!r} is a reward model and makes no samples to decode.")

    def trainable_modules(self) -> dict[str, nn.Module]:
        """See `Policy.trainable_modules`: the one module `model`."""
        return {"model": self.scorer}

    def export(self, folder: Path) -> None:
        """See `Policy.export`: a folder for AutoModelForSequenceClassification or CLIPModel, and a `reward_model`."""
        self.scorer.save(folder)
