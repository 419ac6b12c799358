"""What is known of a policy without its weights: sizes, decisions, which prompts fit, rough memory of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from modalities.errors import UserError
from modalities.samples import Prompt, Sample
from modalities.segments import LogProbUnit, Need
from modalities.shards import blocks_of


@dataclass(frozen=True)
class RowMemory:
    """Rough memory of one sample of a segment, in values, not bytes."""

    tokens: int
    """Tokens that a sample has beside its prompt's; of a denoising model 1, whose `activations` are a whole step's."""
    cache: int
    """Keys and values that a rollout keeps per token."""
    rows_at_once: int
    """Samples that a rollout computes at the same time, at most."""
    activations: int
    """What a forward pass keeps per token for the backward pass."""
    logits: int = 0
    """Logits that exist at the same time while log-probs are computed, whatever the number of samples."""


def layer_activations(hidden: int, feed_forward: int, cross_attention: bool = False) -> int:
    """What a transformer's layer keeps per token for the backward pass, roughly: 11 hidden + 4 feed_forward values.

    These are the inputs of two norms and of the projections, queries, keys, values, the attention's output and the
    residual sums, and both sides of the feed-forward part's non-linearity and gate. Attention scores are not kept
    (scaled_dot_product_attention computes them again). Another attention adds 4 hidden.
    """
    return (15 if cross_attention else 11) * hidden + 4 * feed_forward


def model_activations(layers: int, each: int, between: int, checkpointed: bool) -> int:
    """Values of `layers` layers that keep `each`; with checkpointing only what lies `between` two, and one layer's."""
    return layers * between + each if checkpointed else layers * each


def _any_prompts(prompts: Sequence[Prompt], sampling: Any) -> int:
    return 0


def _no_plan(ranks: int) -> None:
    raise UserError("only text policies have a plan by which weights are divided along heads and features.")


def _any_samples(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
    return None


@dataclass(frozen=True)
class WeightSizes:
    """Numbers of parameters, and the sizes that follow from them."""

    trainable: int = 0
    """Trainable parameters; they are float32."""
    frozen: int = 0
    """Other parameters of the modules that are trained: the base of an adapter."""
    bytes_per_frozen: int = 0
    beside: int = 0
    """Parameters of models that are only used: text encoders, the decoder of latents or codes."""
    beside_bytes: int = 0
    factored: int = 0
    """Values of a second moment that keeps a mean per row and per column of each trainable matrix (Adafactor)."""
    planned: int = 0
    """Of the parameters, those that a plan for tensor parallelism divides."""
    largest_unit: int = 0
    """Bytes that a pass through divided modules gathers at a time: the largest block, and what is in no block."""

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.trainable + self.frozen + self.beside

    @property
    def module_bytes(self) -> int:
        """Of the modules that are trained, with their frozen base."""
        return 4 * self.trainable + self.bytes_per_frozen * self.frozen

    def __add__(self, other: WeightSizes) -> WeightSizes:
        """Of two policies together."""
        return WeightSizes(
            self.trainable + other.trainable,
            self.frozen + other.frozen,
            max(self.bytes_per_frozen, other.bytes_per_frozen),
            self.beside + other.beside,
            self.beside_bytes + other.beside_bytes,
            self.factored + other.factored,
            self.planned + other.planned,
            max(self.largest_unit, other.largest_unit),
        )


def sizes_of(
    trained: Sequence[nn.Module], bytes_per_frozen: int, beside: Sequence[tuple[nn.Module, int]] = ()
) -> WeightSizes:
    """The sizes of modules, which may be on the meta device. `beside` holds models and their bytes per parameter."""

    def stored(parameters: Iterable[nn.Parameter]) -> int:
        return sum(p.numel() * (4 if p.requires_grad else bytes_per_frozen) for p in parameters)

    parameters = [parameter for module in trained for parameter in module.parameters()]
    matrices = [p.shape for p in parameters if p.requires_grad]
    others = [(sum(p.numel() for p in module.parameters()), size) for module, size in beside]
    blocks = [[stored(block.parameters()) for block in blocks_of(module)] for module in trained]
    wholes = [stored(module.parameters()) for module in trained]
    return WeightSizes(
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        bytes_per_frozen=bytes_per_frozen,
        beside=sum(count for count, _ in others),
        beside_bytes=sum(count * size for count, size in others),
        factored=sum(s.numel() if len(s) < 2 else s.numel() // s[-1] + s.numel() // s[-2] for s in matrices),
        largest_unit=max(
            (whole - sum(each) + max(each, default=0) for whole, each in zip(wholes, blocks, strict=True)), default=0
        ),
    )


@dataclass(frozen=True)
class PolicySummary:
    """What `uniml-rl check` says of a policy without training or sampling."""

    model: str
    """The model's source and architecture."""
    sample_kind: Literal["text", "image", "video", "audio"]
    decisions: list[tuple[str, LogProbUnit]]
    """As `Policy.decisions`."""
    offers: frozenset[Need]
    """As `Policy.offers`."""
    weights: WeightSizes
    """How many weights there are, and what takes memory beside them."""
    feature_size: int = 0
    """As `Policy.feature_size`."""
    windowed: bool = False
    """Whether a window picks the denoising transitions that are trained."""
    sampling: Any = None
    """As `Policy.sampling`."""
    attention: str = ""
    """The attention kernel; empty where it is not known."""
    fit: Callable[[Sequence[Prompt], Any], int] = _any_prompts
    """`fit(prompts, sampling)` raises UserError if the policy cannot sample from one of the prompts with these
    settings. It returns the tokens of the longest prompt, 0 where prompts take no room in the sample's sequence."""
    fit_given: Callable[[Sequence[Prompt], Sequence[Sample]], Any] = _any_samples
    """`fit_given(prompts, samples)` raises UserError if the policy cannot learn from one of the given samples."""
    reads: int | None = None
    """Of a reward model the tokens of prompt and sample together that it can read; None: any number."""
    check_tensor_parallel: Callable[[int], None] = _no_plan
    """Raises UserError, with the reason, if so many processes cannot divide the weights along heads and features."""
    rows: list[RowMemory] = field(default_factory=list)
    """Rough memory of a sample, for each segment; empty if nothing is known."""
