"""Given samples scored by the forward process, against diffusers' own schedulers and the raw denoisers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_helpers import image_policy, requests
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from scipy import stats
from tiny_models_diffusion import tiny_stable_diffusion
from torch import Tensor

from modalities.base import Cut, ForwardSegment, Trajectory
from modalities.denoising import DenoisingPolicy
from modalities.forward_process import ForwardProcessSettings, forward_segment
from modalities.randomness import seeded_generator

DRAWS = 3
EVERYTHING = frozenset({"log_prob", "prediction", "clean_prediction", "target"})
PREDICTION_TYPES = ["epsilon", "v_prediction", "sample"]


@pytest.fixture(params=["flow", *PREDICTION_TYPES])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> DenoisingPolicy:
    if request.param == "flow":
        return image_policy(request.getfixturevalue("stable_diffusion_3_folder"), max_sequence_length=8)
    return image_policy(tiny_stable_diffusion(tmp_path, request.param))


def likelihood(policy: DenoisingPolicy, rows: int = 4, round: int = 0, **settings: Any) -> Trajectory:
    block = ForwardProcessSettings(draws=DRAWS, **settings)
    return policy.as_likelihood(policy.rollout(requests(rows)), block, round)


def draws_of(trajectory: Trajectory) -> ForwardSegment:
    segment = trajectory.segments[0]
    assert isinstance(segment, ForwardSegment)
    return segment


def whole(trajectory: Trajectory) -> Cut:
    segment = trajectory.segments[0]
    return Cut(0, torch.arange(segment.num_rows), slice(0, segment.num_steps))


def noised_by_diffusers(policy: DenoisingPolicy, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    """(x, what a perfect denoiser outputs, timesteps), rows times draws, from diffusers' schedulers."""
    segment, scheduler = draws_of(trajectory), policy.pipeline.scheduler
    shape = segment.clean.shape[1:]
    noise = torch.stack(
        [
            torch.randn(shape, generator=seeded_generator(s, t))
            for s in segment.noise_seed.tolist()
            for t in range(DRAWS)
        ]
    )
    clean, times = segment.clean.repeat_interleave(DRAWS, 0), segment.times.flatten()
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        plain = FlowMatchEulerDiscreteScheduler()
        plain.sigmas, plain.timesteps = times, times * 1000
        x = plain.scale_noise(clean, times * 1000, noise)
        return x, noise - clean, times * 1000
    ddim = DDIMScheduler.from_config(scheduler.config)
    x = ddim.add_noise(clean, noise, times.long())
    targets = {"epsilon": noise, "sample": clean, "v_prediction": ddim.get_velocity(clean, noise, times.long())}
    return x, targets[ddim.config.prediction_type], times.long()


def raw_output(policy: DenoisingPolicy, trajectory: Trajectory, x: Tensor, timesteps: Tensor) -> Tensor:
    """Of the denoiser itself, without guidance, each row told its own prompt."""
    segment = draws_of(trajectory)
    rows = torch.arange(segment.num_rows).repeat_interleave(DRAWS)
    embeddings = {key: value[segment.condition_index[rows]] for key, value in segment.conditions.items()}
    text = embeddings["prompt_embeds"]
    if pooled := embeddings.keys() - {"prompt_embeds"}:
        return policy.pipeline.transformer(x, text, embeddings[pooled.pop()], timesteps).sample
    return policy.pipeline.unet(x, timesteps, text).sample


def test_noise_and_targets_are_those_of_diffusers_and_the_score_is_the_raw_denoisers_error(
    policy: DenoisingPolicy,
) -> None:
    trajectory = likelihood(policy)
    x, target, timesteps = noised_by_diffusers(policy, trajectory)
    with torch.no_grad():
        output = raw_output(policy, trajectory, x, timesteps)
        replay = policy.replay(trajectory, whole(trajectory), EVERYTHING)
    torch.testing.assert_close(replay.of("target").flatten(0, 1), target)
    torch.testing.assert_close(replay.of("prediction").flatten(0, 1), output, rtol=1e-4, atol=1e-4)
    error = torch.nn.functional.mse_loss(output, target, reduction="none").flatten(1).mean(1)
    torch.testing.assert_close(replay.of("log_prob").flatten(), -error, rtol=1e-4, atol=1e-5)


