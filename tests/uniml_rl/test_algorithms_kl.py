"""KL terms: values and, above all, gradients, against exact enumeration and torch.distributions."""

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from uniml_rl.algorithms.kl import gaussian_kl, kl_estimate, prediction_mse


def tabular_policies(on_reference=False):
    """A policy with gradient, its reference, and all their log-probs."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64)
    reference = logits if on_reference else torch.randn(7, generator=generator, dtype=torch.float64)
    policy, reference = Categorical(logits=logits.requires_grad_()), Categorical(logits=reference.detach())
    actions = torch.arange(7)
    return logits, policy, reference, policy.log_prob(actions), reference.log_prob(actions)


def expected_estimate(estimator, log_probs, reference_log_probs):
    """The estimate's expectation under a sampler that has no gradient: what a loss over samples converges to."""
    estimate = kl_estimate(estimator, log_probs.unsqueeze(0), reference_log_probs.unsqueeze(0)).squeeze(0)
    return (log_probs.detach().exp() * estimate).sum()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    _, policy, reference, log_probs, reference_log_probs = tabular_policies()
    found = expected_estimate(estimator, log_probs, reference_log_probs)
    assert found.item() == pytest.approx(kl_divergence(policy, reference).item(), rel=1e-5)


def test_k2_is_half_the_squared_log_ratio():
    assert kl_estimate("k2", torch.tensor([[-1.0]]), torch.tensor([[-3.0]])).item() == 2.0


def test_k3_is_never_negative_and_exact_near_zero():
    difference = torch.tensor([[-3.0, -1e-3, 0.0, 1e-3, 3.0]])
    found = kl_estimate("k3", difference, torch.zeros(1, 5))
    expected = torch.exp(-difference.double()) - 1 + difference.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0)
    assert (found >= 0).all()


def test_k1_as_a_loss_has_no_gradient_on_policy():
    logits, _, _, log_probs, reference_log_probs = tabular_policies()
    gradient = torch.autograd.grad(expected_estimate("k1", log_probs, reference_log_probs), logits)[0]
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl():
    logits, policy, reference, log_probs, reference_log_probs = tabular_policies()
    found = torch.autograd.grad(expected_estimate("k2", log_probs, reference_log_probs), logits, retain_graph=True)[0]
    expected = torch.autograd.grad(kl_divergence(policy, reference), logits)[0]
    assert expected.abs().max() > 0.1  # away from the reference it is not zero
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl_instead():
    logits, policy, reference, log_probs, reference_log_probs = tabular_policies()
    found = torch.autograd.grad(expected_estimate("k3", log_probs, reference_log_probs), logits, retain_graph=True)[0]
    forward = torch.autograd.grad(kl_divergence(reference, policy), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad(kl_divergence(policy, reference), logits)[0]
    torch.testing.assert_close(found, forward, rtol=1e-5, atol=1e-6)
    assert (found - reverse).abs().max() > 0.1


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_at_the_reference_value_and_gradient_are_zero(estimator):
    logits, _, _, log_probs, reference_log_probs = tabular_policies(on_reference=True)
    value = expected_estimate(estimator, log_probs, reference_log_probs)
    assert value.item() == 0
    assert torch.equal(torch.autograd.grad(value, logits)[0], torch.zeros_like(logits))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_masked_and_extreme_log_probs_are_finite(estimator):
    mask = torch.tensor([[True, False, True]])
    log_probs = torch.tensor([[-1.0, torch.nan, -300.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -torch.inf, -1.0]], requires_grad=True)
    found = kl_estimate(estimator, log_probs, reference, mask=mask)
    found.sum().backward()
    assert found.isfinite().all() and found[0, 1] == 0
    assert log_probs.grad.isfinite().all() and log_probs.grad[0, 1] == 0 and log_probs.grad[0, 0] != 0
    assert reference.grad is None


def test_k3_never_pushes_away_from_the_reference():
    log_probs = torch.tensor([[-300.0, -21.5, -20.5, -2.0, -0.5]], requires_grad=True)
    reference = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -300.0]])
    kl_estimate("k3", log_probs, reference).sum().backward()
    towards = (reference - log_probs).sign()
    assert ((log_probs.grad * towards) <= 0).all()
    assert log_probs.grad[0, 2:].ne(0).all()


@pytest.mark.parametrize("shape", [(5, 3), (4, 6, 6), (2, 3, 4, 4)])  # packed, image and video latents
def test_gaussian_kl_is_the_mean_over_elements_of_the_exact_kl(shape):
    torch.manual_seed(0)
    mean, reference = torch.randn(2, 3, *shape), torch.randn(2, 3, *shape)
    std = torch.rand(2, 3) + 0.1
    wide = std.reshape(2, 3, *[1] * len(shape)).expand_as(mean)
    exact = kl_divergence(Normal(mean, wide), Normal(reference, wide))
    expected = torch.stack([torch.stack([exact[b, t].mean() for t in range(3)]) for b in range(2)])
    torch.testing.assert_close(gaussian_kl(mean, reference, std), expected)


def test_gaussian_kl_pulls_the_mean_to_the_reference_and_moves_nothing_else():
    mean = torch.tensor([[[3.0, 1.0]]], requires_grad=True)
    reference = torch.tensor([[[1.0, 1.0]]], requires_grad=True)
    std = torch.tensor([[0.5]], requires_grad=True)
    gaussian_kl(mean, reference, std).sum().backward()
    assert mean.grad.tolist() == [[[4.0, 0.0]]]  # (3 - 1) / 0.5^2 / 2 elements
    assert reference.grad is None and std.grad is None


def test_a_transition_without_noise_has_infinite_kl_and_no_gradient():
    mean = torch.ones(1, 2, 4, requires_grad=True)
    found = gaussian_kl(mean, torch.zeros(1, 2, 4), torch.tensor([[1.0, 0.0]]))
    assert found.tolist() == [[0.5, torch.inf]]
    found[0, 0].backward()
    assert mean.grad.isfinite().all() and mean.grad[0, 1].abs().sum() == 0


@pytest.mark.parametrize("shape", [(5, 3), (4, 6, 6), (2, 3, 4, 4)])
def test_prediction_mse_is_the_mean_squared_difference_of_each_decision(shape):
    torch.manual_seed(0)
    prediction, reference = torch.randn(2, 3, *shape, requires_grad=True), torch.randn(2, 3, *shape, requires_grad=True)
    found = prediction_mse(prediction, reference)
    for b in range(2):
        for t in range(3):
            expected = torch.nn.functional.mse_loss(prediction[b, t], reference[b, t])
            torch.testing.assert_close(found[b, t], expected)
    found.sum().backward()
    assert prediction.grad.abs().min() > 0 and reference.grad is None


def test_divergences_of_low_precision_inputs_are_float32():
    low = torch.ones(1, 1, 8, dtype=torch.bfloat16)
    assert prediction_mse(low, low).dtype == torch.float32
    assert gaussian_kl(low, low, torch.ones(1, 1)).dtype == torch.float32
    assert kl_estimate("k2", low[..., 0], low[..., 0]).dtype == torch.float32


def test_an_estimator_of_something_else_is_refused():
    with pytest.raises(ValueError, match="'gaussian' is no estimator from log-probs"):
        kl_estimate("gaussian", torch.zeros(1, 1), torch.zeros(1, 1))
