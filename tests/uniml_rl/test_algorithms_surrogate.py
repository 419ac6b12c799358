"""Ratios, clipped surrogates and the correction for a sampler of other numerics."""

import math

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from uniml_rl.algorithms.aggregation import aggregate, decision_weights, local_denominator
from uniml_rl.algorithms.mismatch import mask_mismatch, truncate_mismatch
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.algorithms.surrogate import (
    SurrogateInputs,
    capped_weight_surrogate,
    clipped_surrogate,
    log_ratio,
    penalised_surrogate,
    score_function_surrogate,
    sequence_log_ratio,
)
from uniml_rl.algorithms.token_surrogates import RangeSchedule

LOW, HIGH, DUAL = 0.2, 0.3, 3.0


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped"),
    [
        (2.0, 1.0, -2.0, False),
        (2.0, 1.25, -2.5, False),
        (2.0, 1.5, -2.6, True),  # too likely already: 2 * 1.3
        (2.0, 0.5, -1.0, False),  # a good decision that lost probability is pulled back
        (-2.0, 1.0, 2.0, False),
        (-2.0, 0.9, 1.8, False),
        (-2.0, 0.5, 1.6, True),  # too unlikely already: 2 * 0.8
        (-2.0, 2.0, 4.0, False),
        (-2.0, 5.0, 6.0, True),  # the second bound: 3 * 2
        (0.0, 5.0, 0.0, False),
    ],
)
def test_the_surrogate_worked_out_by_hand(advantage, ratio, loss, clipped):
    x = torch.tensor([[math.log(ratio)]], requires_grad=True)
    terms = clipped_surrogate(x, torch.tensor([[advantage]]), LOW, HIGH, DUAL)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss, rel=1e-6)
    assert terms.clipped.item() is clipped
    assert terms.ratio.item() == pytest.approx(ratio) and not terms.ratio.requires_grad
    assert x.grad.item() == pytest.approx(0.0 if clipped else -advantage * ratio, rel=1e-6)


def test_without_a_dual_bound_a_bad_decision_that_became_likely_is_pushed_back_in_full():
    terms = clipped_surrogate(torch.tensor([[math.log(5.0)]]), torch.tensor([[-2.0]]), LOW, HIGH, None)
    assert terms.loss.item() == pytest.approx(10.0)
    assert not terms.clipped.item()


@settings(max_examples=100, deadline=None)
@given(st.floats(-3, 3), st.floats(-2, 2).filter(lambda a: abs(a) > 1e-3), st.sampled_from([None, DUAL]))
def test_the_clip_is_marked_exactly_where_the_gradient_is_zero(x, advantage, dual):
    ratio = torch.tensor([[x]], requires_grad=True)
    terms = clipped_surrogate(ratio, torch.tensor([[advantage]]), LOW, HIGH, dual)
    terms.loss.sum().backward()
    assert terms.clipped.item() == (ratio.grad.item() == 0)


def test_at_the_old_policy_the_expected_gradient_is_the_policy_gradient():
    # Exact enumeration of a tabular policy: d/dlogits of E_pi[A], which autograd takes from the probabilities.
    torch.manual_seed(0)
    logits, advantages = torch.randn(6, requires_grad=True), torch.randn(6)
    expected = torch.autograd.grad((torch.softmax(logits, 0) * advantages).sum(), logits)[0]
    log_probs = Categorical(logits=logits).log_prob(torch.arange(6)).unsqueeze(0)
    terms = clipped_surrogate(log_ratio(log_probs, log_probs.detach()), advantages.unsqueeze(0), LOW, HIGH)
    loss = (log_probs.detach().exp() * terms.loss).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], -expected)
    assert torch.equal(terms.ratio, torch.ones(1, 6)) and not terms.clipped.any()


def test_advantages_and_old_log_probs_receive_no_gradient():
    new, old, advantages = (torch.zeros(1, 2, requires_grad=True) for _ in range(3))
    clipped_surrogate(log_ratio(new, old), advantages + 1, LOW, HIGH).loss.sum().backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None


