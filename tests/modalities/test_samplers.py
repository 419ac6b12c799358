"""Kernels, schedules and log-probs against closed forms, torch.distributions and diffusers' own schedulers."""

import math
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import calculate_shift
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities import samplers
from modalities.denoising_settings import (
    Cps,
    DanceSde,
    Ddim,
    DenoisingSampling,
    FlowSde,
    MovingWindow,
    Ode,
    Sampler,
    Window,
)
from modalities.errors import UserError
from modalities.noise_process import DiffusionProcess, FlowProcess, NoiseProcess
from modalities.randomness import SampleKey

PREDICTION_TYPES = ["epsilon", "v_prediction", "sample"]
SHAPES = [(4, 3), (2, 4, 8), (2, 4, 5, 5), (2, 3, 2, 4, 4)]  # packed, image and video latents among them


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mean_of(coefficients: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, prediction: torch.Tensor) -> torch.Tensor:
    on_x, on_prediction = (samplers.expand(values, x) for values in coefficients)
    return on_x * x + on_prediction * prediction


def few(function):  # type: ignore[no-untyped-def]
    return settings(max_examples=20, deadline=None)(function)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_prob_and_entropy_are_those_of_torch_distributions(shape: tuple[int, ...]) -> None:
    x, mean, std = randn(*shape), randn(*shape, seed=1), torch.linspace(0.01, 3, shape[0])
    normal = torch.distributions.Normal(mean, std.reshape(-1, *[1] * (len(shape) - 1)).expand(shape))
    size = math.prod(shape[1:])
    dims = tuple(range(1, len(shape)))
    for unit, log_prob, entropy in (
        ("element_mean", normal.log_prob(x).mean(dims), normal.entropy().mean(dims)),
        ("element_sum", normal.log_prob(x).sum(dims), normal.entropy().sum(dims)),
    ):
        torch.testing.assert_close(samplers.gaussian_log_prob(x, mean, std, unit), log_prob)
        torch.testing.assert_close(samplers.gaussian_entropy(std, size, unit), entropy)


def test_log_probs_are_float32_and_know_no_other_unit() -> None:
    x = randn(2, 3).bfloat16()
    assert samplers.gaussian_log_prob(x, x, torch.ones(2), "element_mean").dtype == torch.float32
    with pytest.raises(ValueError, match="element_sum"):
        samplers.gaussian_log_prob(x, x, torch.ones(2), "token")


@few
@given(steps=st.integers(2, 60), shift=st.floats(0.2, 8), a=st.floats(0.05, 1.5))
def test_first_flow_sde_std_is_the_noise_level_on_any_grid(steps: int, shift: float, a: float) -> None:
    std = samplers.flow_sde_std(samplers.uniform_sigmas(steps, shift), a)
    assert std[0].item() == pytest.approx(a, rel=1e-5)
    assert std[-1] == 0
    assert (std[:-1] > 0).all()


@few
@given(sigma=st.floats(0.05, 1), share=st.floats(0.05, 0.95), std=st.floats(0, 1))
def test_sde_mean_is_euler_plus_half_the_score_times_the_variance(sigma: float, share: float, std: float) -> None:
    # DanceGRPO's form, through the score of the Gaussian path, instead of Flow-GRPO's closed coefficients.
    x, velocity = randn(2, 3).double(), randn(2, 3, seed=1).double()
    sigma_next = sigma * share
    score = -(x - (x - sigma * velocity) * (1 - sigma)) / sigma**2
    expected = x + velocity * (sigma_next - sigma) + 0.5 * std**2 * score
    times = [torch.full((2,), value, dtype=torch.float64) for value in (sigma, sigma_next, std)]
    torch.testing.assert_close(mean_of(samplers.flow_sde_coefficients(*times), x, velocity), expected)


@few
@given(sigma=st.floats(0.05, 1), share=st.floats(0, 0.95))
def test_without_noise_every_flow_kernel_is_the_euler_step(sigma: float, share: float) -> None:
    x, velocity = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    times = [torch.full((2,), value) for value in (sigma, sigma * share, 0.0)]
    for kernel in (samplers.flow_sde_coefficients, samplers.cps_coefficients):
        euler = x + (sigma * share - sigma) * velocity
        torch.testing.assert_close(mean_of(kernel(*times), x, velocity), euler, rtol=1e-5, atol=1e-5)


