"""From per-decision values to one number: the same number for every way of cutting the work."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniml_rl.algorithms.aggregation import aggregate, decision_weights, global_denominator, local_denominator

MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sum_over_constant", "prompt_mean"]
CONSTANT = 8.0
# Rows of 3, 1, 0 and 2 trained decisions; rows 0 and 1 share a prompt, rows 2 and 3 another.
VALUES = torch.tensor([[1.0, 2.0, 3.0, 99.0], [99.0, 10.0, 99.0, 99.0], [99.0] * 4, [4.0, 99.0, 99.0, -2.0]])
MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1]]).bool()
GROUPS = torch.tensor([2**60, 2**60, 5, 5])
BY_HAND = {
    "token_mean": Fraction(6 + 10 + 2, 6),
    "sequence_mean_token_mean": (Fraction(6, 3) + 10 + Fraction(2, 2)) / 3,
    "sequence_mean_token_sum": Fraction(6 + 10 + 2, 3),
    "sum_over_constant": Fraction(6 + 10 + 2, 8),
    "prompt_mean": (Fraction(6 + 10, 4) + Fraction(2, 2)) / 2,
}


def reduced(values, mask, mode, groups):
    weights = decision_weights(mask, mode, groups=groups)
    return aggregate(values, weights, global_denominator(mask, mode, groups=groups, constant=CONSTANT))


@st.composite
def batches(draw):
    """Values, mask and groups of consecutive rows [B, T], some rows and prompts without a trained decision."""
    rows, steps = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, steps, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    return torch.randn(rows, steps, generator=generator), mask, torch.arange(rows) // 2 * 1000


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_gives_the_number_worked_out_by_hand(mode):
    assert float(reduced(VALUES, MASK, mode, GROUPS)) == pytest.approx(float(BY_HAND[mode]), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(batches())
def test_cutting_into_single_steps_and_rows_changes_neither_loss_nor_gradient(mode, batch):
    values, mask, groups = batch
    whole = values.clone().requires_grad_()
    reduced(whole, mask, mode, groups).backward()
    cut = values.clone().requires_grad_()
    weights = decision_weights(mask, mode, groups=groups)
    denominator = global_denominator(mask, mode, groups=groups, constant=CONSTANT)
    total = 0.0
    for row in range(len(mask)):
        for step in range(mask.shape[1]):
            part = aggregate(cut[row : row + 1, step : step + 1], weights[row : row + 1, step : step + 1], denominator)
            part.backward()
            total += part.item()
    assert total == pytest.approx(float(reduced(values, mask, mode, groups)), abs=1e-5)
    torch.testing.assert_close(cut.grad, whole.grad)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(0, 3))
def test_two_ranks_give_the_sum_of_one(mode, batch, prompts_on_first_rank):
    values, mask, groups = batch
    first = min(2 * prompts_on_first_rank, len(mask))  # a prompt's rows stay together
    parts = [(values[:first], mask[:first], groups[:first]), (values[first:], mask[first:], groups[first:])]
    total = 0.0
    for index, (part_values, part_mask, part_groups) in enumerate(parts):
        other_mask, other_groups = parts[1 - index][1:]
        denominator = global_denominator(
            part_mask,
            mode,
            groups=part_groups,
            constant=CONSTANT,
            reduce=lambda local, m=other_mask, g=other_groups: local + local_denominator(m, mode, groups=g),
        )
        total += float(aggregate(part_values, decision_weights(part_mask, mode, groups=part_groups), denominator))
    assert total == pytest.approx(float(reduced(values, mask, mode, groups)), abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None)
@given(batches(), st.integers(0, 2**31))
def test_order_of_samples_padding_side_and_padding_width_do_not_matter(mode, batch, seed):
    values, mask, groups = batch
    expected = float(reduced(values, mask, mode, groups))
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    permuted = reduced(values[order], mask[order], mode, groups[order])
    other_side = reduced(values.flip(1), mask.flip(1), mode, groups)
    padding = torch.full((len(mask), 3), torch.nan)
    wider = reduced(torch.cat([padding, values], 1), torch.cat([padding == 0, mask], 1), mode, groups)
    assert [float(permuted), float(other_side), float(wider)] == pytest.approx([expected] * 3, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_without_a_trained_decision_leaves_numerator_and_denominator(mode):
    extra_values = torch.cat([VALUES, torch.full((1, 4), torch.inf)])
    extra_mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.bool)])
    extra_groups = torch.cat([GROUPS, torch.tensor([777])])
    assert reduced(extra_values, extra_mask, mode, extra_groups) == reduced(VALUES, MASK, mode, GROUPS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_masked_out_leaks_into_neither_loss_nor_gradient(mode, bad):
    clean = VALUES.clone().requires_grad_()
    reduced(clean, MASK, mode, GROUPS).backward()
    dirty = torch.where(MASK, VALUES, bad).requires_grad_()
    loss = reduced(dirty, MASK, mode, GROUPS)
    loss.backward()
    assert loss.item() == pytest.approx(float(BY_HAND[mode]), rel=1e-6)
    assert torch.equal(dirty.grad, clean.grad)
    assert (dirty.grad != 0).equal(MASK)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_any_trained_decision_is_zero_and_still_has_a_graph(mode):
    values = torch.full((2, 3), torch.nan).requires_grad_()
    loss = reduced(values, torch.zeros(2, 3, dtype=torch.bool), mode, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(values.grad, torch.zeros(2, 3))


def test_sum_over_constant_divides_by_the_constant_alone():
    doubled = reduced(VALUES.repeat(2, 1), MASK.repeat(2, 1), "sum_over_constant", GROUPS.repeat(2))
    assert float(doubled) == pytest.approx(2 * float(BY_HAND["sum_over_constant"]))
    with pytest.raises(ValueError, match="not a sum over ranks"):
        local_denominator(MASK, "sum_over_constant")
    with pytest.raises(ValueError, match="needs a constant"):
        global_denominator(MASK, "sum_over_constant")


def test_prompt_mean_needs_groups():
    with pytest.raises(ValueError, match="group ids"):
        decision_weights(MASK, "prompt_mean")


def test_low_precision_values_are_summed_in_float32():
    ones = torch.ones(1, 4097, dtype=torch.bfloat16)  # bfloat16 has no 4097
    loss = reduced(ones, torch.ones(1, 4097, dtype=torch.bool), "sequence_mean_token_sum", None)
    assert loss.dtype == torch.float32
    assert loss.item() == 4097
