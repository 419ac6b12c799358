"""The policy interface: trajectories of decisions, and the verbs that a trainer needs of any generative model.

A generative model makes a sample through a sequence of decisions. A text decoder picks tokens, an audio model codec
tokens, a diffusion head the next latent at each denoising transition. Each decision has a log-probability, so to a loss
every modality is the same object: tensors of shape [B, T] (B trajectories, T decisions).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample
from modalities.settings import Settings
from modalities.weights import WeightSets

if TYPE_CHECKING:
    from modalities.forward_process import ForwardProcessSettings

Need = Literal["log_prob", "entropy", "mean", "std", "prediction", "clean_prediction", "target", "features"]
LogProbUnit = Literal["token", "element_mean", "element_sum"]


@dataclass(frozen=True)
class Request:
    """One sample to make: its prompt, the group that its advantage is computed in, and its random numbers."""

    prompt: Prompt
    group: int
    key: SampleKey


@dataclass
class Segment:
    """A run of decisions of one kind by one agent. B rows, T decisions; every [B, T] tensor is aligned.

    `trained_mask` is the set of decisions that a loss may use, and a subset of `length_mask`.
    """

    decisions_are_draws: ClassVar[bool] = False
    """Whether the T decisions are draws of one and the same quantity, to be averaged, and not factors of a product."""
    agent: str
    """Name of the policy that made it."""
    group: Tensor  # [B] int64, ids of prompts
    rollout_log_probs: Tensor  # [B, T] float32, in the sampler's own numerics
    trained_mask: Tensor  # [B, T] bool: decisions that a loss may train
    length_mask: Tensor  # [B, T] bool: decisions that exist (padding and cut-off steps do not)
    context_mask: Tensor  # [B, T] bool: entries given to the model, not chosen by it (tool output)
    log_prob_unit: LogProbUnit
    version: int
    """Version of the weights that made it."""
    ended: list[str]  # [B] "eos", "length", "complete", ...
    keys: list[SampleKey]  # [B]
    parent: Tensor | None = None  # [B] int64: the row of the previous segment that each row continues
    kind: str = "segment"

    def with_prompts_of(self, rows: Tensor) -> Segment:
        """The same decisions, row b under the prompt of row `rows[b]` [B]."""
        raise UserError(f"a segment of {self.kind} cannot exchange its prompts.")

    @property
    def num_rows(self) -> int:
        return self.rollout_log_probs.shape[0]

    @property
    def num_steps(self) -> int:
        return self.rollout_log_probs.shape[1]


@dataclass
class TokenSegment(Segment):
    """Token decisions. The prompts are stored once and left-padded; row b continues prompt `prompt_index[b]`.

    Several codebooks are T = frames x K decisions in frame-major order with the delay pattern in the masks.
    """

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))  # [B, T] int64
    prompt_tokens: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))  # [P, L] int64
    prompt_mask: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.bool))  # [P, L] bool
    prompt_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # [B] int64
    temperature: float = 1.0
    near_ties: int = 0
    """Draws whose uniform number lay within rounding of an edge of the cumulative distribution."""
    kind: str = "tokens"

    def with_prompts_of(self, rows: Tensor) -> TokenSegment:
        return replace(self, prompt_index=self.prompt_index[rows])


@dataclass
class LatentSegment(Segment):
    """Decisions about latents, and what the denoiser is told about each row: embeddings, stored once per prompt."""

    guidance_scale: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [B, T] float32; 1 = no guidance
    conditions: dict[str, Tensor] = field(default_factory=dict)  # name -> [P, ...]: embeddings, once per prompt
    condition_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # [B]
    negative_index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # [B]; -1 = none

    def with_prompts_of(self, rows: Tensor) -> LatentSegment:
        return replace(self, condition_index=self.condition_index[rows], negative_index=self.negative_index[rows])


@dataclass
class DenoisingSegment(LatentSegment):
    """Denoising decisions: decision t moves the latent from sigma (or timestep) t to t + 1 of its own table.

    `states[i]` is the latent before transition i (`states[num_steps]` is the final one), float32 whatever the model's
    dtype, already rounded to the storage dtype before it was scored. Only states next to a trained transition are kept,
    and the final one in `final_latents`.
    """

    sampler: str = ""
    """Name and parameters of the transition kernel live with the policy; the name is kept for the record."""
    states: dict[int, Tensor] = field(default_factory=dict)  # index -> [B, ...] float32
    final_latents: Tensor = field(default_factory=lambda: torch.empty(0))  # [B, ...] float32
    times: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [B, T + 1] float32: sigma, or timestep of a UNet
    std: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [B, T] float32: noise std, 0 = deterministic
    kind: str = "denoising"


@dataclass
class ForwardSegment(LatentSegment):
    """Clean latents, each noised T times by the forward process; decision t asks the denoiser to undo one of them.

    The log-prob of a decision is -w(t) mean((prediction - target)^2), a surrogate of the sample's log-likelihood. The
    noise is drawn again from `noise_seed` whenever it is needed. There was no rollout: `rollout_log_probs` are NaN.
    """

    decisions_are_draws: ClassVar[bool] = True
    clean: Tensor = field(default_factory=lambda: torch.empty(0))  # [B, ...] in the storage dtype
    times: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [B, T] float32: sigma, or timestep of a UNet
    weights: Tensor = field(default_factory=lambda: torch.empty(0, 0))  # [B, T] float32: w(t)
    noise_seed: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))  # [B] int64
    kind: str = "forward"


@dataclass
class Trajectory:
    """Segments in the order in which they were made, and the requests of the first segment's rows."""

    segments: list[Segment]
    requests: list[Request]

    def roots(self, segment: int) -> Tensor:
        """[B_s] int64: for each row of `segments[segment]` the row of the first segment that it descends from."""
        rows = torch.arange(self.segments[segment].num_rows)
        for index in range(segment, 0, -1):
            parent = self.segments[index].parent
            if parent is not None:
                rows = parent[rows]
        return rows

    def leaf_prompts(self) -> list[Prompt]:
        """The prompt of each row of the last segment: what a reward is given with each decoded sample."""
        return [self.requests[row].prompt for row in self.roots(len(self.segments) - 1).tolist()]