def test_the_weighting_says_whose_error_it_is(policy: DenoisingPolicy) -> None:
    """The clean latent that a perfect denoiser implies is the true one, and the three errors are those of the three."""
    scores = {}
    for weighting in ("uniform", "noise", "clean"):
        trajectory = likelihood(policy, weighting=weighting)
        with torch.no_grad():
            scores[weighting] = policy.replay(trajectory, whole(trajectory), EVERYTHING)
    segment = draws_of(trajectory)
    x, _, timesteps = noised_by_diffusers(policy, trajectory)
    clean = scores["clean"].of("clean_prediction")
    error = (clean - segment.clean[:, None]).square().flatten(2).mean(2)
    torch.testing.assert_close(scores["clean"].of("log_prob"), -error, rtol=1e-3, atol=1e-5)
    if isinstance(policy.pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
        signal, scale = 1 - segment.times, segment.times
    else:
        alphas = DDIMScheduler.from_config(policy.pipeline.scheduler.config).alphas_cumprod[timesteps].view(-1, DRAWS)
        signal, scale = alphas.sqrt(), (1 - alphas).sqrt()
    # x is the same for the true and for the implied clean latent, so the noise makes up for their difference.
    noise_error = error * (signal / scale).square()
    torch.testing.assert_close(scores["noise"].of("log_prob"), -noise_error, rtol=1e-3, atol=1e-5)
    informed = policy.process.clean(x, scores["clean"].of("target").flatten(0, 1), segment.times.flatten())
    torch.testing.assert_close(informed.view_as(clean), segment.clean[:, None].expand_as(clean), rtol=1e-3, atol=1e-3)


def test_draws_belong_to_the_row_and_the_round(policy: DenoisingPolicy) -> None:
    first, again, alone, later = (likelihood(policy, rows, round) for rows, round in ((4, 0), (4, 0), (1, 0), (4, 1)))
    for name in ("times", "noise_seed"):
        ours = getattr(draws_of(first), name)
        assert torch.equal(ours, getattr(draws_of(again), name))
        assert torch.equal(ours[:1], getattr(draws_of(alone), name))
        assert not torch.isin(ours, getattr(draws_of(later), name)).all()
    assert len(draws_of(first).noise_seed.unique()) == 4


def test_a_group_can_share_its_draws(policy: DenoisingPolicy) -> None:
    segment = draws_of(likelihood(policy, shared_in_group=True))
    assert segment.group.tolist() == [0, 0, 1, 1]
    for values in (segment.times, segment.noise_seed):
        assert torch.equal(values[0], values[1])
        assert torch.equal(values[2], values[3])
        assert not torch.equal(values[0], values[2])


def test_two_groups_of_one_prompt_do_not_share_their_draws(policy: DenoisingPolicy) -> None:
    """A prompt that is drawn twice in an iteration has two groups; their keys differ in the sample alone."""
    rows = [replace(row, key=replace(row.key, prompt=0, sample=number)) for number, row in enumerate(requests(4))]
    settings = ForwardProcessSettings(shared_in_group=True)
    seeds = draws_of(policy.as_likelihood(policy.rollout(rows), settings)).noise_seed.tolist()
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


def test_shares_of_the_clock_are_times(policy: DenoisingPolicy) -> None:
    """(0, 1] is sigma itself, or the timesteps 1..N of the papers, which the models count from 0."""
    count = policy.process.num_train_timesteps  # type: ignore[attr-defined]
    shares = torch.arange(1, count + 1, dtype=torch.float64) / count
    is_flow = isinstance(policy.pipeline.scheduler, FlowMatchEulerDiscreteScheduler)
    assert torch.equal(policy.process.time_at(shares), shares.float() if is_flow else torch.arange(count).float())


@pytest.mark.parametrize("times", ["uniform", "logit_normal"])
def test_each_draw_follows_the_distribution_and_a_rows_draws_are_spread_over_it(
    stable_diffusion_3_folder: Path, tmp_path: Path, times: Any
) -> None:
    """Kolmogorov-Smirnov against scipy, and one draw of a row in every quantile interval."""
    settings = ForwardProcessSettings(draws=4, times=times)
    flow = image_policy(stable_diffusion_3_folder, max_sequence_length=8)
    diffusion = image_policy(tiny_stable_diffusion(tmp_path))
    for policy, number in ((flow, 1), (diffusion, diffusion.process.num_train_timesteps)):  # type: ignore[attr-defined]
        segment = policy.rollout(requests(1)).segments[0]
        keys = [replace(segment.keys[0], sample=sample) for sample in range(500)]
        wide = replace(
            segment,  # type: ignore[type-var]
            keys=keys,
            group=torch.zeros(500, dtype=torch.long),
            times=segment.times.expand(500, -1),  # type: ignore[attr-defined]
        )
        found = forward_segment(wide, policy.process, settings, round=0).times
        share = found.double() if number == 1 else (found.double() + 0.5) / number
        assert found.min() >= 0
        assert found.max() <= (1 if number == 1 else number - 1)
        if times == "logit_normal":
            share = torch.tensor(stats.norm.cdf(torch.special.logit(share).numpy()))
        for column in share.T:
            assert stats.kstest(column.numpy(), "uniform").pvalue > 1e-3
        if number == 1:
            assert torch.equal(
                (share.clamp(max=0.9999999) * 4).floor().sort(1).values, torch.arange(4.0).expand(500, -1)
            )


def test_the_sampling_grid_is_drawn_without_its_clean_end(policy: DenoisingPolicy) -> None:
    settings = ForwardProcessSettings(draws=policy.sampling.steps, times="sampling_grid")
    found = draws_of(policy.as_likelihood(policy.rollout(requests(3)), settings)).times
    grid = policy.schedule(policy.sampling).times[:-1]
    assert torch.equal(found.sort(1, descending=True).values, grid.expand(3, -1))


def test_guidance_of_the_sampler_is_left_out(policy: DenoisingPolicy) -> None:
    """The forward process scores the conditional model (Ho and Salimans 2022 train it so)."""
    assert policy.sampling.guidance_scale > 1
    calls: list[int] = []
    denoise = policy.denoise
    policy.denoise = lambda x, *rest: calls.append(len(x)) or denoise(x, *rest)  # type: ignore[method-assign]
    trajectory = likelihood(policy, rows=2)
    calls.clear()
    policy.replay(trajectory, whole(trajectory), frozenset({"log_prob"}))
    assert calls == [2 * DRAWS]


def test_given_samples_are_scored_at_their_own_latents(policy: DenoisingPolicy) -> None:
    rows = requests(3)
    samples = policy.decode(policy.rollout(rows))
    encoded = policy.encode([r.prompt for r in rows], samples, [r.key for r in rows])
    segment = draws_of(policy.as_likelihood(encoded, ForwardProcessSettings()))
    torch.testing.assert_close(segment.clean, policy.latents_from_samples(samples).detach())
    assert segment.trained_mask.all()
    assert segment.rollout_log_probs.isnan().all()