def final_std(process: FlowProcess, sampler: Sampler, steps: int, tau: float, shift: float) -> float:
    """Std of the sampler's result on data N(0, tau^2) with the exact velocity, which is linear in x: no sampling."""
    schedule = process.schedule(DenoisingSampling(steps=steps, sampler=sampler, shift=shift), 0)
    variance = torch.ones(1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for sigma, following, std in zip(
        *(t.double() for t in (schedule.times, schedule.times[1:], schedule.std)), strict=False
    ):
        marginal = (1 - sigma) ** 2 * tau**2 + sigma**2
        velocity = (sigma - (1 - sigma) * tau**2) / marginal * one
        coefficients = process.coefficients(schedule.sampler, sigma[None], following[None], std[None])
        gain = mean_of(coefficients, one, velocity)
        variance = gain**2 * variance + std**2
    return variance.sqrt().item()


@pytest.mark.parametrize("tau", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("sampler", [Ode(), FlowSde(noise_level=0.7), DanceSde(noise_level=0.3)])
def test_a_gaussian_keeps_its_std(tau: float, sampler: Sampler) -> None:
    # Euler's own error is first order: up to 1.9 % of tau at 100 steps, below 1 % from 200 steps on.
    for steps in (200, 400):
        assert final_std(FlowProcess({}), sampler, steps, tau=tau, shift=1.0) == pytest.approx(tau, rel=0.01)
    assert final_std(FlowProcess({}), sampler, steps=100, tau=tau, shift=1.0) == pytest.approx(tau, rel=0.02)


@pytest.mark.parametrize("a", [0.3, 0.8])
def test_cps_contracts_a_gaussian_to_a_known_limit(a: float) -> None:
    stds = [final_std(FlowProcess({}), Cps(noise_level=a), steps, tau=1.0, shift=1.0) for steps in (200, 1500)]
    limit = math.cos(a * math.pi / 4)
    assert stds[1] == pytest.approx(limit, rel=0.01)
    assert abs(stds[1] - limit) < abs(stds[0] - limit)


# Diffusion models


def scheduler_config(prediction_type: str = "epsilon", **changes: object) -> dict[str, object]:
    config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    return config | {"set_alpha_to_one": False, "steps_offset": 1, "prediction_type": prediction_type} | changes


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_is_diffusers_ddim_step(prediction_type: str, eta: float) -> None:
    config = scheduler_config(prediction_type)
    scheduler = DDIMScheduler(**config)
    scheduler.set_timesteps(7)  # leading: t - T // n is the next entry of the grid
    process = DiffusionProcess(config)
    schedule = process.schedule(DenoisingSampling(steps=7, sampler=Ddim(eta=eta)), 0)
    torch.testing.assert_close(schedule.times[:-1].long(), scheduler.timesteps)
    x, prediction, noise = (randn(2, 3, 4, 4, seed=seed) for seed in range(3))
    for step, timestep in enumerate(scheduler.timesteps):
        expected = scheduler.step(prediction, timestep, x, eta=eta, variance_noise=noise).prev_sample
        time, following = (schedule.times[index].expand(2) for index in (step, step + 1))
        coefficients = process.coefficients("ddim", time, following, schedule.std[step].expand(2))
        mean = mean_of(coefficients, x, prediction)
        torch.testing.assert_close(mean + schedule.std[step] * noise, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prediction_type", PREDICTION_TYPES)
def test_full_noise_on_an_uneven_grid_is_ddpm(prediction_type: str) -> None:
    config = scheduler_config(prediction_type)
    ddpm = DDPMScheduler(**{k: v for k, v in config.items() if k not in ("set_alpha_to_one", "steps_offset")})
    timesteps = [950, 700, 650, 300, 20]
    ddpm.set_timesteps(timesteps=timesteps)
    process = DiffusionProcess(config)
    times = torch.tensor([*timesteps, -1]).float()
    std = process.std(times, Ddim(eta=1.0))
    x, prediction = randn(2, 3, 4, 4), randn(2, 3, 4, 4, seed=1)
    for step in range(len(timesteps) - 1):
        expected = ddpm.step(prediction, timesteps[step], x, generator=torch.Generator().manual_seed(5)).prev_sample
        noise = randn(2, 3, 4, 4, seed=5)
        stacked = (values[step].expand(2) for values in (times, times[1:], std))
        mean = mean_of(process.coefficients("ddim", *stacked), x, prediction)
        torch.testing.assert_close(mean + std[step] * noise, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("offset", [0, 1])
def test_ddim_grids_are_diffusers(spacing: str, offset: int) -> None:
    config = scheduler_config(timestep_spacing=spacing, steps_offset=offset)
    scheduler, process = DDIMScheduler(**config), DiffusionProcess(config)
    for steps in (1, 2, 3, 7, 10, 30, 50, 333):
        scheduler.set_timesteps(steps)
        times = process.times(DenoisingSampling(steps=steps), 0)
        assert times.tolist() == [*scheduler.timesteps.tolist(), -1]


@pytest.mark.parametrize(
    ("offset", "alpha_to_one", "last_is_trained"), [(0, False, False), (1, False, True), (1, True, False)]
)
def test_a_ddim_transition_without_noise_has_std_zero(offset: int, alpha_to_one: bool, last_is_trained: bool) -> None:
    process = DiffusionProcess(scheduler_config(steps_offset=offset, set_alpha_to_one=alpha_to_one))
    std = process.schedule(DenoisingSampling(steps=10), 0).std
    assert (std[-1] > 0) == last_is_trained
    assert (std[:-1] > 0).all()


# Flow schedules


@pytest.mark.parametrize(
    "config",
    [
        {"shift": 1.0},
        {"shift": 3.0},
        {"shift": 3.0, "shift_terminal": 0.1},
        {"shift": 5.0, "num_train_timesteps": 500},
        {"use_dynamic_shifting": True},
        {"use_dynamic_shifting": True, "time_shift_type": "linear", "max_shift": 0.9, "shift": 3.0},
    ],
)
@pytest.mark.parametrize("steps", [2, 10, 28])
def test_flow_grid_is_the_pipelines_own(config: dict[str, object], steps: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    shifts = [scheduler.config[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")]
    scheduler.set_timesteps(
        steps, **({"mu": calculate_shift(1024, *shifts)} if "use_dynamic_shifting" in config else {})
    )
    process = FlowProcess(scheduler.config)
    times = process.times(DenoisingSampling(steps=steps), sequence_length=1024)
    torch.testing.assert_close(times, scheduler.sigmas, rtol=0, atol=1e-6)
    torch.testing.assert_close(process.model_times(times)[:-1], scheduler.timesteps, rtol=1e-5, atol=1e-3)


def test_multistep_flow_grid_is_the_schedulers_own() -> None:
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction")
    scheduler.set_timesteps(12)
    config = dict(scheduler.config) | {"_class_name": "UniPCMultistepScheduler"}
    torch.testing.assert_close(
        FlowProcess(config).times(DenoisingSampling(steps=12), 0), scheduler.sigmas, rtol=0, atol=2e-6
    )


def test_an_explicit_shift_shifts_once() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=[1 - index / 10 for index in range(10)])  # given sigmas are shifted once
    times = FlowProcess(scheduler.config).times(DenoisingSampling(steps=10, shift=3.0), 0)
    torch.testing.assert_close(times, scheduler.sigmas)


PROCESSES: list[NoiseProcess] = [FlowProcess({}), *(DiffusionProcess(scheduler_config(p)) for p in PREDICTION_TYPES)]


@pytest.mark.parametrize("process", PROCESSES)
def test_a_perfect_prediction_gives_back_the_data(process: NoiseProcess) -> None:
    times = process.times(DenoisingSampling(steps=10), 0)
    clean, noise = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    for time in times[:-1]:
        x = process.noised(clean, noise, time.expand(2))
        for prediction in (process.target(clean, noise, time.expand(2)), process.oracle(x, clean, time.expand(2))):
            torch.testing.assert_close(process.clean(x, prediction, time.expand(2)), clean, rtol=1e-3, atol=1e-3)
    levels = process.noise_levels(times)
    assert (levels.diff() < 0).all()
    assert 0 <= levels[-1] <= 0.03
    assert 0.99 < levels[0] <= 1 or isinstance(process, DiffusionProcess)


@pytest.mark.parametrize("process", PROCESSES)
def test_step_sizes_add_up_to_the_share_of_the_clock_that_is_passed(process: NoiseProcess) -> None:
    """All of it for a flow, whose steps are differences of sigma; for diffusion models the timesteps from the first."""
    times = process.times(DenoisingSampling(steps=10), 0)
    sizes = process.step_size(times[:-1], times[1:])
    assert (sizes > 0).all()
    whole = 1.0 if isinstance(process, FlowProcess) else (float(times[0]) + 1) / 1000
    assert sizes.sum().item() == pytest.approx(whole)


def test_window_leaves_only_its_transitions_stochastic() -> None:
    process = FlowProcess({"shift": 3.0})
    every = process.schedule(DenoisingSampling(), 0)
    by_steps = process.schedule(DenoisingSampling(window=Window(steps=(2, 4))), 0)
    assert (by_steps.std > 0).nonzero().flatten().tolist() == [2, 3, 4]
    assert torch.equal(by_steps.std[2:5], every.std[2:5])
    low, high = every.times[6].item(), every.times[3].item()
    by_level = process.schedule(DenoisingSampling(window=Window(noise_levels=(low, high))), 0)
    assert (by_level.std > 0).nonzero().flatten().tolist() == [3, 4, 5, 6]


def windows(process: NoiseProcess, iterations: int, seed: int = 0, steps: int = 10, **moving: Any) -> list[list[int]]:
    """The stochastic transitions of each iteration."""
    sampling = DenoisingSampling(steps=steps, window=Window(moving=MovingWindow(**moving)))
    keys = [SampleKey(seed, 0, iteration, 0, 0) for iteration in range(iterations)]
    return [process.schedule(sampling, 0, key).std.nonzero().flatten().tolist() for key in keys]


@pytest.mark.parametrize("process", PROCESSES[:2])
@pytest.mark.parametrize("at_end", ["wrap", "stay"])
def test_a_moving_window_goes_down_the_schedule(process: NoiseProcess, at_end: str) -> None:
    """MixGRPO's: `every` iterations in a place, then `stride` transitions on; a flow's last transition has no noise."""
    found = windows(process, 12, size=3, stride=2, every=2, at_end=at_end)
    top = int(process.schedule(DenoisingSampling(steps=10), 0).std.nonzero().max())
    starts = {8: [0, 2, 4, 6], 9: [0, 2, 4, 6, 7]}[top]  # the last place ends at the last stochastic transition
    starts += [0, 2] if at_end == "wrap" else [starts[-1]] * 2
    assert found == [[start, start + 1, start + 2] for start in starts[:6] for _ in range(2)]


def test_a_random_window_depends_on_the_seed_and_the_iteration_alone() -> None:
    process = FlowProcess({})
    found = windows(process, 90, size=2, every=3, strategy="random")
    assert found == windows(process, 90, size=2, every=3, strategy="random")
    assert all(found[at] == found[at + 1] == found[at + 2] for at in range(0, 90, 3))
    assert {tuple(window) for window in found} == {(start, start + 1) for start in range(8)}
    assert found != windows(process, 90, seed=1, size=2, every=3, strategy="random")


def test_a_moving_window_can_be_all_there_is() -> None:
    assert windows(FlowProcess({}), 3, size=9, every=1) == [list(range(9))] * 3
    with pytest.raises(UserError, match=r"moving\.size: 10 transitions, but only 9"):
        windows(FlowProcess({}), 1, size=10)


@pytest.mark.parametrize(
    ("process", "changes", "message"),
    [
        (FlowProcess({}), {"sampler": {"type": "ddim"}}, "flow_sde, dance_sde, cps, ode"),
        (PROCESSES[1], {"sampler": {"type": "cps"}}, "ddim, ode"),
        (PROCESSES[1], {"shift": 3.0}, "only flow models"),
        (PROCESSES[1], {"steps": 2000}, "2000"),
        (FlowProcess({}), {"window": {"steps": [9, 9]}}, r"\(9, 9\)"),  # the last transition is never stochastic
        (FlowProcess({}), {"window": {"steps": [7, 9]}}, r"\(7, 9\)"),  # nor as a part of a window
        (FlowProcess({}), {"window": {"steps": [8, 12]}}, r"\(8, 12\) asks for transitions that .* do not exist"),
        (FlowProcess({}), {"window": {"noise_levels": [1.5, 2]}}, "noise level"),
    ],
)
def test_sampling_that_does_not_fit_is_explained(process: NoiseProcess, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        process.schedule(DenoisingSampling.model_validate(changes), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": {"steps": [1, 2], "noise_levels": [0, 1]}},
        {"window": {}},
        {"window": {"steps": [1, 2], "moving": {}}},
        {"window": {"moving": {"size": 0}}},
        {"window": {"steps": [3, 2]}},
        {"guidance_interval": [0.5, 0.5]},
        {"guidance_scale": 0.5},
        {"sampler": {"type": "flow_sde", "eta": 1}},
    ],
)
def test_contradictory_sampling_is_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match="validation error"):
        DenoisingSampling.model_validate(changes)


@pytest.mark.parametrize("key", ["use_karras_sigmas", "use_beta_sigmas", "use_exponential_sigmas", "invert_sigmas"])
def test_flow_schedules_that_are_not_known_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=key):
        FlowProcess({key: True})


def test_schedulers_of_another_process_are_refused() -> None:
    with pytest.raises(UserError, match="flow"):
        FlowProcess(scheduler_config() | {"_class_name": "DDIMScheduler"})
    with pytest.raises(UserError, match="beta schedule"):
        DiffusionProcess({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    with pytest.raises(UserError, match="prediction_type"):
        DiffusionProcess(scheduler_config("flow_prediction"))
    with pytest.raises(UserError, match="v_prediction"):
        DiffusionProcess(scheduler_config("epsilon", rescale_betas_zero_snr=True))


def test_clipping_is_turned_off_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="clip_sample"):
        DiffusionProcess(scheduler_config(clip_sample=True))