def test_a_log_ratio_is_clamped_and_keeps_its_sign():
    found = log_ratio(torch.tensor([[0.0, -500.0, -1.0]]), torch.tensor([[-500.0, 0.0, -3.0]]))
    assert found.tolist() == [[20.0, -20.0, 2.0]]
    assert log_ratio(torch.tensor([[1.0]]), torch.tensor([[-9.0]]), clamp=5.0).item() == 5.0
    assert clipped_surrogate(found, -torch.ones(1, 3), LOW, HIGH).loss.isfinite().all()


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
def test_a_masked_log_prob_leaks_into_neither_loss_nor_gradient(bad):
    mask = torch.tensor([[True, False]])
    new = torch.tensor([[-1.0, bad]], requires_grad=True)
    old = torch.tensor([[-1.5, bad]])
    ratios = log_ratio(new, old, mask=mask)
    assert ratios.tolist() == [[0.5, 0.0]]
    terms = clipped_surrogate(ratios, torch.tensor([[1.0, torch.nan]]), 0.9, 0.9)
    loss = aggregate(terms.loss, decision_weights(mask, "token_mean"), local_denominator(mask, "token_mean"))
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.5))
    assert new.grad.tolist() == [[pytest.approx(-math.exp(0.5)), 0.0]]


def test_log_ratios_of_low_precision_log_probs_are_float32():
    assert log_ratio(torch.zeros(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16()).dtype == torch.float32


def test_the_sequence_ratio_is_the_geometric_mean_over_trained_decisions():
    ratios = torch.tensor([[1.2, 0.8, 50.0, 1.5], [9.0, 9.0, 9.0, 9.0], [9.0, 0.7, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]).bool()
    found = sequence_log_ratio(ratios.log(), mask)
    expected = [scipy.stats.gmean([1.2, 0.8, 1.5]), 1.0, 0.7]
    for row in range(3):
        trained = found[row][mask[row]].exp()
        assert trained.tolist() == pytest.approx([expected[row]] * len(trained))
    assert torch.equal(found[~mask], torch.zeros(int((~mask).sum())))


def test_sequence_ratios_under_sequence_mean_are_gspo():
    # Zheng et al. 2025, eq. 5: the mean over sequences of min(s A, clip(s) A), s = exp(mean log-ratio).
    torch.manual_seed(1)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    new = (0.3 * torch.randn(3, 4)).requires_grad_()
    old, advantages = 0.3 * torch.randn(3, 4), torch.tensor([1.0, -0.5, 2.0])
    ratios = sequence_log_ratio(log_ratio(new, old, mask=mask), mask)
    terms = clipped_surrogate(ratios, advantages.unsqueeze(1).expand(3, 4), LOW, HIGH)
    mode = "sequence_mean_token_mean"
    loss = aggregate(terms.loss, decision_weights(mask, mode), local_denominator(mask, mode))
    found = torch.autograd.grad(loss, new)[0]
    objective = torch.zeros(())
    for row, length in enumerate([3, 2, 1]):
        s = torch.prod((new - old)[row, :length].exp()) ** (1 / length)
        objective = objective + torch.minimum(s * advantages[row], s.clamp(0.8, 1.3) * advantages[row]) / 3
    torch.testing.assert_close(loss, -objective)
    torch.testing.assert_close(found, -torch.autograd.grad(objective, new)[0])


# -- rollout mismatch ------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
RHO = torch.tensor([[0.4, 1.0, 4.0, 9.0], [1.5, 0.9, 9.0, 9.0]])
ROLLOUT = torch.tensor([[-1.0, -2.0, -0.5, torch.nan], [-3.0, -torch.inf, -1.0, -1.0]])
OLD = torch.where(ROLLOUT.isfinite(), ROLLOUT + RHO.log(), -1.0)
KNOWN = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()  # trained, and the sampler's log-prob is finite


def test_truncation_caps_the_importance_weight_and_drops_what_is_unknown():
    correction = truncate_mismatch(OLD, ROLLOUT, MASK, cap=2.0)
    assert torch.equal(correction.kept, KNOWN)
    torch.testing.assert_close(correction.weights, torch.tensor([[0.4, 1.0, 2.0, 0.0], [1.5, 0.0, 0.0, 0.0]]))


def test_masking_drops_decisions_outside_of_the_band():
    correction = mask_mismatch(OLD, ROLLOUT, MASK, low=0.5, high=2.0, level="decision")
    assert correction.kept.tolist() == [[False, True, False, False], [True, False, False, False]]
    assert torch.equal(correction.weights, correction.kept.float())


def test_masking_sequences_judges_the_geometric_mean():
    mean = scipy.stats.gmean([0.4, 1.0, 4.0])
    inside = mask_mismatch(OLD, ROLLOUT, MASK, low=0.5, high=mean + 0.01, level="sequence")
    outside = mask_mismatch(OLD, ROLLOUT, MASK, low=0.5, high=mean - 0.01, level="sequence")
    assert inside.kept[0].equal(KNOWN[0]) and not outside.kept[0].any()
    assert not mask_mismatch(OLD, ROLLOUT, MASK, low=mean + 0.01, high=2.0, level="sequence").kept[0].any()


def test_a_perfect_sampler_is_not_corrected():
    for correction in (
        truncate_mismatch(OLD, OLD, MASK, cap=2.0),
        mask_mismatch(OLD, OLD, MASK, 0.5, 2.0, "decision"),
        mask_mismatch(OLD, OLD, MASK, 0.5, 2.0, "sequence"),
    ):
        assert torch.equal(correction.kept, MASK)
        assert torch.equal(correction.weights, MASK.float())


def test_an_infinite_rho_in_a_kept_row_is_capped_and_carries_no_gradient():
    old = torch.tensor([[0.0]], requires_grad=True)
    correction = truncate_mismatch(old, torch.tensor([[-1000.0]]), torch.ones(1, 1, dtype=torch.bool), cap=2.0)
    assert correction.weights.item() == 2.0
    assert not correction.weights.requires_grad


# -- without a clip ---------------------------------------------------------------------------------------------------


def five_actions(seed):
    """Logits of five actions, and an advantage for each action."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, generator=generator, requires_grad=True), torch.randn(5, generator=generator)


def test_reinforce_is_the_gradient_of_the_expected_advantage():
    """Summed over all actions with their probabilities, not drawn: exact."""
    logits, worth = five_actions(0)
    every, mask = torch.arange(5).unsqueeze(1), torch.ones(5, 1, dtype=torch.bool)
    log_probs = Categorical(logits=logits).log_prob(every)
    terms = score_function_surrogate(log_probs, worth.unsqueeze(1), torch.zeros(5, 1), mask)
    found = torch.autograd.grad((logits.detach().softmax(0) * terms.loss[:, 0]).sum(), logits)[0]
    expected = torch.autograd.grad(-(logits.softmax(0) * worth).sum(), logits)[0]
    torch.testing.assert_close(found, expected)
    assert not terms.clipped.any()


def test_an_uncapped_importance_weight_is_the_off_policy_gradient():
    """CISPO without a bound, over actions of another policy with their probabilities: the same gradient, exact."""
    logits, worth = five_actions(1)
    old = torch.randn(5, generator=torch.Generator().manual_seed(7))
    every, mask = torch.arange(5).unsqueeze(1), torch.ones(5, 1, dtype=torch.bool)
    log_probs = Categorical(logits=logits).log_prob(every)
    ratio = log_ratio(log_probs, Categorical(logits=old).log_prob(every))
    expected = torch.autograd.grad(-(logits.softmax(0) * worth).sum(), logits, retain_graph=True)[0]
    for high, same in ((1e6, True), (0.5, False)):
        terms = capped_weight_surrogate(log_probs, worth.unsqueeze(1), ratio, 0.0, high, mask)
        loss = (old.softmax(0) * terms.loss[:, 0]).sum()
        found = torch.autograd.grad(loss, logits, retain_graph=True)[0]
        assert torch.allclose(found, expected, atol=1e-6) == same


@pytest.mark.parametrize(
    ("ratio", "weight", "bound"),
    [(0.1, 0.5, True), (0.5, 0.5, False), (1.0, 1.0, False), (1.9, 1.9, False), (3.0, 2.0, True)],
)
def test_a_capped_weight_still_has_a_gradient(ratio, weight, bound):
    """The bounds are absolute: 2 is twice the old probability, not 1 + 2."""
    log_prob = torch.tensor([[-0.7]], requires_grad=True)
    log = torch.tensor([[ratio]]).log()
    terms = capped_weight_surrogate(log_prob, torch.tensor([[-3.0]]), log, 0.5, 2.0, torch.tensor([[True]]))
    assert terms.loss.item() == pytest.approx(3.0 * weight * -0.7)
    assert torch.autograd.grad(terms.loss.sum(), log_prob)[0].item() == pytest.approx(3.0 * weight)
    assert terms.clipped.item() == bound
    assert terms.ratio.item() == pytest.approx(ratio)


@pytest.mark.parametrize("surrogate", ["reinforce", "cispo"])
def test_what_is_masked_has_neither_loss_nor_gradient(surrogate):
    log_probs = torch.tensor([[-1.0, -math.inf, math.nan]], requires_grad=True)
    advantages, mask = torch.ones(1, 3), torch.tensor([[True, False, False]])
    if surrogate == "reinforce":
        terms = score_function_surrogate(log_probs, advantages, torch.zeros(1, 3), mask)
    else:
        terms = capped_weight_surrogate(log_probs, advantages, torch.zeros(1, 3), 0.0, 5.0, mask)
    assert terms.loss.tolist() == [[1.0, 0.0, 0.0]]
    assert torch.autograd.grad(terms.loss.sum(), log_probs)[0].tolist() == [[-1.0, 0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(st.floats(-3, 3).filter(lambda a: abs(a) > 0.1), st.floats(0.05, 0.5), st.floats(0.3, 1.0))
def test_the_penalised_loss_is_smallest_where_its_parabola_is(advantage, epsilon, weight):
    """The vertex lies at 1 + sign(A) epsilon / w, and -A - |A| epsilon / (2 w) high."""
    vertex = 1 + math.copysign(epsilon / weight, advantage)
    ratios = torch.linspace(0.02, 3.0, 4001)
    if not 0.05 < vertex < 2.9:
        return
    log = ratios.log().unsqueeze(0).requires_grad_()
    terms = penalised_surrogate(log, torch.full((1, 4001), advantage), epsilon, torch.full((1, 4001), weight))
    assert ratios[terms.loss.argmin()].item() == pytest.approx(vertex, abs=1e-3)
    assert terms.loss.min().item() == pytest.approx(-advantage - abs(advantage) * epsilon / (2 * weight), abs=1e-4)
    gradient = torch.autograd.grad(terms.loss.sum(), log)[0][0]
    beyond = (ratios - vertex).abs() > 1e-2
    assert torch.equal(gradient[beyond].sign(), (ratios - vertex)[beyond].sign()), "far ratios are pulled back"


def test_on_policy_all_surrogates_have_the_policy_gradient():
    log_probs = torch.tensor([[-0.3, -1.2]], requires_grad=True)
    ratio, advantages, mask = log_ratio(log_probs, log_probs), torch.tensor([[2.0, -0.5]]), torch.ones(1, 2).bool()
    for terms in (
        clipped_surrogate(ratio, advantages, 0.2, 0.2),
        score_function_surrogate(log_probs, advantages, ratio, mask),
        capped_weight_surrogate(log_probs, advantages, ratio, 0.0, 5.0, mask),
        penalised_surrogate(ratio, advantages, 0.2, 1.0),
    ):
        gradient = torch.autograd.grad(terms.loss.sum(), log_probs, retain_graph=True)[0]
        torch.testing.assert_close(gradient, torch.tensor([[-2.0, 0.5]]))


def test_a_range_moves_linearly_and_then_stays():
    schedule = RangeSchedule(final_share=0.5, iterations=10)
    assert [schedule.share(i) for i in (0, 5, 10, 50)] == [1.0, 0.75, 0.5, 0.5]


def test_no_gradient_goes_through_a_correction():
    old, rollout = torch.zeros(1, 2, requires_grad=True), torch.full((1, 2), 0.1, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not truncate_mismatch(old, rollout, mask, 2.0).weights.requires_grad
    assert not truncate_mismatch(old.detach(), rollout, mask, 2.0).weights.requires_grad


@pytest.mark.parametrize("block", ["ppo_clip", "reinforce", "cispo", "drpo"])
def test_no_surrogate_has_a_gradient_to_advantages_and_each_reports_the_ratio_itself(block):
    new, advantages = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    old = torch.randn(2, 3)
    settings = resolve_algorithm({"name": "cispo", "surrogate": {"type": block}}).surrogate
    mask = torch.ones(2, 3, dtype=torch.bool)
    inputs = SurrogateInputs(log_ratio(new, old), advantages, new, mask, "token", 0, old={"log_prob": old})
    terms = settings.terms(inputs)
    assert torch.allclose(terms.ratio, (new - old).exp()) and not terms.ratio.requires_grad
    found = torch.autograd.grad(terms.loss.sum(), [new, advantages], allow_unused=True)
    assert found[0] is not None and found[1] is None
