"""Token decisions, shared by every policy that samples from a softmax: sampling, the in-process sampler, scoring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from modalities.base import Cut, Need, Replay, Request, TokenSegment, Trajectory
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Prompt
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
    """Cuts of at most `budget` rows of a token segment, rows of similar length together, all decisions of a row in one.

    Takes the rows that descend from the first segment's rows `roots`.
    """
    values = trajectory.segments[segment]
    assert isinstance(values, TokenSegment)
    rows = torch.isin(trajectory.roots(segment), roots).nonzero()[:, 0]
    lengths = values.length_mask[rows].sum(1) + values.prompt_mask.sum(1)[values.prompt_index[rows]]
    ordered = rows[lengths.argsort(stable=True)]
    return [Cut(segment, part, slice(0, values.num_steps)) for part in ordered.split(budget) if len(part)]


@dataclass(frozen=True)
class Decisions:
    """Which positions of a batch of sequences are scored: decision n is `tokens[n]`, made at `positions[n]`."""

    rows: Tensor  # [N] int64
    positions: Tensor  # [N] int64: of the last token that was known when the decision was made
    tokens: Tensor  # [N] int64
    temperature: float
    needs: frozenset[Need]


class TokenModel(Protocol):
    """A model of the next token; an nn.Module, so that every computation goes through its own `forward`."""

    def new_cache(self) -> Any:
        """An empty key-value cache with transformers' `reorder_cache`."""
        ...

    def __call__(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Any = None,
        decisions: Decisions | None = None,
    ) -> Any:
        """Next-token logits [b, V] after the last position; with `decisions` their `Replay`, tensors [N] or [N, D]."""
        ...


def replay_tokens(
    model: TokenModel, segment: TokenSegment, cut: Cut, needs: frozenset[Need], device: torch.device
) -> Replay:
    """Scores the decisions of a cut by one forward pass without a cache; entries that do not exist are 0.

    Rows are packed to prompt + response and padded on the right, where causal attention never looks, so neither a mask
    nor the padding side of the stored prompts matters.
    """
    response_lengths = segment.length_mask[cut.rows].sum(1)
    prompt_rows = segment.prompt_index[cut.rows]
    prompt_lengths = segment.prompt_mask.sum(1)[prompt_rows]
    sequences = [
        torch.cat([segment.prompt_tokens[prompt][segment.prompt_mask[prompt]], segment.tokens[row, :length]])[:-1]
        for row, prompt, length in zip(cut.rows.tolist(), prompt_rows.tolist(), response_lengths.tolist(), strict=True)
    ]
    tokens_bS = pad_sequence(sequences, batch_first=True, padding_value=int(sequences[0][0]))
    exists_bt = cut.take(segment.length_mask)
    rows, steps = exists_bt.nonzero(as_tuple=True)
    positions = prompt_lengths[rows] + steps + (cut.steps.start or 0) - 1
    chosen = cut.take(segment.tokens)[exists_bt]
    decisions = Decisions(rows.to(device), positions.to(device), chosen.to(device), segment.temperature, needs)
    flat: Replay = model(tokens_bS.to(device), decisions=decisions)

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        grid = values.new_zeros(*exists_bt.shape, *values.shape[1:])
        return grid.index_put((decisions.rows, steps.to(device)), values)

    return Replay(log_prob=spread(flat.log_prob), entropy=spread(flat.entropy), features=spread(flat.features))


