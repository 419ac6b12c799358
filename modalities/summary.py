"""What is known of a policy without its weights: sizes, decisions, which prompts fit, rough memory of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from modalities.samples import Prompt, Sample
from modalities.segments import LogProbUnit, Need


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


def _any_samples(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
    return None


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
    parameters: int
    trainable_parameters: int
    bytes_per_parameter: int
    """Of the frozen weights; trainable ones are float32."""
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
    rows: list[RowMemory] = field(default_factory=list)
    """Rough memory of a sample, for each segment; empty if nothing is known."""
