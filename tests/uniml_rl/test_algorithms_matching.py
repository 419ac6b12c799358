"""The forward process's losses on small latents, against the papers' formulas in the space of clean latents."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from uniml_rl.algorithms.matching import AdvantageWeighted, MatchingInputs, NegativeAware
from uniml_rl.algorithms.surrogate import SurrogateTerms

ADVANTAGES = [[-3.0, -0.4], [0.7, 0.0], [5.0, -1.0]]
LEVELS = torch.tensor([[0.9, 0.4], [0.6, 0.2], [0.5, 0.8]])


def random(seed: int) -> Tensor:
    return torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(seed))


def inputs(prediction: Tensor, old_prediction: Tensor | None = None, **keys: Any) -> MatchingInputs:
    """Of velocities, weighted so that errors are those of the clean latents that they imply."""
    target = random(1) - random(0)
    log_prob = -(LEVELS**2) * (prediction - target).square().mean(2)
    return MatchingInputs(prediction, target, log_prob, LEVELS**2, torch.tensor(ADVANTAGES), old_prediction, **keys)


def clean(velocity: Tensor) -> Tensor:
    """What a velocity says of the latent without noise."""
    level = LEVELS[..., None]
    return (1 - level) * random(0) + level * random(1) - level * velocity


def assert_same(found: SurrogateTerms, wanted: Tensor, parameter: Tensor) -> None:
    torch.testing.assert_close(found.loss, wanted, rtol=1e-4, atol=1e-6)
    gradients = [torch.autograd.grad(loss.sum(), parameter, retain_graph=True)[0] for loss in (found.loss, wanted)]
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    assert not found.ratio.requires_grad


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_nft(beta: float, normalised: bool) -> None:
    """c / beta [r ||x+ - x0||^2 + (1 - r) ||x- - x0||^2], each over its mean absolute error if normalised."""
    now, old = random(2).requires_grad_(), random(3)
    settings = NegativeAware(beta=beta, advantage_limit=2.0, self_normalised=normalised)
    step = beta * (clean(now) - clean(old))
    losses = []
    for mixed in (clean(old) + step, clean(old) - step):
        error = (mixed - random(0)).square().mean(2)
        losses.append(error / (mixed - random(0)).detach().abs().mean(2) if normalised else error)
    good = torch.tensor([[min(max(advantage / 2, -1.0), 1.0) for advantage in row] for row in ADVANTAGES]) * 0.5 + 0.5
    found = settings.terms(inputs(now, old))
    assert_same(found, 2.0 / beta * (good * losses[0] + (1 - good) * losses[1]), now)
    assert torch.equal(found.ratio, torch.ones(3, 2)) and not found.clipped.any()


@pytest.mark.parametrize("power", [0.25, 0.7])
def test_the_power_of_awm_is_the_integral_of_a_slope_that_sinks(power: float) -> None:
    """A w times the integral of (u + 1e-10)^(p - 1) from 0 to the error; a perfect prediction costs nothing."""
    now = random(2).requires_grad_()
    target = random(1) - random(0)
    found = AdvantageWeighted(power=power).terms(inputs(now)).loss
    errors = (now - target).square().mean(2).detach()
    for row in range(3):
        for t in range(2):
            # in the logarithm of u, where the slope at 0 is no obstacle
            low, high = (math.log(bound + 1e-10) for bound in (0.0, float(errors[row, t])))
            area = quad(lambda x: math.exp(power * x), low, high, limit=200)[0]
            wanted = ADVANTAGES[row][t] * float(LEVELS[row, t]) ** 2 * area
            assert float(found[row, t].detach()) == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert AdvantageWeighted(power=power).terms(inputs(target)).loss.abs().max() <= 1e-6


def test_awm() -> None:
    """A times the squared error of the clean latents; with a clip PPO's loss of the errors' ratio."""
    now, advantages = random(2).requires_grad_(), torch.tensor(ADVANTAGES)
    error = (clean(now) - random(0)).square().mean(2)
    found = AdvantageWeighted().terms(inputs(now))
    assert_same(found, advantages * error, now)
    assert torch.equal(found.ratio, torch.ones(3, 2)) and not found.clipped.any()

    before = (error + torch.tensor([[0.3, -0.3], [0.3, 0.05], [-0.02, 0.3]])).detach()
    ratio = (before - error).exp()
    bounded = torch.stack([-advantages * ratio, -advantages * ratio.clamp(0.9, 1.1)]).amax(0)
    found = AdvantageWeighted(clip=0.1).terms(inputs(now, old_log_prob=-before))
    assert_same(found, bounded, now)
    assert found.clipped.tolist() == [[False, True], [True, False], [False, False]]
    torch.testing.assert_close(found.ratio, ratio.detach())


def test_where_the_weight_is_zero_the_power_of_awm_is_too() -> None:
    """Pure noise says nothing of the noise in it: its error is not known, nor needed."""
    prediction = random(2).requires_grad_()
    target, nothing = random(1) - random(0), torch.zeros(3, 2)
    found = AdvantageWeighted(power=0.5).terms(
        MatchingInputs(prediction, target, nothing * prediction.sum(2), nothing, torch.tensor(ADVANTAGES))
    )
    (gradient,) = torch.autograd.grad(found.loss.sum(), prediction)
    assert torch.equal(found.loss.abs(), nothing) and torch.equal(gradient.abs(), torch.zeros_like(gradient))


def test_an_error_of_zero_is_divided_by_the_least_deviation() -> None:
    old = random(1) - random(0)
    now = (old + 1e-6).requires_grad_()
    found = NegativeAware().terms(inputs(now, old)).loss
    # both mixed predictions are off by 1e-6, and sqrt(w) 1e-6 lies below the bound of 1e-5
    torch.testing.assert_close(found, 5.0 * LEVELS**2 * 1e-12 / 1e-5, rtol=0.2, atol=0.0)
