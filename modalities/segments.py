"""Trajectories of decisions: the tensors that a rollout records, that a replay scores, and that every loss reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from modalities.randomness import SampleKey
from modalities.samples import Prompt

Need = Literal[
    "log_prob", "entropy", "mean", "std", "step_size", "prediction", "clean_prediction", "target", "features"
]
LogProbUnit = Literal["token", "element_mean", "element_sum", "error_mean", "error_sum", "none"]
"""What a decision's log-prob is: of a token; of a latent, the mean or the sum over its elements; minus the squared
error of the transition's mean, which is no log-density; or nothing, where the sampler draws no noise."""

# What the entries of a segment's field are aligned with, stated in the field's metadata: `modalities.trajectories`
# joins segments and selects rows by it. A field that states nothing is the same for all rows.
ROWS = {"layout": "rows"}  # [B, ...], or a list of B
STEPS = {"layout": "steps"}  # [B, T], padded on the right
PROMPTS = {"layout": "prompts"}  # name -> [P, ...]: tables
PADDED_PROMPTS = {"layout": "padded prompts"}  # [P, L, ...]: a table, padded on the left
PROMPT_INDEX = {"layout": "prompt index"}  # [B] int64 into the tables; -1 = none
STATES = {"layout": "states"}  # step -> [B, ...]
PARENT = {"layout": "parent"}  # [B] int64 into the rows of the segment before, or None
TOTAL = {"layout": "total"}  # a number that adds up
OLDEST = {"layout": "oldest"}  # a number of which the smallest stands for all


def no_table() -> Tensor:
    """[0, 0] float32, as `no_tokens`, `no_mask` and `no_index` the default of a field that a segment may leave out."""
    return torch.empty(0, 0)


def no_tokens() -> Tensor:
    """[0, 0] int64."""
    return torch.empty(0, 0, dtype=torch.long)


def no_mask() -> Tensor:
    """[0, 0] bool."""
    return torch.empty(0, 0, dtype=torch.bool)


def no_index() -> Tensor:
    """[0] int64."""
    return torch.empty(0, dtype=torch.long)


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
    group: Tensor = field(metadata=ROWS)  # [B] int64, ids of prompts
    rollout_log_probs: Tensor = field(metadata=STEPS)  # [B, T] float32, in the sampler's own numerics
    trained_mask: Tensor = field(metadata=STEPS)  # [B, T] bool: decisions that a loss may train
    length_mask: Tensor = field(metadata=STEPS)  # [B, T] bool: decisions that exist (padding and cut-off steps do not)
    context_mask: Tensor = field(metadata=STEPS)  # [B, T] bool: entries given to the model, not chosen by it (tools)
    log_prob_unit: LogProbUnit
    version: int = field(metadata=OLDEST)
    """Version of the weights that made it."""
    ended: list[str] = field(metadata=ROWS)  # [B] "eos", "length", "complete", ...
    keys: list[SampleKey] = field(metadata=ROWS)  # [B]
    parent: Tensor | None = field(default=None, metadata=PARENT)  # the row of the previous segment that it continues
    kind: str = "segment"

    def with_prompts_of(self, rows: Tensor) -> Segment:
        """The same decisions, row b under the prompt of row `rows[b]` [B]."""
        indices = [each.name for each in fields(self) if each.metadata == PROMPT_INDEX]
        return replace(self, **{name: getattr(self, name)[rows] for name in indices})

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

    tokens: Tensor = field(default_factory=no_tokens, metadata=STEPS)  # [B, T] int64
    prompt_tokens: Tensor = field(default_factory=no_tokens, metadata=PADDED_PROMPTS)  # [P, L] int64
    prompt_mask: Tensor = field(default_factory=no_mask, metadata=PADDED_PROMPTS)  # [P, L] bool
    prompt_index: Tensor = field(default_factory=no_index, metadata=PROMPT_INDEX)  # [B] int64
    temperature: float = 1.0
    near_ties: int = field(default=0, metadata=TOTAL)
    """Draws whose uniform number lay within rounding of an edge of the cumulative distribution."""
    kind: str = "tokens"


@dataclass
class LatentSegment(Segment):
    """Decisions about latents, and what the denoiser is told about each row: embeddings, stored once per prompt."""

    guidance_scale: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, T] float32; 1 = no guidance
    conditions: dict[str, Tensor] = field(default_factory=dict, metadata=PROMPTS)  # name -> [P, ...]: embeddings
    condition_index: Tensor = field(default_factory=no_index, metadata=PROMPT_INDEX)  # [B]
    negative_index: Tensor = field(default_factory=no_index, metadata=PROMPT_INDEX)  # [B]; -1 = none


@dataclass
class DenoisingSegment(LatentSegment):
    """Denoising decisions: decision t moves the latent from sigma (or timestep) t to t + 1 of its own table.

    `states[i]` is the latent before transition i (`states[num_steps]` is the final one), float32 whatever the model's
    dtype, already rounded to the storage dtype before it was scored. Only states next to a trained transition are kept,
    and the final one in `final_latents`.
    """

    sampler: str = ""
    """Name and parameters of the transition kernel live with the policy; the name is kept for the record."""
    states: dict[int, Tensor] = field(default_factory=dict, metadata=STATES)  # index -> [B, ...]
    final_latents: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, ...]
    times: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, T + 1] float32: sigma, or timestep of a UNet
    std: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, T] float32: noise std, 0 = deterministic
    kind: str = "denoising"


@dataclass
class ForwardSegment(LatentSegment):
    """Clean latents, each noised T times by the forward process; decision t asks the denoiser to undo one of them.

    The log-prob of a decision is -w(t) mean((prediction - target)^2), a surrogate of the sample's log-likelihood. The
    noise is drawn again from `noise_seed` whenever it is needed. There was no rollout: `rollout_log_probs` are NaN.
    """

    decisions_are_draws: ClassVar[bool] = True
    clean: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, ...] in the storage dtype
    times: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, T] float32: sigma, or timestep of a UNet
    weights: Tensor = field(default_factory=no_table, metadata=ROWS)  # [B, T] float32: w(t)
    noise_seed: Tensor = field(default_factory=no_index, metadata=ROWS)  # [B] int64
    kind: str = "forward"


@dataclass
class Trajectory:
    """Segments in the order in which they were made, and the requests of the first segment's rows."""

    segments: list[Segment]
    requests: list[Request]
    part_requests: list[list[Request]] = field(default_factory=list)
    """Of a chain: the requests that each segment's agent was given, one per row of it."""

    def part(self, segment: int) -> Trajectory:
        """One segment as the trajectory of the agent that made it."""
        return Trajectory(
            [self.segments[segment]], self.part_requests[segment] if self.part_requests else self.requests
        )

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
    step_size: Tensor | None = None  # [b, t] float32: the share of the process's time that the transition passes
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


def with_parent(segment: Segment, parent: Tensor) -> Segment:
    """The segment as a continuation: row b continues row `parent[b]` of the segment before it."""
    return replace(segment, parent=parent)
