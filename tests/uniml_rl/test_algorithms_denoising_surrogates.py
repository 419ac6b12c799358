"""GRPO-Guard's and Flow-DPPO's surrogates as functions: bounds, directions, expectations, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modalities.base import LogProbUnit
from modalities.errors import UserError
from uniml_rl.algorithms.denoising_surrogates import FlowDPPO, GRPOGuard
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.algorithms.surrogate import SurrogateInputs

ELEMENTS = 4


def inputs(
    shift: Tensor, noise: Tensor, std: Tensor, advantages: Tensor, unit: LogProbUnit = "element_mean", step: float = 0.1
) -> SurrogateInputs:
    """Decisions [b, t] of old mean 0 and mean `shift` [b, t, n], for the noise [b, t, n] that was drawn."""
    after = std.unsqueeze(2) * noise
    scale = std.unsqueeze(2).expand_as(noise)
    new, old = (torch.distributions.Normal(mean, scale).log_prob(after) for mean in (shift, torch.zeros_like(shift)))
    difference = (new - old).mean(2) if unit == "element_mean" else (new - old).sum(2)
    now = {"mean": shift, "std": std, "step_size": torch.full_like(std, step)}
    mask = torch.ones_like(std, dtype=torch.bool)
    return SurrogateInputs(
        difference,
        advantages,
        difference,
        mask,
        unit,
        0,
        now=now,
        old={"mean": torch.zeros_like(shift), "std": std},  # type: ignore[arg-type]
    )


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(std=st.floats(0.05, 2.0), size=st.floats(1e-3, 0.3), unit=st.sampled_from(["element_mean", "element_sum"]))
def test_guards_log_ratio_is_noise_times_shift(std: float, size: float, unit: LogProbUnit) -> None:
    """Which has mean 0 over the noise, and a width that the std does not change."""
    shift, noise = size * normal(1, 1, ELEMENTS), normal(500, 1, ELEMENTS, seed=1)
    given_inputs = inputs(shift.expand_as(noise), noise, torch.full((500, 1), std), torch.ones(500, 1), unit)
    ratio = GRPOGuard(low=0.9).terms(given_inputs).ratio
    products = noise * shift
    expected = products.mean(2) if unit == "element_mean" else products.sum(2)
    assert torch.allclose(ratio.log(), expected, atol=1e-4)


def test_guards_log_ratio_is_centred_where_ppos_is_not() -> None:
    """Over 200000 draws of noise, in standard errors of the mean."""
    shift, noise = 0.3 * normal(1, 1, ELEMENTS), normal(200_000, 1, ELEMENTS, seed=1)
    given_inputs = inputs(shift.expand_as(noise), noise, torch.full((200_000, 1), 0.5), torch.ones(200_000, 1))
    centred, plain = GRPOGuard(low=0.9).terms(given_inputs).ratio.log(), given_inputs.log_ratio
    for values, within in ((centred, True), (plain, False)):
        error = float(values.mean().abs() / (values.std() / math.sqrt(len(values))))
        assert (error < 4) == within, error


@pytest.mark.parametrize(("advantage", "sign"), [(1.0, 1.0), (1.0, -1.0), (-1.0, 1.0), (-1.0, -1.0)])
def test_guard_stops_the_gradient_beyond_its_bounds_and_divides_by_the_step(advantage: float, sign: float) -> None:
    shift = (sign * 0.2 * torch.ones(1, 1, ELEMENTS)).requires_grad_()
    found = GRPOGuard(low=0.05, high=0.1).terms(
        inputs(shift, torch.ones(1, 1, ELEMENTS), torch.ones(1, 1), torch.tensor([[advantage]]), step=0.25)
    )
    ratio = math.exp(sign * 0.2)
    bounded = min(max(ratio, 0.95), 1.1)
    assert found.loss.item() == pytest.approx(max(-advantage * ratio, -advantage * bounded) / 0.25, rel=1e-5)
    found.loss.sum().backward()
    assert shift.grad is not None
    assert bool(found.clipped) == (advantage * sign > 0) == (not shift.grad.any())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("threshold", [0.02, 0.03125, 0.04])
def test_dppo_drops_what_has_reached_the_threshold_and_moves_on(
    advantage: float, sign: float, threshold: float
) -> None:
    """A shift of 0.125 with std 0.5 has the KL 0.03125; the term at the threshold is dropped."""

    shift = (sign * 0.125 * torch.ones(1, 1, ELEMENTS)).requires_grad_()
    std = torch.tensor([[0.5]])
    found = FlowDPPO(threshold=threshold).terms(
        inputs(shift, torch.ones(1, 1, ELEMENTS), std, torch.tensor([[advantage]]))
    )
    dropped = threshold <= 0.03125 and advantage * sign > 0
    assert found.clipped.item() is dropped
    found.loss.sum().backward()
    assert shift.grad is not None
    assert bool(shift.grad.any()) is not dropped
    assert found.loss.item() == (0.0 if dropped else pytest.approx(-advantage * found.ratio.item()))


@pytest.mark.parametrize(
    ("block", "facts", "fragment"),
    [
        ({"name": "grpo_guard"}, ("token", "tokens"), "tokens have none"),
        ({"name": "flow_dppo"}, ("token", "tokens"), "tokens have none"),
        ({"name": "grpo_guard"}, ("element_sum", "denoising"), "algorithm.surrogate.low"),
        ({"name": "grpo_guard", "surrogate": {"low": 0.1}}, ("error_mean", "denoising"), "log_prob: gaussian"),
        ({"name": "flow_grpo"}, ("error_mean", "denoising"), "'gaussian' is in nats"),
        (
            {"name": "flow_grpo", "kl": {"estimator": "k2"}},
            ("error_sum", "denoising"),
            "'k2' is in nats",
        ),
        ({"name": "flow_cps"}, ("none", "denoising"), "draws no noise"),
        ({"name": "denoising_ppo"}, ("none", "denoising"), "draws no noise"),
    ],
)
def test_what_does_not_fit_the_sampler_is_refused_with_the_reason(
    block: dict[str, Any], facts: tuple[LogProbUnit, str], fragment: str
) -> None:
    with pytest.raises(UserError, match=fragment):
        resolve_algorithm(block).check(4, *facts)


@pytest.mark.parametrize(
    ("block", "facts"),
    [
        ({"name": "grpo_guard"}, ("element_mean", "denoising")),
        ({"name": "grpo_guard", "surrogate": {"low": 0.1}}, ("element_sum", "denoising")),
        ({"name": "flow_dppo"}, ("error_mean", "denoising")),
        ({"name": "flow_cps"}, ("error_mean", "denoising")),
        ({"name": "flow_grpo", "kl": {"estimator": "prediction_mse"}}, ("error_mean", "denoising")),
        ({"name": "diffusion_nft"}, ("none", "denoising")),
        ({"name": "awm"}, ("none", "denoising")),
    ],
)
def test_what_fits_the_sampler_is_let_through(block: dict[str, Any], facts: tuple[LogProbUnit, str]) -> None:
    resolve_algorithm(block).check(4, *facts)


@pytest.mark.parametrize("surrogate", [GRPOGuard(), FlowDPPO()])
def test_no_gradient_goes_to_advantages_and_the_logged_ratio_has_none(surrogate: GRPOGuard | FlowDPPO) -> None:
    shift, advantages = normal(2, 3, ELEMENTS).requires_grad_(), normal(2, 3, seed=2).requires_grad_()
    given_inputs = inputs(shift, normal(2, 3, ELEMENTS, seed=1), torch.full((2, 3), 0.5), advantages)
    terms = surrogate.terms(given_inputs)
    assert not terms.ratio.requires_grad
    found = torch.autograd.grad(terms.loss.sum(), [shift, advantages], allow_unused=True)
    assert found[0] is not None and found[1] is None
