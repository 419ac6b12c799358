"""The critic's loss and the controllers of the KL coefficient."""

import math

import pytest
import torch

from uniml_rl.algorithms.controllers import AdaptiveKL, FixedKL
from uniml_rl.algorithms.value import clipped_value_loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        (1.0, 1.0, 3.0, 2.0, False),
        (1.1, 1.0, 3.0, 1.805, False),  # moved 0.1 towards the target
        (2.0, 1.0, 3.0, 1.62, True),  # moved too far towards it: (1.2 - 3)^2 / 2
        (0.0, 1.0, 3.0, 4.5, False),  # moved away: the larger loss keeps its gradient
        (2.0, 3.0, 1.0, 1.62, True),  # the same from above: (2.8 - 1)^2 / 2
    ],
)
def test_the_clipped_value_loss_worked_out_by_hand(value, old, target, loss, clipped):
    v = torch.tensor([[value]], requires_grad=True)
    terms = clipped_value_loss(v, torch.tensor([[old]]), torch.tensor([[target]]), clip=0.2)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.clipped.item() is clipped
    assert v.grad.item() == pytest.approx(0.0 if clipped else value - target)


def test_without_a_clip_the_value_loss_is_half_the_squared_error():
    values, returns = torch.tensor([[1.0, -2.0]]), torch.tensor([[4.0, 0.0]])
    terms = clipped_value_loss(values, torch.full((1, 2), torch.nan), returns, clip=None)
    expected = torch.nn.functional.mse_loss(values, returns, reduction="none") / 2
    assert torch.equal(terms.loss, expected) and not terms.clipped.any()


def test_returns_and_old_values_receive_no_gradient():
    values, old, returns = (torch.full((1, 1), x, requires_grad=True) for x in (0.0, 0.0, 1.0))
    clipped_value_loss(values, old, returns, clip=0.2).loss.sum().backward()
    assert values.grad is not None and old.grad is None and returns.grad is None


def test_a_fixed_coefficient_stays_and_takes_a_changed_setting_on_resume():
    controller = FixedKL(0.1)
    controller.update(1e9, 1000)
    assert controller.coefficient == 0.1
    changed = FixedKL(0.2)
    changed.load_state_dict(controller.state_dict())
    assert changed.coefficient == 0.2


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (6.0, 100, 0.2),  # on target
        (6.6, 100, 0.2 * (1 + 0.1 * 100 / 1000)),
        (60.0, 100, 0.2 * (1 + 0.2 * 100 / 1000)),  # the error is clipped at 20 %
        (0.0, 100, 0.2 * (1 - 0.2 * 100 / 1000)),
        (-5.0, 100, 0.2 * (1 - 0.2 * 100 / 1000)),
        (0.0, 10**9, 0.2 * 0.8),  # never past the horizon, or the coefficient would turn negative
    ],
)
def test_the_adaptive_coefficient_worked_out_by_hand(kl, samples, expected):
    controller = AdaptiveKL(0.2, target=6.0, horizon=1000.0)
    controller.update(kl, samples)
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_the_adaptive_controller_finds_the_coefficient_that_holds_the_target():
    controller = AdaptiveKL(0.01, target=2.0, horizon=100.0)
    for _ in range(200):
        controller.update(1 / controller.coefficient, 50)  # a policy whose KL falls as the coefficient rises
    assert controller.coefficient == pytest.approx(0.5, rel=1e-3)


def test_the_adaptive_coefficient_is_resumed():
    controller, resumed = (AdaptiveKL(0.2, target=6.0, horizon=1000.0) for _ in range(2))
    controller.update(60.0, 100)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(1.0, 10)
    assert resumed.coefficient == controller.coefficient


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_diverged_policy_is_not_turned_into_a_coefficient(kl):
    with pytest.raises(ValueError, match="diverged"):
        AdaptiveKL(0.2, target=6.0, horizon=1000.0).update(kl, 10)
