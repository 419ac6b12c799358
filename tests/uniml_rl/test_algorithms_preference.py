"""The losses over pairs and labelled samples against scipy and torch's cross-entropy, number by number."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.special import expit
from torch.nn.functional import binary_cross_entropy_with_logits

from uniml_rl.algorithms.preference import kto_loss, logistic_preference_loss, sample_scores

LOG_PROBS = torch.tensor([[-1.0, -2.0, -4.0], [-0.5, -3.0, -7.0], [-1.5, -1.0, -2.5]])
MASK = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])


def test_a_samples_score_is_the_sum_of_its_trained_decisions_or_their_mean() -> None:
    assert sample_scores(LOG_PROBS, MASK, draws=False).tolist() == [[-5.0], [-10.5], [0.0]]
    assert sample_scores(LOG_PROBS, MASK, draws=False, per_decision=True).tolist() == [[-2.5], [-3.5], [0.0]]


@pytest.mark.parametrize("per_decision", [False, True])
def test_draws_of_one_quantity_stay_apart(per_decision: bool) -> None:
    found = sample_scores(LOG_PROBS, MASK, draws=True, per_decision=per_decision)
    assert found.tolist() == [[-1.0, 0.0, -4.0], [-0.5, -3.0, -7.0], [0.0, 0.0, 0.0]]


def test_what_is_not_trained_is_not_read() -> None:
    unknown = torch.where(MASK, LOG_PROBS, math.nan).requires_grad_()
    for draws in (True, False):
        (gradient,) = torch.autograd.grad(sample_scores(unknown, MASK, draws=draws).sum(), unknown)
        assert torch.equal(gradient, MASK.float())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_logistic_loss_is_the_cross_entropy_of_a_label_that_is_wrong_with_the_smoothings_probability(
    smoothing: float,
) -> None:
    margin = torch.tensor([-3.0, -0.2, 0.0, 1.5, 40.0])
    labels = torch.full_like(margin, 1 - smoothing)
    wanted = binary_cross_entropy_with_logits(0.7 * margin, labels, reduction="none")
    torch.testing.assert_close(logistic_preference_loss(margin, 0.7, smoothing), wanted)


def test_kto_is_a_weight_minus_a_value_that_saturates() -> None:
    ratios = torch.tensor([[0.4, -1.0], [2.0, 0.1], [-3.0, 0.6]])
    desirable, drift = torch.tensor([True, False, True]), torch.tensor(0.3)
    found = kto_loss(ratios, desirable, drift, 0.7, 2.0, 0.5)
    for row in range(3):
        for t in range(2):
            distance = 0.7 * (float(ratios[row, t]) - 0.3)
            good, bad = 2.0 * (1 - expit(distance)), 0.5 * (1 - expit(-distance))
            assert float(found[row, t]) == pytest.approx(good if desirable[row] else bad)
