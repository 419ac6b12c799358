"""Samples whose gradient reaches the weights: the rollout's samples, and the gradient of a loop written out by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_helpers import image_policy, perturb, requests, segment_of, video_policy
from diffusers import DDIMScheduler
from torch import Tensor

from modalities.base import Cut, Request
from modalities.denoising import DenoisingPolicy
from modalities.errors import UserError

STEPS = 3
PLAIN = {"steps": STEPS, "guidance_scale": 1.0}
Make = Callable[..., DenoisingPolicy]


@pytest.fixture(params=["stable_diffusion", "stable_diffusion_3", "wan"])
def make(request: pytest.FixtureRequest) -> Make:
    """Builds a policy whose adapter has a gradient everywhere."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    builder = video_policy if request.param == "wan" else image_policy

    def build(sampling: dict[str, Any] | None = None, **settings: Any) -> DenoisingPolicy:
        policy = builder(folder, {"steps": STEPS} | (sampling or {}), **({"lora": {"rank": 2}} | settings))
        perturb(policy)
        return policy

    return build


def score(latents: Tensor) -> Tensor:
    """A reward of the final latents that is not linear in them; rows have different shares."""
    weight = torch.linspace(0.5, 1.5, latents[0].numel()).view_as(latents[0])
    return (latents.float().sigmoid() * weight).flatten(1).mean(1) @ torch.arange(1.0, len(latents) + 1)


def gradient(policy: DenoisingPolicy, value: Tensor) -> Tensor:
    """Of every trained weight, one after the other; 0 where it has none."""
    weights = list(policy.weight_sets.parameters().values())
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, weights, materialize_grads=True)])


def of_rollout(policy: DenoisingPolicy, rows: list[Request], last_steps: int) -> Tensor:
    return gradient(policy, score(segment_of(policy.rollout_with_gradient(rows, last_steps)).final_latents))


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_samples_are_the_rollouts(make: Make, storage_dtype: str, gradient_checkpointing: bool) -> None:
    policy = make(storage_dtype=storage_dtype, gradient_checkpointing=gradient_checkpointing, sampling_rows=2)
    expected = segment_of(policy.rollout(requests(3)))
    for last_steps in (1, STEPS):
        found = segment_of(policy.rollout_with_gradient(requests(3), last_steps))
        assert found.final_latents.requires_grad
        assert torch.equal(found.final_latents.detach(), expected.final_latents.float())
        assert torch.equal(found.rollout_log_probs, expected.rollout_log_probs)
        assert not found.rollout_log_probs.requires_grad
        assert found.states.keys() == expected.states.keys()
        for step, state in expected.states.items():
            assert torch.equal(found.states[step], state)
            assert not found.states[step].requires_grad
    assert not segment_of(policy.rollout(requests(1))).final_latents.requires_grad


def by_hand(policy: DenoisingPolicy, rows: list[Request], last_steps: int) -> Tensor:
    """The final latents of the deterministic sampler, without guidance, from the raw denoiser."""
    table = policy.schedule(policy.sampling).times
    embeddings = policy.encode_prompts([row.prompt.text for row in rows])
    shape = policy.latent_shape(policy.sampling)
    x = torch.stack([torch.randn(shape, generator=row.key.generator()) for row in rows])
    scheduler = policy.pipeline.scheduler
    for step in range(STEPS):
        if step == STEPS - last_steps:
            x = x.detach()
        time = table[step].expand(len(rows))
        if isinstance(scheduler, DDIMScheduler):
            ddim = DDIMScheduler.from_config(scheduler.config, clip_sample=False)
            ddim.set_timesteps(STEPS)
            x = ddim.step(policy.denoise(x, time.long(), embeddings), int(table[step]), x, eta=0).prev_sample
        else:
            x = x + (table[step + 1] - table[step]) * policy.denoise(x, time * 1000, embeddings)
    return x


@pytest.mark.parametrize("last_steps", [1, 2, STEPS])
def test_the_gradient_is_that_of_a_loop_by_hand(make: Make, last_steps: int) -> None:
    policy = make(PLAIN | {"sampler": {"type": "ode"}})
    rows = requests(3)
    expected = gradient(policy, score(by_hand(policy, rows, last_steps)))
    found = of_rollout(policy, rows, last_steps)
    assert (found - expected).norm() <= 1e-3 * expected.norm()
    assert expected.norm() > 0


