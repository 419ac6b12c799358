"""The policy interface: trajectories of decisions, and the verbs that a trainer needs of any generative model.

A generative model makes a sample through a sequence of decisions. A text decoder picks tokens, an audio model codec
tokens, a diffusion head the next latent at each denoising transition. Each decision has a log-probability, so to a loss
every modality is the same object: tensors of shape [B, T] (B trajectories, T decisions).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample
from modalities.segments import (
    Cut,
    DenoisingSegment,
    ForwardSegment,
    LatentSegment,
    LogProbUnit,
    Need,
    Replay,
    Request,
    Segment,
    TokenSegment,
    Trajectory,
    with_parent,
)
from modalities.settings import Settings
from modalities.summary import PolicySummary, sizes_of
from modalities.weights import WeightSets

if TYPE_CHECKING:
    from modalities.forward_process import ForwardProcessSettings

__all__ = [
    "Cut",
    "DenoisingSegment",
    "ForwardSegment",
    "LatentSegment",
    "LogProbUnit",
    "Need",
    "Policy",
    "PolicyConfig",
    "PolicySummary",
    "Replay",
    "Request",
    "SamplerBackend",
    "Segment",
    "TokenSegment",
    "Trajectory",
    "summary_of",
    "with_parent",
]


class Policy(ABC):
    """A generative model as a reinforcement learner sees it.

    The methods never move a loss or a reward: they sample, score, decode and hold weights. Dropout is off in all of
    them. `name` is the agent's name in trajectories.
    """

    name: str
    sample_kind: Literal["text", "image", "video", "audio"]
    offers: frozenset[Need]
    """What `replay` can give."""
    feature_size: int = 0
    """D of `Replay.features`: the width that a value head reads; 0 if features are not offered."""
    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    """Of the frozen weights, in which forward passes run outside of autocast."""
    weight_sets: WeightSets
    """Named weight sets over the trainable modules: reference, moving average, old policy."""
    version: int = 0
    """Optimizer steps that the current weights have seen."""
    sampling: Any = None
    """The settings that `rollout` samples with unless it is given others."""

    @abstractmethod
    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        """The kind ("tokens", "denoising") and log-prob unit of each segment that `rollout` makes."""

    @abstractmethod
    def rollout(self, requests: Sequence[Request], sampling: Any = None) -> Trajectory:
        """Samples without gradient, one row per request, and records what replay needs.

        Requests with the same prompt share the work on it. `sampling` replaces the policy's own settings (evaluation).
        """

    def rollout_with_gradient(
        self, requests: Sequence[Request], last_steps: int, sampling: Any = None, early_clean: bool = False
    ) -> Trajectory:
        """The samples of `rollout`, bit for bit, with the gradient of the current weights through their last steps.

        Gradient runs through the last `last_steps` transitions (DRaFT-K, Clark et al. 2024) into `final_latents`, and
        `decode(trajectory, differentiable=True)` carries it on to the samples; noise is a constant. Nothing else of the
        trajectory has a gradient. With `early_clean` sampling stops at the first of these steps, and `final_latents`
        are the clean ones that its prediction implies (ReFL, Xu et al. 2023). Raises UserError for a policy whose
        decisions are discrete.
        """
        raise UserError(
            f"policy {self.name!r} ({type(self).__name__}) has no gradient from its samples to its weights; only "
            "denoising policies can be trained by the gradient of a reward."
        )

    @abstractmethod
    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """Scores the recorded decisions of `cut` again under the current weights; differentiable under grad mode."""

    def encode(self, prompts: Sequence[Prompt], samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Trajectory:
        """Given samples as a trajectory, as if the policy had made them (supervised and preference objectives).

        Raises UserError for a policy that does not offer it.
        """
        raise UserError(f"policy {self.name!r} ({type(self).__name__}) cannot take given samples as its own.")

    def as_likelihood(self, trajectory: Trajectory, settings: ForwardProcessSettings, round: int = 0) -> Trajectory:
        """The trajectory whose replayed log-probs are the samples' log-likelihood, or a surrogate of it per decision.

        Tokens: the trajectory itself. Denoising: the last segment's final latents, noised at drawn times
        (`ForwardSegment`); another `round` draws other times and noise. Works for rollouts and for what `encode`
        returns. Raises UserError for other decisions.
        """
        if all(isinstance(segment, TokenSegment) for segment in trajectory.segments):
            return trajectory
        raise UserError(f"policy {self.name!r} ({type(self).__name__}) has no likelihood of given samples.")

    @abstractmethod
    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        """One sample per row of the last segment. `differentiable` keeps the gradient from pixels to latents."""

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Within the context the policy computes with a named weight set: "current", "reference", "old" or "ema".

        Raises KeyError if that set was never made (`keep`).
        """
        return self.weight_sets.using(weights)

    def keep(self, weights: str) -> None:
        """Makes or refreshes the weight set `weights` from the current weights.

        "reference" of an adapter that was never trained costs nothing: it is the model with the adapter off.
        """
        self.weight_sets.keep(weights)

    def average(self, weights: str, decay: float) -> None:
        """weights <- decay * weights + (1 - decay) * current; makes the set if it is new."""
        self.weight_sets.average(weights, decay)

    def forget_all(self) -> None:
        """Drops every kept weight set."""
        for name in self.weight_sets.names()[1:]:
            self.weight_sets.drop(name)

    @abstractmethod
    def trainable_modules(self) -> dict[str, nn.Module]:
        """The modules that one optimizer step trains together; what is trainable in them has requires_grad."""

    def plan(self, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """Cuts the rows that descend from the first segment's rows `roots` into micro-batches.

        `budget` is the number of rows that one micro-batch may hold. Every trained decision lies in exactly one cut.
        Here: rows in order, with all their steps.
        """
        return [
            Cut(index, rows, slice(0, segment.num_steps))
            for index, segment in enumerate(trajectory.segments)
            for rows in torch.isin(trajectory.roots(index), roots).nonzero().flatten().split(budget)
            if len(rows)
        ]

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Writes a folder that plain `from_pretrained` loads (adapters merged; the adapter itself beside it)."""

    def weight_state(self) -> dict[str, Tensor]:
        """Everything of this policy that training changes: trainable weights and every kept weight set."""
        return self.weight_sets.state()

    def load_weight_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `weight_state`; an error that names missing and unexpected keys."""
        self.weight_sets.load_state(state)

    def set_version(self, version: int) -> None:
        """States the version of the current weights; it is written into the segments of later rollouts."""
        self.version = version


class PolicyConfig(Settings):
    """A policy's block in the YAML file; each family adds its keys and builds itself."""

    sampling: Any = None
    """How rollouts are sampled; evaluation replaces keys of it."""

    def settled(self, device: str, precision: torch.dtype) -> PolicyConfig:
        """This block with what it leaves open (`auto`) chosen for a device and the type of the engine's forward passes.

        Raises UserError for a choice of the user's that cannot run there. Here nothing is open.
        """
        return self

    def build(self, name: str, device: str, seed: int) -> Policy:
        """The policy, its models on `device`, fresh adapters initialised from `seed`."""
        raise NotImplementedError

    def inspect(self) -> PolicySummary:
        """Counts parameters from headers and configurations; raises UserError for whatever `build` would refuse.

        Here: builds the policy to count.
        """
        return summary_of(self.build("inspected", "cpu", 0))


def summary_of(policy: Policy) -> PolicySummary:
    """What a built policy says of itself; of its parameters those of the modules that are trained."""
    return PolicySummary(
        model=type(policy).__name__,
        sample_kind=policy.sample_kind,
        decisions=policy.decisions(),
        offers=policy.offers,
        weights=sizes_of(list(policy.trainable_modules().values()), policy.dtype.itemsize),
        feature_size=policy.feature_size,
        windowed=getattr(policy.sampling, "window", None) is not None,
        sampling=policy.sampling,
    )


class SamplerBackend(Protocol):
    """Where samples come from, apart from the policy. There is one, `token_sampler.InProcessSampler`, which has the
    policy's own model; an inference engine elsewhere would be another."""

    repeatable: bool
    """Whether the same request and weights give the same sample again."""

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes named tensors; later samples come from this version."""
        ...

    def sample(self, requests: Sequence[Request], sampling: Any) -> Segment:
        """One row per request with the behaviour policy's log-probs."""
        ...
