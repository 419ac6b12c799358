"""Invariants of every denoising policy, shown on the families side by side."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_helpers import image_policy, perturb, replayed, requests, segment_of, video_policy

from modalities.base import Cut
from modalities.denoising import DenoisingPolicy
from modalities.samples import Image

LOG_PROB = frozenset({"log_prob"})
LORA = {"rank": 2}
Make = Callable[..., DenoisingPolicy]


@pytest.fixture(params=["stable_diffusion", "stable_diffusion_3", "wan"])
def make(request: pytest.FixtureRequest) -> Make:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    builder = video_policy if request.param == "wan" else image_policy

    def build(sampling: dict[str, Any] | None = None, **settings: Any) -> DenoisingPolicy:
        return builder(folder, sampling, **settings)

    return build


@pytest.fixture
def make_sd3(stable_diffusion_3_folder: Path) -> Make:
    def build(sampling: dict[str, Any] | None = None, **settings: Any) -> DenoisingPolicy:
        return image_policy(stable_diffusion_3_folder, sampling, **settings)

    return build


# Replay equals rollout


def test_replay_is_rollout_for_any_split_in_float32(make: Make) -> None:
    policy = make(lora=LORA)
    perturb(policy)
    trajectory = policy.rollout(requests(5))
    for budget in (1, 2, 5):
        ratio = (replayed(policy, trajectory, budget) - segment_of(trajectory).rollout_log_probs).exp()
        assert (ratio - 1).abs().max() <= 1e-5


@pytest.mark.parametrize(("how", "guidance_gradient"), [("bfloat16 base", True), ("autocast", False)])
def test_replay_is_rollout_bit_for_bit_in_bfloat16(make: Make, how: str, guidance_gradient: bool) -> None:
    dtype = "bfloat16" if how == "bfloat16 base" else "float32"
    policy = make(
        lora=LORA, dtype=dtype, guidance_gradient=guidance_gradient, sampling_rows=3, storage_dtype="bfloat16"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        trajectory = policy.rollout(requests(5))
        assert torch.equal(replayed(policy, trajectory, 3), segment_of(trajectory).rollout_log_probs)
    assert all(parameter.dtype == torch.float32 for parameter in policy.weight_sets.parameters().values())


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("unit", ["element_mean", "element_sum"])
def test_every_sampler_replays(make_sd3: Make, sampler: str, unit: str) -> None:
    policy = make_sd3({"sampler": {"type": sampler}, "log_prob_unit": unit}, storage_dtype="bfloat16")
    trajectory = policy.rollout(requests(2))
    segment = segment_of(trajectory)
    size = segment.final_latents[0].numel() if unit == "element_sum" else 1
    difference = replayed(policy, trajectory, 1) - segment.rollout_log_probs
    assert difference.abs().max() <= 1e-5 * size
    assert policy.decisions() == [("denoising", unit)]


def test_unnormalised_log_prob_is_the_papers(make_sd3: Make) -> None:
    gaussian = make_sd3({"sampler": {"type": "cps"}})
    paper = make_sd3({"sampler": {"type": "cps", "log_prob": "unnormalised"}})
    assert (gaussian.decisions(), paper.decisions()) == ([("denoising", "element_mean")], [("denoising", "error_mean")])
    trajectory = paper.rollout(requests(2))
    segment = segment_of(trajectory)
    cut = Cut(0, torch.arange(2), slice(1, 2))
    mean = gaussian.replay(trajectory, cut, frozenset({"mean"})).of("mean")[:, 0]
    expected = -((segment.states[2] - mean) ** 2).mean((1, 2, 3))
    torch.testing.assert_close(segment.rollout_log_probs[:, 1], expected)
    torch.testing.assert_close(replayed(paper, trajectory, 2), segment.rollout_log_probs)


def test_replay_takes_consecutive_steps_at_once(make: Make) -> None:
    policy = make()
    trajectory = policy.rollout(requests(3))
    rows, steps = torch.tensor([2, 0]), slice(0, 2)
    needs = frozenset({"log_prob", "mean", "std", "prediction", "features", "entropy"})
    together = policy.replay(trajectory, Cut(0, rows, steps), needs)
    for step in range(2):
        alone = policy.replay(trajectory, Cut(0, rows, slice(step, step + 1)), needs)
        for need in needs:
            torch.testing.assert_close(together.of(need)[:, step], alone.of(need)[:, 0], rtol=1e-4, atol=1e-5)
    assert together.of("features").shape == (2, 2, policy.feature_size)
    assert torch.equal(together.of("std"), segment_of(trajectory).std[rows, steps])


def test_features_are_the_prompts_and_not_the_negative_prompts(make: Make) -> None:
    policy = make()
    trajectory = policy.rollout(requests(2))
    segment = segment_of(trajectory)
    cut = Cut(0, torch.arange(2), slice(1, 2))
    features = policy.replay(trajectory, cut, frozenset({"features"})).of("features")
    for changed, is_same in (
        (replace(segment, negative_index=1 - segment.negative_index), True),
        (replace(segment, condition_index=1 - segment.condition_index), False),
    ):
        other = policy.replay(replace(trajectory, segments=[changed]), cut, frozenset({"features"})).of("features")
        assert torch.allclose(other, features, rtol=1e-4, atol=1e-5) == is_same


def test_replay_follows_the_weights_and_has_a_gradient(make: Make) -> None:
    policy = make()
    trajectory = policy.rollout(requests(2))
    cut = policy.plan(trajectory, torch.arange(2), 2)[0]
    before = policy.replay(trajectory, cut, LOG_PROB).of("log_prob")
    before.sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.any() for parameter in policy.weight_sets.parameters().values()
    )
    perturb(policy)
    assert not torch.allclose(policy.replay(trajectory, cut, LOG_PROB).of("log_prob"), before)


def test_gradient_is_the_same_for_any_split_and_with_checkpointing(make: Make) -> None:
    def gradient(policy: DenoisingPolicy, budget: int) -> torch.Tensor:
        trajectory = policy.rollout(requests(3))
        for cut in policy.plan(trajectory, torch.arange(3), budget):
            policy.replay(trajectory, cut, LOG_PROB).of("log_prob").sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.weight_sets.parameters().values() if p.grad is not None])

    whole = gradient(make(lora=LORA), budget=3)
    for other in (
        gradient(make(lora=LORA), budget=1),
        gradient(make(lora=LORA, gradient_checkpointing=True), budget=2),
    ):
        assert (other - whole).norm() <= 1e-5 * whole.norm()


# Randomness


def test_a_sample_does_not_depend_on_its_batch(make: Make) -> None:
    policy = make(sampling_rows=2)
    everyone = segment_of(policy.rollout(requests(5)))
    alone = segment_of(policy.rollout(requests(5)[3:4]))
    torch.testing.assert_close(everyone.final_latents[3:4], alone.final_latents, rtol=1e-4, atol=1e-4)
    assert torch.equal(everyone.states[0][3:4], alone.states[0])  # the initial noise is equal bit for bit


def test_samples_of_a_group_differ_in_every_transition(make: Make) -> None:
    policy = make()
    first, again = (segment_of(policy.rollout(requests(2))) for _ in range(2))
    for step, state in first.states.items():
        assert torch.equal(state, again.states[step])
        assert not torch.allclose(state[0], state[1])


def test_shared_initial_noise_is_the_groups_and_later_noise_is_not(make_sd3: Make) -> None:
    policy = make_sd3({"shared_initial_noise": True})
    segment = segment_of(policy.rollout(requests(4)))
    start = segment.states[0]
    assert torch.equal(start[0], start[1])
    assert torch.equal(start[2], start[3])
    assert not torch.allclose(start[0], start[2])
    assert not torch.allclose(segment.states[1][0], segment.states[1][1])
    own = segment_of(policy.rollout(requests(4), policy.sampling.model_copy(update={"shared_initial_noise": False})))
    assert not torch.allclose(own.states[0], start)


# Guidance


def test_each_sample_has_its_own_negative_prompt(make: Make) -> None:
    policy = make()
    negatives = [None, "bad", "cat", ""]
    mixed = segment_of(policy.rollout(requests(4, negatives=negatives)))
    for row, negative in enumerate(negatives):
        alone = segment_of(policy.rollout(requests(4, negatives=[negative] * 4)[row : row + 1]))
        torch.testing.assert_close(mixed.final_latents[row : row + 1], alone.final_latents, rtol=1e-4, atol=1e-4)
    other = segment_of(policy.rollout(requests(4, negatives=["cat"] * 4)))
    assert torch.allclose(mixed.final_latents[2], other.final_latents[2], rtol=1e-4, atol=1e-4)
    for row in (0, 1, 3):
        assert not torch.allclose(mixed.final_latents[row], other.final_latents[row], rtol=1e-4, atol=1e-4)


def test_each_distinct_text_is_encoded_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make()
    encoded: list[str] = []
    encode = policy.encode_prompts
    monkeypatch.setattr(policy, "encode_prompts", lambda texts: encoded.extend(texts) or encode(texts))
    segment = segment_of(policy.rollout(requests(6, negatives=["bad", None, "cat", "cat", "cat", "bad"])))
    assert sorted(encoded) == sorted({"a red cat", "dog", "blue", "bad", "cat"})
    assert all(len(value) == len(encoded) for value in segment.conditions.values())
    encoded.clear()
    policy.rollout(requests(2), policy.sampling.model_copy(update={"guidance_scale": 1.0}))
    assert encoded == ["a red cat"]


def test_guidance_interval_guides_its_steps_only(make_sd3: Make) -> None:
    policy = make_sd3({"guidance_interval": [0.25, 0.75]})
    trajectory = policy.rollout(requests(2))
    segment = segment_of(trajectory)
    assert segment.guidance_scale.tolist() == [[1, 3, 3, 1]] * 2
    torch.testing.assert_close(replayed(policy, trajectory, 1), segment.rollout_log_probs)
    # One row guided and one not in the same batch: each as it is alone.
    mixed = replace(segment, guidance_scale=segment.guidance_scale.clone())
    mixed.guidance_scale[0, 1] = 1
    cut = Cut(0, torch.arange(2), slice(1, 2))
    prediction = policy.replay(replace(trajectory, segments=[mixed]), cut, frozenset({"prediction"})).of("prediction")
    guided = policy.replay(trajectory, cut, frozenset({"prediction"})).of("prediction")
    torch.testing.assert_close(prediction[1], guided[1])
    condition = policy.condition(mixed, torch.tensor([0]), slice(1, 2))
    plain = policy.predict(mixed.states[1][:1], mixed.times[:1, 1], replace(condition, negative={}))
    torch.testing.assert_close(prediction[0], plain)


def test_gradient_through_the_negative_branch_is_an_option(make_sd3: Make) -> None:
    def gradient_and_value(guidance_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        policy = make_sd3(guidance_gradient=guidance_gradient)
        trajectory = policy.rollout(requests(2))
        step = policy.replay(trajectory, Cut(0, torch.arange(2), slice(1, 2)), frozenset({"prediction"}))
        step.of("prediction").sum().backward()
        weight = policy.denoiser.get_parameter("proj_out.weight")
        assert weight.grad is not None
        return weight.grad, step.of("prediction").detach()

    (full, value), (half, same_value) = gradient_and_value(True), gradient_and_value(False)
    torch.testing.assert_close(value, same_value, rtol=1e-4, atol=1e-4)
    # prediction = 3 positive - 2 negative, and the gradient of the sum is the same features' sum for either branch
    assert (full - half).norm() > 0.1 * full.norm()


# Windows and plans


def test_only_the_window_is_stochastic_trained_and_kept(make: Make) -> None:
    policy = make({"window": {"steps": [1, 1]}})
    trajectory = policy.rollout(requests(3))
    segment = segment_of(trajectory)
    assert segment.trained_mask.tolist() == [[step == 1 for step in range(segment.num_steps)]] * 3
    assert set(segment.states) == {1, 2}
    torch.testing.assert_close(replayed(policy, trajectory, 2), segment.rollout_log_probs)
    with pytest.raises(ValueError, match="deterministic"):
        policy.replay(trajectory, Cut(0, torch.arange(3), slice(0, 1)), LOG_PROB)


def test_a_moving_window_is_that_of_the_iteration(make: Make) -> None:
    """The same samples as with the fixed window that it stands for; requests of several iterations have none."""
    policy = make({"window": {"moving": {"size": 1, "every": 2}}})
    rows = requests(2)
    assert {row.key.iteration for row in rows} == {3}
    found = segment_of(policy.rollout(rows))
    fixed = segment_of(make({"window": {"steps": [1, 1]}}).rollout(rows))
    assert torch.equal(found.std, fixed.std)
    assert torch.equal(found.final_latents, fixed.final_latents)
    assert found.trained_mask[0].nonzero().flatten().tolist() == [1]
    later = replace(rows[0], key=replace(rows[0].key, iteration=4))
    assert set(segment_of(policy.rollout([later])).trained_mask[0].nonzero().flatten().tolist()) != {1}
    with pytest.raises(ValueError, match="same iteration"):
        policy.rollout([*rows, later])


def test_plan_covers_each_trained_decision_of_its_roots_once(make: Make) -> None:
    policy = make()
    trajectory = policy.rollout(requests(5))
    segment = segment_of(trajectory)
    segment.trained_mask[1] = False  # a group that was dropped
    roots = torch.tensor([0, 1, 3, 4])
    counts = torch.zeros_like(segment.trained_mask, dtype=torch.long)
    for cut in policy.plan(trajectory, roots, 2):
        assert 1 <= len(cut.rows) <= 2
        counts[cut.rows, cut.steps] += 1
    expected = segment.trained_mask.clone()
    expected[2] = False
    assert torch.equal(counts, expected.long())


# Weights


def test_a_fresh_adapter_changes_nothing_and_trains_alone(make: Make) -> None:
    full, adapted = make(), make(lora=LORA)
    expected = segment_of(full.rollout(requests(2))).final_latents
    torch.testing.assert_close(segment_of(adapted.rollout(requests(2))).final_latents, expected)
    assert all("lora_" in name for name in adapted.weight_sets.parameters())
    trained = {name for name, parameter in full.pipeline.vae.named_parameters() if parameter.requires_grad}
    assert not trained
    assert not any(parameter.requires_grad for parameter in full.pipeline.text_encoder.parameters())


def test_reference_of_an_adapter_is_the_model_without_it(make: Make) -> None:
    policy = make(lora=LORA)
    before = policy.rollout(requests(2))
    policy.keep("reference")
    perturb(policy)
    after = policy.rollout(requests(2))
    assert not torch.allclose(segment_of(after).final_latents, segment_of(before).final_latents)
    with policy.using("reference"):
        assert torch.equal(segment_of(policy.rollout(requests(2))).final_latents, segment_of(before).final_latents)


def test_weight_state_restores_the_policy(make: Make) -> None:
    policy, other = make(lora=LORA), make(lora=LORA)
    perturb(policy)
    other.load_weight_state(policy.weight_state())
    expected = segment_of(policy.rollout(requests(2))).final_latents
    assert torch.equal(segment_of(other.rollout(requests(2))).final_latents, expected)


def test_inspection_counts_what_is_built(make: Make) -> None:
    for lora in (None, LORA):
        policy = make(lora=lora)
        modules = [m for m in policy.pipeline.components.values() if isinstance(m, torch.nn.Module)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        summary = policy.settings.inspect()
        assert summary.weights.parameters == sum(parameter.numel() for parameter in parameters)
        assert summary.weights.trainable == sum(p.numel() for p in parameters if p.requires_grad)
        assert (summary.sample_kind, summary.decisions) == (policy.sample_kind, policy.decisions())


def test_the_unit_says_what_a_transition_is_scored_by(make: Make) -> None:
    """A deterministic sampler scores nothing, and the built policy, its inspection and its segments say the same."""
    policy = make({"sampler": {"type": "ode"}})
    assert policy.decisions() == policy.settings.inspect().decisions == [("denoising", "none")]
    assert policy.rollout(requests(2)).segments[0].log_prob_unit == "none"


# Given samples


def test_encoded_samples_end_at_their_own_latents_and_replay(make: Make) -> None:
    policy = make()
    rows = requests(3)
    samples = policy.decode(policy.rollout(rows))
    prompts, keys = [r.prompt for r in rows], [r.key for r in rows]
    trajectory = policy.encode(prompts, samples, keys)
    segment = segment_of(trajectory)
    torch.testing.assert_close(segment.final_latents, policy.latents_from_samples(samples).detach())
    assert segment.rollout_log_probs[segment.trained_mask].isnan().all()
    assert replayed(policy, trajectory, 2).isfinite().all()


def test_a_model_that_knows_the_data_scores_it_as_the_noise_that_was_drawn(
    make_sd3: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_sd3({"guidance_scale": 1.0})
    rows = requests(2)
    trajectory = policy.encode([r.prompt for r in rows], policy.decode(policy.rollout(rows)), [r.key for r in rows])
    segment = segment_of(trajectory)
    model = replayed(policy, trajectory, 2)
    monkeypatch.setattr(
        policy, "denoise", lambda x, times, _: (x - segment.final_latents) / (times / 1000).reshape(-1, 1, 1, 1)
    )
    informed = replayed(policy, trajectory, 2)
    # A Gaussian's own log-density at its own draws is its negative entropy, up to the draws' sampling error.
    expected = -torch.distributions.Normal(0, segment.std[segment.trained_mask]).entropy()
    torch.testing.assert_close(informed[segment.trained_mask], expected, rtol=0, atol=0.15)
    assert (informed >= model).all()


# Decoding


def test_decoded_pixels_have_a_gradient_on_request(make: Make) -> None:
    policy = make(gradient_checkpointing=True, decoding_rows=2)
    trajectory = policy.rollout(requests(3))
    latents = segment_of(trajectory).final_latents.mul_(0.05).requires_grad_()  # small: pixels in the open interval
    samples = policy.decode(trajectory, differentiable=True)
    sum(sample.unit().sum() for sample in samples).backward()  # type: ignore[union-attr]
    assert latents.grad is not None
    assert all(row.any() for row in latents.grad)
    plain = policy.decode(trajectory)
    for sample, kept in zip(plain, samples, strict=True):
        assert sample.uint8().dtype == torch.uint8  # type: ignore[union-attr]
        torch.testing.assert_close(sample.unit(), kept.unit().detach(), rtol=0, atol=1 / 500)  # type: ignore[union-attr]


def test_a_latent_that_is_not_finite_is_an_error_and_not_a_black_image(make_sd3: Make) -> None:
    policy = make_sd3()
    trajectory = policy.rollout(requests(2))
    segment_of(trajectory).final_latents[1].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="the decoder made pixels that are not finite"):
        policy.decode(trajectory)


def test_the_decoder_computes_in_float32_whatever_the_models_dtype(make: Make) -> None:
    policy = make(lora=LORA, dtype="bfloat16")
    assert all(parameter.dtype == torch.float32 for parameter in policy.vae.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trajectory = policy.rollout(requests(1))
        under_autocast = policy.decode_latents(segment_of(trajectory).final_latents)
    assert torch.equal(under_autocast, policy.decode_latents(segment_of(trajectory).final_latents))
    assert segment_of(trajectory).final_latents.dtype == torch.float32


def test_tiles_decode_what_the_whole_decodes(make_sd3: Make) -> None:
    whole, tiled = make_sd3({"height": 64, "width": 64}), make_sd3({"height": 64, "width": 64}, vae_tiling=True)
    trajectory = whole.rollout(requests(1))
    tiled.vae.tile_latent_min_size, tiled.vae.tile_sample_min_size = 16, 32
    (one,), (other,) = whole.decode(trajectory), tiled.decode(trajectory)
    assert one.unit().shape == other.unit().shape == (3, 64, 64)  # type: ignore[union-attr]
    assert not torch.equal(one.unit(), other.unit())  # type: ignore[union-attr]
    assert (one.unit() - other.unit()).abs().mean() < 0.1  # type: ignore[union-attr]


def test_only_images_are_encoded_by_an_image_policy(make_sd3: Make) -> None:
    policy = make_sd3()
    with pytest.raises(ValueError, match="image"):
        policy.latents_from_samples([object()])  # type: ignore[list-item]
    assert policy.latents_from_samples([Image(torch.rand(3, 16, 16))]).shape == (1, 16, 8, 8)