@dataclass(frozen=True)
class Cut:
    """One micro-batch of decisions: some rows and some consecutive steps of one segment."""

    segment: int
    rows: Tensor  # [b] int64
    steps: slice

    def take(self, values: Tensor) -> Tensor:
        """The cut's part [b, t] of a tensor [B, T] aligned with its segment."""
        return values[self.rows, self.steps]


@dataclass
class Replay:
    """What `Policy.replay` computed for a cut; only what was asked for in `needs` is set."""

    log_prob: Tensor | None = None  # [b, t] float32
    entropy: Tensor | None = None  # [b, t] float32, nats
    mean: Tensor | None = None  # [b, t, ...] float32: mean of each transition
    std: Tensor | None = None  # [b, t] float32: the transition's own noise std
    prediction: Tensor | None = None  # [b, t, ...] float32: the model's output (velocity, epsilon ...), guided
    clean_prediction: Tensor | None = None  # [b, t, ...] float32: the clean latent that the prediction implies (affine)
    target: Tensor | None = None  # [b, t, ...] float32: the prediction of a perfect denoiser; forward segments only
    features: Tensor | None = None  # [b, t, D]: what a value head reads

    def of(self, need: Need) -> Tensor:
        """The tensor `need`; an error if it was not asked for or the policy cannot give it."""
        value = getattr(self, need)
        if value is None:
            raise ValueError(f"replay was not asked for {need!r}, or this policy does not offer it.")
        return value


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

    def rollout_with_gradient(self, requests: Sequence[Request], last_steps: int, sampling: Any = None) -> Trajectory:
        """The samples of `rollout`, bit for bit, with the gradient of the current weights through their last steps.

        Gradient runs through the last `last_steps` transitions (DRaFT-K, Clark et al. 2024) into `final_latents`, and
        `decode(trajectory, differentiable=True)` carries it on to the samples; noise is a constant. Nothing else of the
        trajectory has a gradient. Raises UserError for a policy whose decisions are discrete.
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

    def load_weight_state(self, state: dict[str, Tensor]) -> None:
        """Restores `weight_state`; an error that names missing and unexpected keys."""
        self.weight_sets.load_state(state)

    def set_version(self, version: int) -> None:
        """States the version of the current weights; it is written into the segments of later rollouts."""
        self.version = version


def _any_prompts(prompts: Sequence[Prompt], sampling: Any) -> int:
    return 0


@dataclass(frozen=True)
class PolicySummary:
    """What `uniml-rl check` says of a policy without training or sampling."""

    model: str
    """The model's source and architecture."""
    sample_kind: Literal["text", "image", "video", "audio"]
    decisions: list[tuple[str, LogProbUnit]]
    """As `Policy.decisions`."""
    parameters: int
    trainable_parameters: int
    bytes_per_parameter: int
    """Of the frozen weights; trainable ones are float32."""
    sampling: Any = None
    """As `Policy.sampling`."""
    fit: Callable[[Sequence[Prompt], Any], int] = _any_prompts
    """`fit(prompts, sampling)` raises UserError if the policy cannot sample from one of the prompts with these
    settings. It returns the tokens of the longest prompt, 0 where prompts take no room in the sample's sequence."""


class PolicyConfig(Settings):
    """A policy's block in the YAML file; each family adds its keys and builds itself."""

    sampling: Any = None
    """How rollouts are sampled; evaluation replaces keys of it."""

    def build(self, name: str, device: str, seed: int) -> Policy:
        """The policy, its models on `device`, fresh adapters initialised from `seed`."""
        raise NotImplementedError

    def inspect(self) -> PolicySummary:
        """Counts parameters from headers and configurations; raises UserError for whatever `build` would refuse.

        Here: builds the policy to count.
        """
        policy = self.build("inspected", "cpu", 0)
        parameters = [p for module in policy.trainable_modules().values() for p in module.parameters()]
        return PolicySummary(
            type(policy).__name__,
            policy.sample_kind,
            policy.decisions(),
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            policy.dtype.itemsize,
            policy.sampling,
        )


class SamplerBackend(Protocol):
    """Where samples come from, apart from the policy: in this process, or an inference engine elsewhere."""

    repeatable: bool
    """Whether the same request and weights give the same sample again."""

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Takes named tensors; later samples come from this version."""
        ...

    def sample(self, requests: Sequence[Request], sampling: Any) -> Segment:
        """One row per request with the behaviour policy's log-probs."""
        ...


def with_parent(segment: Segment, parent: Tensor) -> Segment:
    """The segment as a continuation: row b continues row `parent[b]` of the segment before it."""
    return replace(segment, parent=parent)