class InProcessSampler:
    """Samples from the live weights in this process.

    One prefill per distinct prompt, shared by its samples; a key-value cache; finished rows leave the batch; logits for
    the last position only; every sample's random numbers come from its own key.
    """

    repeatable = True

    def __init__(
        self,
        agent: str,
        model: TokenModel,
        tokenize: Callable[[Prompt], list[int]],
        eos_token_ids: Sequence[int],
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self.agent = agent
        self.model = model
        self.tokenize = tokenize
        self.eos_token_ids = list(eos_token_ids)
        self.device = device
        self.max_positions = max_positions
        self.version = 0

    def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """States the version; `tensors` are copied into the model, which needs none where it is the policy's own."""
        assert isinstance(self.model, nn.Module)
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                parameters[name].copy_(tensor)
        self.version = version

    @torch.no_grad()
    def sample(self, requests: Sequence[Request], sampling: TokenSampling) -> TokenSegment:
        """One row per request, in their order; tensors lie on the CPU.

        Raises UserError if prompt and response do not fit into the model's positions, FloatingPointError if the model
        gives no finite logits.
        """
        prompts: dict[tuple[int, ...], int] = {}
        prompt_index = [prompts.setdefault(tuple(self.tokenize(request.prompt)), len(prompts)) for request in requests]
        sequences = [list(prompt) for prompt in prompts]
        self._check_room(sequences, prompt_index, requests, sampling)
        drawn = _Drawn.empty(requests, sampling, sampling.eos_token_ids or self.eos_token_ids, self.device)
        for prompt_rows, batches in _batches(sequences, prompt_index, sampling):
            prefill = self._prefill([sequences[prompt] for prompt in prompt_rows])
            for number, batch in enumerate(batches):
                # The last batch may use up the prefilled cache; the ones before must leave it whole.
                cache = prefill.cache if number == len(batches) - 1 else copy.deepcopy(prefill.cache)
                own = [prompt_rows.index(prompt_index[row]) for row in batch]
                self._decode(replace(prefill, cache=cache), own, batch, drawn, sampling)
        log_probs, lengths = drawn.log_probs.cpu(), drawn.lengths.cpu()
        if not log_probs.isfinite().all():
            raise FloatingPointError(f"policy {self.agent!r} gave logits that are not finite while sampling.")
        steps = int(lengths.max())
        length_mask = torch.arange(steps) < lengths[:, None]
        prompt_tokens, prompt_mask = left_pad(sequences)
        return TokenSegment(
            agent=self.agent,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=log_probs[:, :steps],
            trained_mask=length_mask & (sampling.why_untrainable() is None),
            length_mask=length_mask,
            context_mask=torch.zeros_like(length_mask),
            log_prob_unit="token",
            version=self.version,
            ended=["eos" if finished else "length" for finished in drawn.finished.tolist()],
            keys=[request.key for request in requests],
            tokens=drawn.tokens[:, :steps].cpu(),
            prompt_tokens=prompt_tokens,
            prompt_mask=prompt_mask,
            prompt_index=torch.tensor(prompt_index),
            temperature=sampling.temperature or 1.0,
            near_ties=int(drawn.near_ties),
        )

    def _check_room(
        self,
        sequences: list[list[int]],
        prompt_index: list[int],
        requests: Sequence[Request],
        sampling: TokenSampling,
    ) -> None:
        for request, index in zip(requests, prompt_index, strict=True):
            length = len(sequences[index])
            if self.max_positions is not None and length + sampling.max_new_tokens > self.max_positions:
                raise UserError(
                    f"prompt {request.prompt.index} ({request.prompt.text[:40]!r}...) has {length} tokens; with "
                    f"sampling.max_new_tokens: {sampling.max_new_tokens} that is more than the {self.max_positions} "
                    f"positions of policy {self.agent!r}. Shorten the prompt or lower max_new_tokens."
                )

    def _prefill(self, sequences: list[list[int]]) -> _Prefill:
        tokens, mask = (tensor.to(self.device) for tensor in left_pad(sequences, padding=sequences[0][0]))
        cache = self.model.new_cache()
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = self.model(tokens, mask=mask.long(), positions=positions, cache=cache)
        return _Prefill(cache, logits, mask.long())

    def _decode(
        self, prefill: _Prefill, own: list[int], batch: list[int], drawn: _Drawn, sampling: TokenSampling
    ) -> None:
        """Continues row `own[i]` of the prefill as row `batch[i]` of `drawn`, and uses the cache up."""
        source = torch.tensor(own, device=self.device)
        rows = torch.tensor(batch, device=self.device)
        cache, width = prefill.cache, prefill.mask.shape[1]
        cache.reorder_cache(source)
        logits, mask = prefill.logits[source], prefill.mask[source]
        first_position = mask.sum(1)
        mask = torch.cat([mask, mask.new_ones(len(rows), sampling.max_new_tokens)], dim=1)
        for step in range(sampling.max_new_tokens):
            choice = choose_tokens(logits, drawn.uniforms[rows, step], sampling)
            alive = drawn.record(rows, step, choice)
            if len(alive) == 0 or step == sampling.max_new_tokens - 1:
                return
            tokens = choice.tokens
            if len(alive) < len(rows):
                rows, tokens, mask, first_position = rows[alive], tokens[alive], mask[alive], first_position[alive]
                cache.reorder_cache(alive)
            logits = self.model(
                tokens[:, None],
                mask=mask[:, : width + step + 1],
                positions=(first_position + step)[:, None],
                cache=cache,
            )


@dataclass(frozen=True)
class _Prefill:
    cache: Any
    logits: Tensor  # [p, V] after each prompt's last token
    mask: Tensor  # [p, L] int64


@dataclass
class _Drawn:
    """What has been drawn so far, for all requests, on the policy's device."""

    tokens: Tensor  # [B, N] int64
    log_probs: Tensor  # [B, N] float32
    lengths: Tensor  # [B] int64
    finished: Tensor  # [B] bool
    uniforms: Tensor  # [B, N] float64
    eos_token_ids: Tensor
    near_ties: Tensor

    @classmethod
    def empty(
        cls, requests: Sequence[Request], sampling: TokenSampling, eos_token_ids: Sequence[int], device: torch.device
    ) -> _Drawn:
        shape = len(requests), sampling.max_new_tokens
        return cls(
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            log_probs=torch.zeros(shape, device=device),
            lengths=torch.zeros(shape[0], dtype=torch.long, device=device),
            finished=torch.zeros(shape[0], dtype=torch.bool, device=device),
            uniforms=uniform_draws([request.key for request in requests], shape[1]).to(device),
            eos_token_ids=torch.tensor(eos_token_ids, dtype=torch.long, device=device),
            near_ties=torch.zeros((), dtype=torch.long, device=device),
        )

    def record(self, rows: Tensor, step: int, choice: Choice) -> Tensor:
        """Writes one token per row; returns the positions in `rows` of those that go on."""
        ends = torch.isin(choice.tokens, self.eos_token_ids)
        self.tokens[rows, step] = choice.tokens
        self.log_probs[rows, step] = choice.log_probs
        self.lengths[rows] = step + 1
        self.finished[rows] = ends
        self.near_ties += choice.near_ties
        return (~ends).nonzero()[:, 0]


def _batches(
    sequences: list[list[int]], prompt_index: list[int], sampling: TokenSampling
) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts that are prefilled together, and for each such set the batches of rows that continue them.

    Prompts of similar length go together. A prompt's rows are split over batches only if they alone exceed the limit.
    """
    limit = 1 if sampling.fixed_shape else sampling.rows_per_batch
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_index):
        rows_of.setdefault(prompt, []).append(row)
    sets: list[tuple[list[int], list[int]]] = []
    for prompt in sorted(rows_of, key=lambda prompt: len(sequences[prompt])):
        if not sets or len(sets[-1][1]) + len(rows_of[prompt]) > limit:
            sets.append(([], []))
        sets[-1][0].append(prompt)
        sets[-1][1].extend(rows_of[prompt])
    return [(prompts, [rows[at : at + limit] for at in range(0, len(rows), limit)]) for prompts, rows in sets]
