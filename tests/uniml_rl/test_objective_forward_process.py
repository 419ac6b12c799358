"""DiffusionNFT and AWM against loops over the papers' formulas, one sample and one draw at a time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_world import (
    ROWS,
    DenoisingWorld,
    accumulated,
    assert_same,
    draw,
    forward_segment,
    group_advantages,
    make_world,
    moved,
    prepared,
)
from tiny_models_diffusion import tiny_stable_diffusion_3
from torch import Tensor

from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from uniml_rl.algorithms.matching import MatchingInputs, NegativeAware, OldPolicySettings
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import Experience
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.forward_process import ForwardProcessObjective
from uniml_rl.objectives.supervised import SupervisedObjective

DRAWS = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stable_diffusion_3(tmp_path_factory.mktemp("models"))


@pytest.fixture
def world(model: Path) -> DenoisingWorld:
    return make_world(model)


def objective_of(name: str, **keys: Any) -> ForwardProcessObjective:
    forward = {"draws": DRAWS, **keys.pop("forward", {})}
    return ForwardProcessObjective(resolve_algorithm({"name": name, "forward": forward, **keys}))  # type: ignore[arg-type]


def outputs(world: DenoisingWorld, experience: Experience) -> dict[tuple[int, int], Tensor]:
    """The transformer's output for every draw of every valid row."""
    segment = forward_segment(experience.trajectory)
    found = {}
    for row in world.valid:
        for t in range(DRAWS):
            clean, sigma, noise = draw(segment, row, t)
            found[row, t] = world.output(segment, row, (1 - sigma) * clean + sigma * noise, sigma)
    return found


def mean_square(difference: Tensor) -> Tensor:
    return (difference**2).mean()


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft(world: DenoisingWorld, beta: float) -> None:
    """c / beta [r ||x0+ - x0||^2 / |x0+ - x0| + (1 - r) ||x0- - x0||^2 / |x0- - x0|] + 1e-2 ||v - v_ref||^2."""
    kl = {"coefficient": 1e-2}
    objective = objective_of("diffusion_nft", loss={"beta": beta, "advantage_limit": 0.8}, kl=kl)
    experience = prepared(objective, world)
    old, reference = (world.under(name, lambda: outputs(world, experience)) for name in ("old", "reference"))
    moved(world, 5, 0.03)
    segment, advantages = forward_segment(experience.trajectory), group_advantages(world, "batch_std", 1e-4)
    assert {abs(a) > 0.8 for a in advantages.values()} == {True, False}

    def expected(rows: list[int]) -> Tensor:
        now, total = outputs(world, experience), torch.zeros(())
        for row in rows:
            good = 0.5 + 0.5 * min(max(advantages[row] / 0.8, -1.0), 1.0)
            for t in range(DRAWS):
                clean, sigma, noise = draw(segment, row, t)
                x = (1 - sigma) * clean + sigma * noise
                plus = x - sigma * (beta * now[row, t] + (1 - beta) * old[row, t])
                minus = x - sigma * ((1 + beta) * old[row, t] - beta * now[row, t])
                for share, estimate in ((good, plus), (1 - good, minus)):
                    deviation = float((estimate - clean).abs().mean().detach())
                    total = total + share * 0.8 / beta * mean_square(estimate - clean) / deviation
                total = total + 1e-2 * mean_square(now[row, t] - reference[row, t])
        return total / (len(rows) * DRAWS)

    assert_same(objective, world, experience, expected)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_nft_at_the_old_policy_has_the_gradient_of_the_advantage_weighted_denoising_loss(
    world: DenoisingWorld, beta: float
) -> None:
    """Whatever beta and c, as long as no advantage is clipped: the stated direction of improvement."""
    keys: dict[str, Any] = {"kl": None, "forward": {"weighting": "clean"}}
    nft = objective_of("diffusion_nft", loss={"beta": beta, "advantage_limit": 9.0, "self_normalised": False}, **keys)
    world.policy.keep("old")
    _, found = accumulated(nft, world, prepared(nft, world), torch.arange(ROWS), ROWS)
    plain = objective_of("awm", loss={"power": None}, advantage={"clip": None}, old=None, **keys)
    _, wanted = accumulated(plain, world, prepared(plain, world), torch.arange(ROWS), ROWS)
    norm = torch.cat([g.flatten() for g in wanted]).norm()
    assert norm > 1e-3
    assert torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)]).norm() <= 1e-4 * norm


