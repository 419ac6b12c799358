"""Token decisions, shared by every policy that samples from a softmax: sampling, the in-process sampler, scoring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from modalities.base import Cut, Need, Replay, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.settings import Settings

_TIE_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class SoftmaxSampling(Settings):
    """How a token is drawn. The temperature divides the logits in sampling, in replay and in the reference alike."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits everywhere; 0 takes the most probable token (evaluation only)."""
    top_k: int | None = Field(default=None, ge=1)
    """Draw among the k most probable tokens; evaluation only."""
    top_p: float | None = Field(default=None, gt=0, lt=1)
    """Draw among the fewest tokens whose probability reaches this sum; evaluation only."""
    rows_per_batch: int = Field(default=64, ge=1)
    """Most samples that are generated at the same time."""
    fixed_shape: bool = False
    """Compute every sample by itself, so that not even the last bit depends on what else is sampled; slow."""

    def why_untrainable(self) -> str | None:
        """The reason why samples drawn like this cannot be trained on, or None."""
        if self.temperature == 0:
            return "temperature: 0 is greedy decoding, which has no log-probability to train; use a value above 0."
        for key in ("top_k", "top_p"):
            if getattr(self, key) is not None:
                return (
                    f"{key}: {getattr(self, key)} samples from a truncated distribution, but training scores the whole "
                    f"one, so ratios would be wrong; leave {key} out (it is allowed in the evaluation's sampling)."
                )
        return None


AnySampling = TypeVar("AnySampling", bound=SoftmaxSampling)


def require_trainable(sampling: AnySampling) -> AnySampling:
    """The sampling itself; ValueError with the reason if samples drawn like this cannot be trained on."""
    if reason := sampling.why_untrainable():
        raise ValueError(reason)
    return sampling


class TokenSampling(SoftmaxSampling):
    """How responses are drawn."""

    max_new_tokens: int = Field(default=128, ge=1)
    """Longest response in tokens, an end-of-sequence token included."""
    eos_token_ids: list[int] | None = Field(default=None, min_length=1)
    """Tokens that end a response; None takes the model's own (text: of the tokenizer and the generation config)."""


@dataclass(frozen=True)
class Choice:
    """Tokens drawn from logits."""

    tokens: Tensor  # [b] int64
    log_probs: Tensor  # [b] float32, of the whole distribution at the temperature (1 where it is 0)
    near_ties: Tensor  # [] int64: draws that a rounding error could have changed


def uniform_draws(keys: Sequence[SampleKey], count: int) -> Tensor:
    """[B, count] float64 in [0, 1): each row from its own key alone; a smaller `count` gives a prefix."""
    return torch.stack([torch.rand(count, generator=key.generator(), dtype=torch.float64) for key in keys])


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: SoftmaxSampling) -> Choice:
    """Draws by inverting the cumulative distribution, so a draw depends on its logits and its uniform number alone.

    `logits` are [b, V] in any floating dtype, `uniforms` [b] float64. A draw whose uniform number lies within rounding
    of an edge of the distribution is counted as a near tie; so is a greedy choice between two nearly equal logits.
    """
    tolerance = _TIE_TOLERANCE.get(logits.dtype, 1e-5)
    log_probs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0:
        best, tokens = log_probs.topk(2, dim=-1)
        tokens, margin = tokens[:, 0], best[:, 0] - best[:, 1]
    else:
        cumulative = _truncate(log_probs.exp(), sampling).cumsum(dim=-1, dtype=torch.float64)
        target = uniforms[:, None] * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, target, right=True).clamp_max(logits.shape[-1] - 1)
        upper = cumulative.gather(1, index) - target
        lower = target - cumulative.gather(1, (index - 1).clamp_min(0)).masked_fill(index == 0, -1.0)
        tokens, margin = index[:, 0], torch.minimum(upper, lower)[:, 0]
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    return Choice(tokens, chosen, (margin <= tolerance).sum())


def _truncate(probabilities: Tensor, sampling: SoftmaxSampling) -> Tensor:
    if sampling.top_k is not None and sampling.top_k < probabilities.shape[-1]:
        smallest = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0.0)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(probabilities, dtype=torch.bool).scatter(
            1, order, before >= sampling.top_p * ordered.sum(-1, keepdim=True)
        )
        probabilities = probabilities.masked_fill(dropped, 0.0)
    return probabilities