def test_the_full_gradient_is_that_of_finite_differences(make: Make) -> None:
    """Through a stochastic sampler with guidance: noise is a constant. Fewer steps give another gradient."""
    policy = make()
    rows = requests(2)
    found = of_rollout(policy, rows, STEPS)
    direction = found / found.norm()

    def at(distance: float) -> float:
        torch.nn.utils.vector_to_parameters(start + distance * direction, weights)
        with torch.no_grad():
            return float(score(segment_of(policy.rollout(rows)).final_latents))

    weights = list(policy.weight_sets.parameters().values())
    start = torch.nn.utils.parameters_to_vector(weights).detach()
    slope = (at(0.01) - at(-0.01)) / 0.02
    at(0)
    assert slope == pytest.approx(float(found.norm()), rel=0.02)
    assert (of_rollout(policy, rows, 1) - found).norm() > 0.05 * found.norm()


def test_computing_transitions_again_changes_nothing(make: Make) -> None:
    found = [of_rollout(make(gradient_checkpointing=again), requests(2), 2) for again in (False, True)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-9)


def test_rounding_for_storage_passes_the_gradient_on(make: Make) -> None:
    exact, rounded = (of_rollout(make(storage_dtype=name), requests(2), STEPS) for name in ("float32", "bfloat16"))
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.99


def test_only_the_last_transitions_keep_a_graph(make: Make) -> None:
    policy = make(PLAIN)
    seen: list[tuple[bool, bool]] = []
    denoise = policy.denoise

    def watched(latents: Tensor, *rest: Any) -> Tensor:
        seen.append((torch.is_grad_enabled(), latents.requires_grad))
        return denoise(latents, *rest)

    policy.denoise = watched  # type: ignore[method-assign]
    policy.rollout_with_gradient(requests(2), last_steps=2)
    assert seen == [(False, False), (True, False), (True, True)]


def test_the_graph_is_small_when_transitions_are_computed_again(make: Make) -> None:
    """What autograd saves for the backward pass: with recomputation, far less per transition."""

    def saved_elements(gradient_checkpointing: bool) -> int:
        policy = make(PLAIN, gradient_checkpointing=gradient_checkpointing)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            policy.rollout_with_gradient(requests(2), STEPS)
        return sum(sizes)

    assert saved_elements(True) < 0.1 * saved_elements(False)


def test_early_latents_are_what_one_prediction_implies(make: Make) -> None:
    """ReFL stops on the way and takes the clean latents of the step's own prediction; later steps are not made."""
    policy = make(PLAIN)
    rows = requests(2)
    plain = policy.rollout(rows)
    early = policy.rollout_with_gradient(rows, last_steps=2, early_clean=True)
    segment = segment_of(early)
    cut = Cut(0, torch.arange(2), slice(1, 2))
    expected = policy.replay(plain, cut, frozenset({"clean_prediction"})).of("clean_prediction")[:, 0]
    torch.testing.assert_close(segment.final_latents, expected)
    weight = gradient(policy, score(expected))
    torch.testing.assert_close(gradient(policy, score(segment.final_latents)), weight, rtol=1e-4, atol=1e-8)
    for mask in (segment.length_mask, segment.trained_mask):
        assert mask.tolist() == [[True, False, False]] * 2
    assert all((cut.steps.start, len(cut.rows)) == (0, 2) for cut in policy.plan(early, torch.arange(2), 2))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_gradient_of_pixels_reaches_every_weight(make: Make, precision: str) -> None:
    """Also where earlier transitions cast the same weights to bfloat16 without gradient."""
    policy = make()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        trajectory = policy.rollout_with_gradient(requests(2), last_steps=1)
        samples = policy.decode(trajectory, differentiable=True)
        torch.stack([sample.unit().square().mean() for sample in samples]).sum().backward()  # type: ignore[union-attr]
    still = [name for name, weight in policy.weight_sets.parameters().items() if weight.grad is None]
    assert not still
    assert all(weight.grad.isfinite().all() for weight in policy.weight_sets.parameters().values())  # type: ignore[union-attr]


@pytest.mark.parametrize("last_steps", [0, STEPS + 1])
def test_last_steps_that_do_not_exist_are_refused(make: Make, last_steps: int) -> None:
    with pytest.raises(UserError, match=f"last_steps: {last_steps} must lie between 1 and the {STEPS}"):
        make().rollout_with_gradient(requests(1), last_steps)