@pytest.mark.parametrize(("power", "weighting"), [(None, "uniform"), (None, "clean"), (0.25, "level"), (0.25, "noise")])
def test_awm(world: DenoisingWorld, power: float | None, weighting: str) -> None:
    """A w(t) ||v - (noise - x0)||^2 or its power, + 0.2 ||v - v_old||^2 + 0.1 ||v - v_ref||^2."""
    objective = objective_of(
        "awm",
        loss={"power": power},
        advantage={"clip": 1.0},
        forward={"weighting": weighting},
        old={"pull": 0.2},
        kl={"coefficient": 0.1},
    )
    experience = prepared(objective, world)
    old, reference = (world.under(name, lambda: outputs(world, experience)) for name in ("old", "reference"))
    moved(world, 5, 0.03)
    segment, advantages = forward_segment(experience.trajectory), group_advantages(world, "batch_std", 1e-4, 1.0)
    assert {abs(a) == 1 for a in advantages.values()} == {True, False}
    assert (segment.times == 1).any()  # pure noise, where the weight of `noise` is 0

    def expected(rows: list[int]) -> Tensor:
        now, total = outputs(world, experience), torch.zeros(())
        for row in rows:
            for t in range(DRAWS):
                clean, sigma, noise = draw(segment, row, t)
                error = mean_square(now[row, t] - (noise - clean))
                if power is not None:
                    error = ((error + 1e-10) ** power - 1e-10**power) / power
                weight = {"uniform": 1.0, "level": sigma, "clean": sigma**2, "noise": (1 - sigma) ** 2}[weighting]
                total = total + advantages[row] * weight * error
                total = total + 0.2 * mean_square(now[row, t] - old[row, t])
                total = total + 0.1 * mean_square(now[row, t] - reference[row, t])
        return total / (len(rows) * DRAWS)

    assert_same(objective, world, experience, expected)


def test_awm_with_a_clip_is_ppo_of_the_errors(world: DenoisingWorld) -> None:
    """max(-A r, -A clip(r)), r = exp(w e_before - w e_now), the errors those of the iteration's start and of now."""
    objective = objective_of(
        "awm", loss={"power": None, "clip": 0.02}, forward={"weighting": "clean"}, old=None, kl=None
    )
    experience = prepared(objective, world)
    segment, advantages = forward_segment(experience.trajectory), group_advantages(world, "batch_std", 1e-4, 5.0)

    def errors() -> dict[tuple[int, int], Tensor]:
        found = {}
        for (row, t), output in outputs(world, experience).items():
            clean, sigma, noise = draw(segment, row, t)
            found[row, t] = sigma**2 * mean_square(output - (noise - clean))
        return found

    before = world.under("current", errors)
    moved(world, 5, 0.03)
    ratios = [float((before[at] - now).exp()) for at, now in world.under("current", errors).items()]
    assert {abs(ratio - 1) > 0.02 for ratio in ratios} == {True, False}

    def expected(rows: list[int]) -> Tensor:
        now, terms = errors(), []
        for row in rows:
            for t in range(DRAWS):
                ratio = (before[row, t] - now[row, t]).exp()
                bounded = min(max(ratio, torch.tensor(0.98)), torch.tensor(1.02))
                terms.append(max(-advantages[row] * ratio, -advantages[row] * bounded))
        return sum(terms, torch.zeros(())) / len(terms)

    assert_same(objective, world, experience, expected)


def test_awm_with_advantages_of_one_is_supervised_fine_tuning(world: DenoisingWorld) -> None:
    """On the policy's own samples, with the same times, noise and weighting."""
    world.rewards.total = world.rewards.total.abs()  # samples without a positive label are not imitated
    forward = ForwardProcessSettings(draws=DRAWS, weighting="level")
    awm = objective_of("awm", loss={"power": None}, old=None, kl=None, forward=forward.model_dump())
    experience = prepared(awm, world)
    experience.segments[0].advantages = torch.ones(ROWS, DRAWS)
    sft = SupervisedObjective(resolve_algorithm({"name": "sft", "forward": forward.model_dump()}))  # type: ignore[arg-type]
    loss, found = accumulated(awm, world, experience, torch.arange(ROWS), 4)
    sft_loss, wanted = accumulated(sft, world, prepared(sft, world), torch.arange(ROWS), 4)
    assert loss == pytest.approx(sft_loss, rel=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(found, wanted, strict=True))