def distinct(sequences: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
    """Each different sequence once, in order of appearance, and for every given one the index of its own."""
    seen: dict[tuple[int, ...], int] = {}
    index = [seen.setdefault(tuple(sequence), len(seen)) for sequence in sequences]
    return [list(sequence) for sequence in seen], index


def left_pad(sequences: Sequence[Sequence[int]], padding: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences of token ids as [P, L] int64 padded on the left, and their mask [P, L] bool."""
    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    tokens = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, torch.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]


def score_hidden(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    with_entropy: bool,
    chunk: int,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies (nats) of decisions, [N] float32 each, from hidden states [N, D] and tokens [N].

    Logits exist for `chunk` decisions at a time. Where there are more, the backward pass computes them again.
    """

    def score(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = head(hidden).float() / temperature
        if not with_entropy:
            return -cross_entropy(logits, tokens, reduction="none"), None
        log_probs = torch.log_softmax(logits, dim=-1)
        # The clamp keeps a logit of -inf from becoming 0 * inf; exp(-1e4) is 0 in float32 anyway.
        entropy = -(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(dim=-1)
        return log_probs.gather(1, tokens[:, None])[:, 0], entropy

    if len(hidden) <= chunk:
        return score(hidden, tokens)
    parts = []
    for part_hidden, part_tokens in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(score, part_hidden, part_tokens, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(score(part_hidden, part_tokens))
    log_probs, entropies = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropies) if with_entropy else None


def cuts_by_length(trajectory: Trajectory, segment: int, roots: Tensor, budget: int) -> list[Cut]:
    """Cuts of at most `budget` rows of a token segment, all decisions of a row in one.

    Takes the rows that descend from the first segment's rows `roots`. Rows of similar length go together, or those of
    the same prompt, which is then computed once: whichever leaves fewer tokens to compute.
    """
    values = trajectory.segments[segment]
    assert isinstance(values, TokenSegment)
    rows = torch.isin(trajectory.roots(segment), roots).nonzero()[:, 0].tolist()
    responses = values.length_mask.sum(1).tolist()
    prompts = values.prompt_mask.sum(1).tolist()
    prompt_of = values.prompt_index.tolist()
    orders = (
        sorted(rows, key=lambda row: prompts[prompt_of[row]] + responses[row]),
        sorted(rows, key=lambda row: (prompts[prompt_of[row]], prompt_of[row], responses[row])),
    )

    def computed_tokens(parts: list[list[int]]) -> int:
        total = 0
        for part in parts:
            own = {prompt_of[row] for row in part}
            total += len(own) * max(prompts[index] for index in own) + len(part) * max(responses[row] for row in part)
        return total

    best = min(
        ([order[at : at + budget] for at in range(0, len(order), budget)] for order in orders), key=computed_tokens
    )
    return [Cut(segment, torch.tensor(part), slice(0, values.num_steps)) for part in best]


@dataclass(frozen=True)
class Decisions:
    """The decisions of a batch of rows that are scored: decision n of row `rows[n]` chose `tokens[n]`."""

    rows: Tensor  # [N] int64
    positions: Tensor  # [N] int64: where in the row it was made, counted as the model does that scores it
    tokens: Tensor  # [N] int64
    temperature: float
    needs: frozenset[Need]


@dataclass(frozen=True)
class Continuations:
    """Prompts and responses to them, to be scored. A decision's position is its index in its response."""

    prompt_tokens: Tensor  # [p, L] int64, padded on the left
    prompt_mask: Tensor  # [p, L] int64
    prompt_of_row: Tensor  # [b] int64
    tokens: Tensor  # [b, T] int64, padded on the right
    decisions: Decisions


class TokenModel(Protocol):
    """A model of the next token; an nn.Module, so that every computation goes through its own `forward`."""

    def new_cache(self) -> Any:
        """An empty key-value cache with transformers' `reorder_cache`."""
        ...

    def __call__(
        self,
        tokens: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        continuations: Continuations | None = None,
    ) -> Any:
        """Next-token logits [b, V] after the last position, or the `Replay` ([N], [N, D]) of `continuations`."""
        ...


def replay_tokens(
    model: TokenModel, segment: TokenSegment, cut: Cut, needs: frozenset[Need], device: torch.device
) -> Replay:
    """Scores the decisions of a cut again, without padding that the cut's own rows do not need.

    Tensors are [b, t] (features [b, t, D]) on `device`; entries that do not exist are 0.
    """
    prompts, prompt_of_row = segment.prompt_index[cut.rows].unique(return_inverse=True)
    prompt_mask = segment.prompt_mask[prompts]
    width = int(prompt_mask.sum(1).max())
    exists_bt = cut.take(segment.length_mask)
    rows, steps = exists_bt.nonzero(as_tuple=True)
    positions = steps + (cut.steps.start or 0)
    chosen = cut.take(segment.tokens)[exists_bt]
    flat = model(
        continuations=Continuations(
            prompt_tokens=segment.prompt_tokens[prompts, -width:].to(device),
            prompt_mask=prompt_mask[:, -width:].long().to(device),
            prompt_of_row=prompt_of_row.to(device),
            tokens=segment.tokens[cut.rows, : max(positions.tolist(), default=0) + 1].to(device),
            decisions=Decisions(rows.to(device), positions.to(device), chosen.to(device), segment.temperature, needs),
        )
    )
    return spread_over_grid(flat, exists_bt)


def spread_over_grid(flat: Replay, exists_bt: Tensor) -> Replay:
    """A `Replay` of [N] decisions as [b, t]: they go where `exists_bt` holds, in order, and 0 elsewhere."""

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        where = exists_bt.to(values.device).nonzero(as_tuple=True)
        return values.new_zeros(*exists_bt.shape, *values.shape[1:]).index_put(where, values)

    return Replay(log_prob=spread(flat.log_prob), entropy=spread(flat.entropy), features=spread(flat.features))
