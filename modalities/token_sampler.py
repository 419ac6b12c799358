"""The in-process sampler of token decisions: one prefill per prompt, a cache, and a batch that finished rows leave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modalities.base import Request, TokenSegment
from modalities.errors import UserError
from modalities.samples import Prompt
from modalities.tokens import Choice, TokenModel, TokenSampling, choose_tokens, distinct, left_pad, uniform_draws


def require_room(prompt: Prompt, length: int, max_new_tokens: int, max_positions: int | None) -> None:
    """Raises UserError if a prompt of `length` tokens and its longest response exceed the model's positions."""
    if max_positions is not None and length + max_new_tokens > max_positions:
        raise UserError(
            f"prompt {prompt.index} ({prompt.text[:40]!r}...) has {length} tokens; with sampling.max_new_tokens: "
            f"{max_new_tokens} that is more than the model's {max_positions} positions. Shorten the prompt or lower "
            "max_new_tokens."
        )


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
        sequences, prompt_index = distinct([self.tokenize(request.prompt) for request in requests])
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
            require_room(request.prompt, len(sequences[index]), sampling.max_new_tokens, self.max_positions)

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
