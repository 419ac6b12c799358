"""Drawing and scoring tokens, against torch.distributions, scipy and transformers' own logits processors."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from torch import Tensor, nn
from torch.distributions import Categorical
from transformers import TopKLogitsWarper, TopPLogitsWarper

from modalities.base import Cut, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.tokens import (
    TokenSampling,
    choose_tokens,
    cuts_by_length,
    left_pad,
    score_hidden,
    uniform_draws,
)

SLOW = settings(max_examples=25, deadline=None)


def key(sample: int, prompt: int = 0) -> SampleKey:
    return SampleKey(0, 0, 0, prompt, sample)


def random_logits(rows: int, vocabulary: int = 8, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits = random_logits(1)[0]
    uniforms = uniform_draws([key(sample) for sample in range(4000)], 1)[:, 0]
    drawn = choose_tokens(logits.expand(4000, -1), uniforms, TokenSampling(temperature=0.7)).tokens
    expected = Categorical(logits=logits / 0.7).probs.double()
    assert chisquare(drawn.bincount(minlength=8), 4000 * expected / expected.sum()).pvalue > 1e-3


def test_uniform_draws_are_uniform_own_and_prefixes_of_longer_ones() -> None:
    keys = [key(sample, prompt) for prompt in range(20) for sample in range(20)]
    draws = uniform_draws(keys, 16)
    assert draws.dtype == torch.float64
    assert kstest(draws.flatten(), "uniform").pvalue > 1e-3
    assert len(draws.unique()) == draws.numel()
    for count in (1, 7, 15):
        assert torch.equal(uniform_draws(keys, count), draws[:, :count])
    assert torch.equal(uniform_draws(keys[::-1], 16), draws.flip(0))


@SLOW
@given(st.integers(0, 1000), st.floats(0.3, 2.0), st.permutations(range(6)), st.integers(1, 6))
def test_a_draw_depends_on_its_own_row_alone(seed: int, temperature: float, order: list[int], size: int) -> None:
    logits, uniforms = random_logits(6, seed=seed), uniform_draws([key(i, seed) for i in range(6)], 1)[:, 0]
    sampling = TokenSampling(temperature=temperature)
    whole = choose_tokens(logits, uniforms, sampling)
    rows = torch.tensor(order[:size])
    part = choose_tokens(logits[rows], uniforms[rows], sampling)
    assert torch.equal(part.tokens, whole.tokens[rows])
    assert torch.equal(part.log_probs, whole.log_probs[rows])
    expected = Categorical(logits=logits / temperature).log_prob(whole.tokens)
    torch.testing.assert_close(whole.log_probs, expected, rtol=1e-5, atol=1e-5)


def test_only_numbers_near_an_edge_count_as_near_ties() -> None:
    probabilities = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    cases = {0.0: 0, 0.06: 0, 0.125 - 1e-7: 1, 0.125 + 1e-7: 1, 0.3: 0, 0.625 + 1e-7: 1, 0.7: 0, 0.9: 0}
    for number, ties in cases.items():
        uniform = torch.tensor([number], dtype=torch.float64)
        assert choose_tokens(probabilities.log(), uniform, TokenSampling()).near_ties == ties, number
    assert choose_tokens(probabilities.log(), torch.tensor([0.3]).double(), TokenSampling()).tokens.item() == 1


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    choice = choose_tokens(logits, torch.tensor([number], dtype=torch.float64), TokenSampling())
    assert choice.tokens.item() == (1 if number == 0 else 3)
    assert choice.log_probs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "warper"),
    [
        ({"top_k": 3}, TopKLogitsWarper(3)),
        ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
        ({"top_p": 0.1}, TopPLogitsWarper(0.1)),
    ],
)
def test_truncated_draws_follow_transformers_processors(options: dict, warper: object) -> None:
    logits = random_logits(1, seed=3)
    uniforms = uniform_draws([key(sample) for sample in range(3000)], 1)[:, 0]
    choice = choose_tokens(logits.expand(3000, -1), uniforms, TokenSampling(**options))
    allowed = Categorical(logits=warper(None, logits.clone())[0]).probs.double()  # type: ignore[operator]
    counts = choice.tokens.bincount(minlength=8)
    assert counts[allowed == 0].sum() == 0
    if (allowed > 0).sum() > 1:
        kept = allowed > 0
        assert chisquare(counts[kept], 3000 * allowed[kept] / allowed.sum()).pvalue > 1e-3
    whole = Categorical(logits=logits[0]).log_prob(choice.tokens)
    torch.testing.assert_close(choice.log_probs, whole, rtol=1e-5, atol=1e-5)


def test_greedy_takes_the_most_probable_and_counts_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 2.0]])
    choice = choose_tokens(logits, torch.zeros(2).double(), TokenSampling(temperature=0))
    assert choice.tokens[0] == 1
    assert choice.tokens[1] in (0, 2)
    assert choice.near_ties == 1


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 4}, {"top_p": 0.9}])
def test_sampling_that_cannot_be_trained_says_why(options: dict) -> None:
    assert next(iter(options)) in str(TokenSampling(**options).why_untrainable())
    assert TokenSampling(temperature=0.5).why_untrainable() is None


class CountingHead(nn.Linear):
    """A head that notes for how many decisions at a time it was asked."""

    def __init__(self) -> None:
        super().__init__(6, 9)
        self.sizes: list[int] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.sizes.append(len(hidden))
        return super().forward(hidden)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_chunked_scores_and_gradients_are_those_of_a_categorical(chunk: int, with_entropy: bool) -> None:
    torch.manual_seed(0)
    head, hidden, tokens = CountingHead(), torch.randn(7, 6, requires_grad=True), torch.randint(0, 9, (7,))
    distribution = Categorical(logits=nn.functional.linear(hidden, head.weight, head.bias) / 0.6)
    weights = torch.randn(2, 7)

    def gradients(log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
        loss = (weights[0] * log_probs).sum() + (0 if entropy is None else (weights[1] * entropy).sum())
        return torch.autograd.grad(loss, [hidden, head.weight, head.bias])

    log_probs, entropy = score_hidden(head, hidden, tokens, 0.6, with_entropy, chunk)
    torch.testing.assert_close(log_probs, distribution.log_prob(tokens), rtol=1e-5, atol=1e-6)
    if with_entropy:
        torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-5, atol=1e-6)
    expected = gradients(distribution.log_prob(tokens), distribution.entropy() if with_entropy else None)
    torch.testing.assert_close(gradients(log_probs, entropy), expected, rtol=1e-4, atol=1e-5)
    assert max(head.sizes) <= chunk
    assert sum(head.sizes) == (7 if chunk >= 7 else 14)  # once more in the backward pass, chunk by chunk


def test_a_forbidden_token_leaves_entropy_and_gradient_finite() -> None:
    hidden = torch.randn(2, 3, requires_grad=True)
    forbidden = torch.tensor([0.0, -math.inf, 0.0, 0.0])

    def head(values: Tensor) -> Tensor:
        return torch.cat([values, values[:, :1] * 0], dim=1) + forbidden

    log_probs, entropy = score_hidden(head, hidden, torch.tensor([0, 2]), 1.0, True, 10)
    assert entropy is not None
    kept = Categorical(logits=torch.stack([hidden[:, 0], hidden[:, 2], hidden[:, 0] * 0], dim=1))
    torch.testing.assert_close(entropy, kept.entropy())
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), hidden)
    assert gradient.isfinite().all()


def test_scores_are_float32_whatever_the_heads_type() -> None:
    head = nn.Linear(4, 5).bfloat16()
    log_probs, entropy = score_hidden(head, torch.randn(3, 4).bfloat16(), torch.tensor([0, 1, 2]), 1.0, True, 2)
    assert log_probs.dtype == torch.float32
    assert entropy is not None
    assert entropy.dtype == torch.float32


def test_left_padding_keeps_every_sequence_at_the_right() -> None:
    tokens, mask = left_pad([[5], [1, 2, 3], [4, 4]], padding=9)
    assert tokens.tolist() == [[9, 9, 5], [1, 2, 3], [9, 4, 4]]
    assert [row[keep].tolist() for row, keep in zip(tokens, mask, strict=True)] == [[5], [1, 2, 3], [4, 4]]


def trajectory(prompt_lengths: list[int], prompt_index: list[int], lengths: list[int]) -> Trajectory:
    prompt_tokens, prompt_mask = left_pad([[1] * length for length in prompt_lengths])
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    segment = TokenSegment(
        agent="a",
        group=torch.tensor(prompt_index),
        rollout_log_probs=torch.zeros(exists.shape),
        trained_mask=exists,
        length_mask=exists,
        context_mask=torch.zeros_like(exists),
        log_prob_unit="token",
        version=0,
        ended=["length"] * len(lengths),
        keys=[key(row) for row in range(len(lengths))],
        tokens=exists.long(),
        prompt_tokens=prompt_tokens,
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor(prompt_index),
    )
    return Trajectory([segment], [])


def prompts_computed(cut: Cut, of: Trajectory) -> int:
    segment = of.segments[0]
    assert isinstance(segment, TokenSegment)
    return len(segment.prompt_index[cut.rows].unique())


@SLOW
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 5))
def test_every_chosen_row_is_in_one_cut_within_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    made = trajectory([3, 1, 8, 2], [prompt for prompt, _ in rows], [length for _, length in rows])
    roots = torch.arange(0, len(rows), 2)
    cuts = cuts_by_length(made, 0, roots, budget)
    assert sorted(torch.cat([cut.rows for cut in cuts]).tolist()) == roots.tolist()
    assert max(len(cut.rows) for cut in cuts) <= budget
    assert len(cuts) == math.ceil(len(roots) / budget)
    assert all(cut.steps == slice(0, made.segments[0].num_steps) for cut in cuts)


def test_long_prompts_stay_together_and_long_responses_do_too() -> None:
    long_prompts = trajectory([50, 50], [0, 1, 0, 1], [3, 3, 4, 4])
    assert [prompts_computed(cut, long_prompts) for cut in cuts_by_length(long_prompts, 0, torch.arange(4), 2)] == [
        1,
        1,
    ]
    long_responses = trajectory([2, 2], [0, 1, 0, 1], [3, 3, 90, 90])
    cuts = cuts_by_length(long_responses, 0, torch.arange(4), 2)
    assert [sorted(cut.rows.tolist()) for cut in cuts] == [[0, 1], [2, 3]]


def test_no_rows_make_no_cuts() -> None:
    assert cuts_by_length(trajectory([1], [0], [2]), 0, torch.tensor([], dtype=torch.long), 4) == []