def test_the_old_policy_follows_by_the_schedule(world: DenoisingWorld) -> None:
    """old <- d old + (1 - d) current after each iteration, d = min(limit, slope (steps - delay))."""
    old = {"delay": 9, "slope": 1 / 15, "limit": 0.5}
    objective = objective_of("diffusion_nft", old=old, minibatches=3, epochs=2)
    objective.start(world.policy)
    experience = prepared(objective, world)
    kept = [parameter.detach().clone() for parameter in world.parameters]
    for iteration, decay in enumerate([0.0, 0.2, 0.5, 0.5]):  # after 6, 12, 18 and 24 optimizer steps
        moved(world, 10 + iteration, 0.1)
        metrics = Metrics()
        objective.finish_iteration(world.policy, experience, iteration, TorchEngine("cpu"), metrics)
        assert metrics.reduce()["policy/old_decay"] == pytest.approx(decay)
        kept = [decay * a + (1 - decay) * b.detach() for a, b in zip(kept, world.parameters, strict=True)]
        found = world.under("old", lambda: [parameter.clone() for parameter in world.parameters])
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, kept, strict=True))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"slope": 0.001, "limit": 0.5}, {0: 0.0, 1: 0.001, 100: 0.1, 9999: 0.5}),
        ({"delay": 75, "slope": 0.0075, "limit": 0.999}, {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 9999: 0.999}),
    ],
)
def test_the_schedules_of_the_authors(settings: dict[str, Any], wanted: dict[int, float]) -> None:
    for steps, decay in wanted.items():
        assert OldPolicySettings(**settings).decay(steps) == pytest.approx(decay)


def test_nft_samples_with_the_old_policy_and_awm_with_the_current_one() -> None:
    assert objective_of("diffusion_nft").rollout_weights == "old"
    assert objective_of("awm").rollout_weights == "current"


def test_a_failed_reward_and_equal_rewards_teach_nothing(world: DenoisingWorld) -> None:
    """NFT: r = 1/2 has no gradient at the old policy; AWM: an advantage of 0 has none anywhere."""
    world.rewards.total = torch.where(world.rewards.valid, 0.7, math.nan)
    for objective in (
        objective_of("diffusion_nft", kl=None, loss={"self_normalised": False}),
        objective_of("awm", kl=None, old=None),
    ):
        world.policy.keep("old")
        _, gradient = accumulated(objective, world, prepared(objective, world), torch.arange(ROWS), 4)
        assert max(float(g.abs().max()) for g in gradient) <= 1e-6


@pytest.mark.parametrize(
    ("block", "fragment"),
    [
        ({"name": "diffusion_nft", "old": None}, "add an `old` block"),
        ({"name": "awm", "old": {"pull": 0.0}}, "no use for an old policy"),
        ({"name": "awm", "kl": {"estimator": "gaussian"}}, "Use prediction_mse"),
        ({"name": "awm", "minibatches": 2}, "loss.clip: null with epochs x minibatches = 2"),
        ({"name": "awm", "epochs": 2}, "loss.clip: null with epochs x minibatches = 2"),
        ({"name": "diffusion_nft", "advantage": {"type": "gae"}}, "a whole sample is learned from"),
        ({"name": "awm", "loss": {"clip": None}, "epochs": 2}, "epochs x minibatches = 2: without a ratio"),
        ({"name": "awm", "loss": {"clip": None}, "epochs": 2, "minibatches": 2}, "epochs x minibatches = 4: without"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(block: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        resolve_algorithm(block)


def test_several_updates_per_rollout_with_a_ratio_or_an_old_policy_are_not_refused() -> None:
    assert resolve_algorithm({"name": "awm", "minibatches": 2, "loss": {"clip": 1.0}}).minibatches == 2
    assert resolve_algorithm({"name": "diffusion_nft", "epochs": 2}).epochs == 2


def test_tokens_are_refused() -> None:
    with pytest.raises(UserError, match="trains denoising, but this policy makes tokens"):
        resolve_algorithm("awm").check(4, "token", "tokens")
    resolve_algorithm("awm").check(4, "element_mean", "denoising")


def test_a_perfect_denoiser_costs_nothing_and_no_division_by_zero() -> None:
    target = torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0))
    prediction, ones = target.clone().requires_grad_(), torch.ones(1, 2)
    loss = NegativeAware().terms(MatchingInputs(prediction, target, -0 * ones, ones, ones, old_prediction=target)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), prediction)
    assert torch.equal(loss, torch.zeros(1, 2)) and torch.equal(gradient, torch.zeros(1, 2, 3))
