"""SFT, DPO, IPO, KTO and Diffusion-DPO against the same formulas on plain transformers and diffusers models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_helpers import image_policy, perturb, requests
from diffusers import DDPMScheduler
from direct_world import (
    PROMPTS,
    RESPONSES,
    flat,
    given_images,
    given_texts,
    loss_and_gradient,
    scored,
    text_policy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tiny_models_diffusion import tiny_stable_diffusion
from torch import Tensor

from modalities.base import ForwardSegment, Policy, Trajectory
from modalities.randomness import seeded_generator
from modalities.text import TextPolicy
from rewards.combine import RewardResult, RewardSet
from rewards.image import MeanColourConfig
from uniml_rl.algorithms.direct_settings import EarlyClean, LastSteps, PreferenceSettings, RandomLastSteps
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import build_objective
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.preference import best_and_worst

BUDGETS = (1, 3, 100)


def assert_same(
    algorithm: dict[str, Any],
    policy: Policy,
    data: tuple[Trajectory, RewardResult],
    expected: Callable[[], Tensor],
) -> dict[str, float]:
    """However the rows are cut, loss and gradient are those of `expected()` by autograd; returns the metrics."""
    loss = expected()
    wanted = flat(torch.autograd.grad(loss, list(policy.weight_sets.parameters().values()), materialize_grads=True))
    assert wanted.abs().max() > 1e-4
    metrics: dict[str, float] = {}
    for budget in BUDGETS:
        objective = build_objective(resolve_algorithm(algorithm), None, None)
        found_loss, found, logged = loss_and_gradient(objective, policy, *data, budget)
        metrics = logged.reduce(TorchEngine("cpu"))
        assert found_loss == pytest.approx(loss.item(), rel=1e-5)
        assert (found - wanted).norm() <= 5e-5 * wanted.norm()
    return metrics


# -- texts: every sequence alone, unpadded, through the plain transformers model -----------------------------------


def log_likelihood(model: torch.nn.Module, policy: TextPolicy, prompt: str, response: str) -> tuple[Tensor, int]:
    """Sum of the log-probs of the response and its end token, and how many they are."""
    asked = policy.tokenizer(prompt).input_ids
    answer = [*policy.tokenizer(response, add_special_tokens=False).input_ids, policy.tokenizer.eos_token_id]
    tokens = torch.tensor([asked + answer])
    logits = model(input_ids=tokens).logits[0]
    distribution = torch.distributions.Categorical(logits=logits[len(asked) - 1 : -1])
    return distribution.log_prob(torch.tensor(answer)).sum(), len(answer)


class Plain:
    """The policy's model and its reference as plain models."""

    def __init__(self, policy: TextPolicy) -> None:
        self.policy = policy
        self.model = policy.model.causal_lm
        with policy.using("reference"):
            self.reference = copy.deepcopy(self.model)

    def ratio(self, prompt: str, response: str) -> tuple[Tensor, int]:
        now, count = log_likelihood(self.model, self.policy, prompt, response)
        with torch.no_grad():
            then, _ = log_likelihood(self.reference, self.policy, prompt, response)
        return now - then, count


def test_sft_is_the_cross_entropy_of_transformers(tmp_path: Path) -> None:
    """Of the samples labelled as good; one of them is empty, and only its end is learned."""
    policy = text_policy(tmp_path)
    labels = [1.0, 1.0, 0.0, 1.0, math.nan, 1.0, 1.0, 0.0]
    data = given_texts(policy, labels)

    def expected() -> Tensor:
        losses, count = [], 0
        for row, label in enumerate(labels):
            if label == 1.0:
                asked = policy.tokenizer(PROMPTS[row // 2]).input_ids
                response = RESPONSES[row // 2][row % 2]
                answer = [*policy.tokenizer(response, add_special_tokens=False).input_ids, 0]
                tokens = torch.tensor([asked + answer])
                targets = torch.tensor([[-100] * len(asked) + answer])
                losses += [policy.model.causal_lm(input_ids=tokens, labels=targets).loss * len(answer)]
                count += len(response.split()) + 1
        return torch.stack(losses).sum() / count

    metrics = assert_same({"name": "sft"}, policy, data, expected)
    assert metrics["supervised/log_prob"] == pytest.approx(-expected().item(), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(tmp_path: Path, smoothing: float) -> None:
    """One pair is given the other way round, one has a failed reward and teaches nothing, one has an empty response."""
    policy = text_policy(tmp_path)
    plain = Plain(policy)
    data = given_texts(policy, [1.0, 0.0, 0.0, 1.0, 1.0, math.nan, 1.0, 0.0])
    pairs = [("a", "a b", "c"), ("b c d", "a", "d e f g"), ("g", "", "k")]

    def margins() -> Tensor:
        return torch.stack([plain.ratio(prompt, good)[0] - plain.ratio(prompt, bad)[0] for prompt, good, bad in pairs])

    def expected() -> Tensor:
        right = margins().mul(0.3).sigmoid()
        return -((1 - smoothing) * right.log() + smoothing * (1 - right).log()).mean()

    block = {"name": "dpo", "loss": {"beta": 0.3, "label_smoothing": smoothing}}
    metrics = assert_same(block, policy, data, expected)
    assert metrics["preference/margin"] == pytest.approx(margins().mean().item(), rel=1e-4)
    assert metrics["preference/accuracy"] == pytest.approx((margins() > 0).float().mean().item())


@pytest.mark.parametrize("per_decision", [False, True])
def test_ipo(tmp_path: Path, per_decision: bool) -> None:
    policy = text_policy(tmp_path)
    plain = Plain(policy)
    data = given_texts(policy, [1.0, 0.0, 0.0, 1.0, 0.5, 0.25])
    pairs = [("a", "a b", "c"), ("b c d", "a", "d e f g"), ("e f", "b", "h i j")]

    def size(prompt: str, response: str) -> Tensor:
        ratio, count = plain.ratio(prompt, response)
        return ratio / count if per_decision else ratio

    def expected() -> Tensor:
        margins = torch.stack([size(prompt, good) - size(prompt, bad) for prompt, good, bad in pairs])
        return (margins - 1 / (2 * 0.5)).square().mean()

    block = {"name": "ipo", "loss": {"beta": 0.5, "per_decision": per_decision}}
    assert_same(block, policy, data, expected)


def test_a_sample_without_a_decision_leaves_the_gradient_of_the_others_finite(tmp_path: Path) -> None:
    """IPO's division by the number of decisions is no division by 0."""
    policy = text_policy(tmp_path)
    trajectory, result = given_texts(policy, [1.0, 0.0, 0.0, 1.0, 0.5, 0.25])
    trajectory.segments[0].trained_mask[0] = False
    block = {"name": "ipo", "loss": {"per_decision": True}}
    objective = build_objective(resolve_algorithm(block), None, None)
    loss, gradient, found = loss_and_gradient(objective, policy, trajectory, result, 100)
    assert math.isfinite(loss) and gradient.isfinite().all() and gradient.abs().max() > 0
    assert not any(name.startswith("nonfinite/") for name in found.reduce())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("prompts", [3, 4])
def test_kto(tmp_path: Path, prompts: int, sign: int) -> None:
    """With its drift under exchanged prompts (two and two; an odd one out takes that of the one before it), which is 0
    if it would be negative: here the policy has been made likelier, or less likely, than its reference."""
    policy = text_policy(tmp_path)
    policy.keep("reference")
    parameters = list(policy.weight_sets.parameters().values())
    total = torch.stack([log_likelihood(policy.model.causal_lm, policy, "a", r[0])[0] for r in RESPONSES]).sum()
    for parameter, gradient in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
        parameter.data += sign * 0.01 * gradient
    plain = Plain(policy)
    labels = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0][: 2 * prompts]
    data = given_texts(policy, labels)
    rows = [(prompt, response) for prompt in range(prompts) for response in RESPONSES[prompt]]
    partner = {3: [1, 0, 1], 4: [1, 0, 3, 2]}[prompts]
    with torch.no_grad():
        others = [plain.ratio(PROMPTS[partner[prompt]], response)[0].item() for prompt, response in rows]
    drift = max(0.0, sum(others) / len(others))
    assert (drift > 0) == (sign > 0)

    def expected() -> Tensor:
        losses = []
        for (prompt, response), label in zip(rows, labels, strict=True):
            distance = 0.7 * (plain.ratio(PROMPTS[prompt], response)[0] - drift)
            losses += [2.0 * (1 - distance.sigmoid()) if label else 0.5 * (1 - (-distance).sigmoid())]
        return torch.stack(losses).mean()

    block = {"name": "kto", "beta": 0.7, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    metrics = assert_same(block, policy, data, expected)
    assert metrics["kto/drift"] == pytest.approx(drift, rel=1e-4)
    assert metrics["kto/desirable_share"] == pytest.approx(sum(labels) / len(labels))


def test_kto_of_rollouts_compares_a_sample_with_its_prompts_mean(tmp_path: Path) -> None:
    """Where all samples of a prompt are as good, none is desirable and none undesirable."""
    policy = text_policy(tmp_path)
    objective = build_objective(resolve_algorithm({"name": "kto", "desirable_above": "group_mean"}), None, None)
    trajectory, result = given_texts(policy, [3.0, 2.0, -5.0, -4.0, 7.0, 7.0, 1.0, math.nan])
    cuts = objective.plan(policy, trajectory, torch.arange(8), 8)
    experience = objective.prepare(policy, trajectory, result, cuts, TorchEngine("cpu"), Metrics())
    assert experience.segments[0].advantages.flatten().tolist()[:4] == [1, -1, -1, 1]
    assert experience.segments[0].mask.any(1).tolist() == [True] * 4 + [False] * 4


# -- images: every latent and every draw alone, through the plain diffusers model ----------------------------------


def test_diffusion_dpo(tmp_path: Path) -> None:
    """Per draw -log sigmoid(beta (model's advantage of the chosen image over the reference's)), epsilon prediction."""
    policy = image_policy(tiny_stable_diffusion(tmp_path / "sd"), {"guidance_scale": 1.0})
    policy.keep("reference")
    perturb(policy, 0.02)
    data = given_images(policy, [1.0, 0.0, 0.0, 1.0])
    block = {"name": "diffusion_dpo", "loss": {"beta": 20.0}, "forward": {"draws": 2}}
    objective = build_objective(resolve_algorithm(block), None, None)
    segment = objective.as_trained(policy, *data)[0].segments[0]
    assert isinstance(segment, ForwardSegment)
    model = policy.denoiser
    with policy.using("reference"):
        reference = copy.deepcopy(model)
    schedule = DDPMScheduler.from_config(policy.pipeline.scheduler.config)

    def error(unet: torch.nn.Module, row: int, draw: int) -> Tensor:
        seed = int(segment.noise_seed[row])
        noise = torch.randn(segment.clean[row].shape, generator=seeded_generator(seed, draw))
        time = segment.times[row, draw].long()
        noised = schedule.add_noise(segment.clean[row].float(), noise, time[None])
        text = segment.conditions["prompt_embeds"][segment.condition_index[row]]
        output = unet(noised[None], time[None], encoder_hidden_states=text[None]).sample[0]
        return (output - noise).square().mean()

    def expected() -> Tensor:
        losses = []
        for good, bad in ((0, 1), (2, 3)):  # in the trained trajectory the better one of a pair comes first
            for draw in range(2):
                assert segment.times[good, draw] == segment.times[bad, draw]
                margin = -(error(model, good, draw) - error(model, bad, draw))
                with torch.no_grad():
                    baseline = error(reference, good, draw) - error(reference, bad, draw)
                margin = margin + baseline
                losses.append(-torch.nn.functional.logsigmoid(20.0 * margin))
        return torch.stack(losses).mean()

    assert_same(block, policy, data, expected)


@pytest.mark.parametrize("name", ["dpo", "diffusion_dpo", "ipo"])
def test_a_changed_number_of_draws_keeps_them_shared_within_the_pair(name: str) -> None:
    resolved = resolve_algorithm({"name": name, "forward": {"draws": 2}})
    assert isinstance(resolved, PreferenceSettings)
    assert (resolved.forward.draws, resolved.forward.shared_in_group) == (2, True)


def test_the_preset_of_diffusion_dpo_is_the_authors_beta_of_5000() -> None:
    """Their code multiplies the differences of the mean squared errors by -0.5 * 5000."""
    errors = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) * 1e-3
    chosen, rejected, chosen_reference, rejected_reference = errors
    wanted = torch.nn.functional.softplus(2500 * (chosen - rejected - (chosen_reference - rejected_reference)))
    resolved = resolve_algorithm("diffusion_dpo")
    assert isinstance(resolved, PreferenceSettings)
    ratio_chosen, ratio_rejected = chosen_reference - chosen, rejected_reference - rejected  # log-probs are -errors
    torch.testing.assert_close(resolved.loss.terms(ratio_chosen - ratio_rejected), wanted)


# -- the reward's own gradient ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "counts"),
    [
        ({"name": "draft", "gradient": {"count": 2}}, {2}),
        ({"name": "draft", "gradient": {"count": 9}}, {4}),
        ({"name": "alignprop"}, {1, 2, 3, 4}),
        ({"name": "refl", "gradient": {"first": 0.5}}, {1, 2}),
    ],
)
def test_a_rewards_gradient_is_that_of_the_decoded_samples(
    tmp_path: Path, block: dict[str, Any], counts: set[int]
) -> None:
    """Through one of the allowed numbers of steps, the mean over samples whose reward is valid."""
    policy = image_policy(tiny_stable_diffusion(tmp_path / "sd"), {"guidance_scale": 1.0})
    perturb(policy, 0.02)
    rows, target = requests(4), torch.tensor([1.0, 0.0, 0.0])
    rewards = RewardSet.build({"red": MeanColourConfig(target=(1.0, 0.0, 0.0))}, "cpu")
    objective = build_objective(resolve_algorithm(block), None, rewards)
    trajectory = policy.rollout(rows)
    loss, found, _ = loss_and_gradient(objective, policy, trajectory, scored([1.0, math.nan, 0.0, 0.0]), 3)
    parameters = list(policy.weight_sets.parameters().values())
    fitting = set()
    for count in range(1, trajectory.segments[0].num_steps + 1):
        samples = policy.decode(
            policy.rollout_with_gradient([rows[0], *rows[2:]], count, early_clean=block["name"] == "refl"),
            differentiable=True,
        )
        distances = [(sample.unit().mean((1, 2)) - target).square().mean().sqrt() for sample in samples]
        expected = torch.stack(distances).mean()
        gradient = flat(torch.autograd.grad(expected, parameters, materialize_grads=True))
        if loss == pytest.approx(expected.item(), rel=1e-4) and (found - gradient).norm() < 1e-3 * gradient.norm():
            fitting.add(count)
    assert len(fitting) == 1
    assert fitting <= counts


@pytest.mark.parametrize(
    ("settings", "steps", "wanted"),
    [
        (EarlyClean(), 40, range(30, 40)),  # the authors' randint(30, 39)
        (EarlyClean(first=0.9), 4, range(3, 4)),
        (RandomLastSteps(), 50, range(50)),
        (LastSteps(count=3), 50, range(47, 48)),
    ],
)
def test_the_first_step_with_a_gradient_is_drawn_uniformly(settings: Any, steps: int, wanted: range) -> None:
    generator = torch.Generator().manual_seed(0)
    firsts = [steps - settings.draw(steps, generator) for _ in range(3000)]
    counts = [firsts.count(step) for step in wanted]
    assert sum(counts) == len(firsts)
    assert len(wanted) == 1 or stats.chisquare(counts).pvalue > 1e-3


def test_steps_are_drawn_once_per_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = image_policy(tiny_stable_diffusion(tmp_path / "sd"), {"guidance_scale": 1.0})
    rewards = RewardSet.build({"red": MeanColourConfig(target=(1.0, 0.0, 0.0))}, "cpu")
    objective = build_objective(resolve_algorithm("alignprop"), None, rewards)
    trajectory, result = policy.rollout(requests(4)), scored([1.0] * 4)
    monkeypatch.setattr(policy, "decode", lambda trajectory, differentiable: [])
    monkeypatch.setattr(rewards, "score_with_gradient", lambda *_: (torch.zeros(2), torch.ones(2, dtype=torch.bool)))
    seen: dict[int, set[int]] = {}
    for iteration in range(12):
        counts = seen.setdefault(iteration, set())
        monkeypatch.setattr(policy, "rollout_with_gradient", lambda _, count, early_clean, to=counts: to.add(count))
        keyed = [replace(each, key=replace(each.key, iteration=iteration)) for each in trajectory.requests]
        again, roots, engine = replace(trajectory, requests=keyed), torch.arange(4), TorchEngine("cpu")
        experience = objective.prepare(policy, again, result, [], engine, Metrics())
        minibatch = objective.minibatch(experience, roots, engine)
        for cut in objective.plan(policy, again, roots, 2):
            objective.loss(policy, minibatch, cut, iteration, Metrics())
    assert all(len(counts) == 1 for counts in seen.values())
    assert len(set.union(*seen.values())) > 1


# -- pairs -----------------------------------------------------------------------------------------------------------

REWARDS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 2.5, -3.0, math.nan])), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(REWARDS)
def test_a_pair_is_a_prompts_best_and_worst_valid_sample(rows: list[tuple[int, float]]) -> None:
    groups, rewards = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = best_and_worst(rewards, rewards.isfinite(), groups).tolist()
    pairs = list(zip(found[::2], found[1::2], strict=True))
    expected = {}
    for group, _ in rows:
        known = [reward for other, reward in rows if other == group and math.isfinite(reward)]
        if known and max(known) > min(known):
            expected[group] = (max(known), min(known))
    assert {int(groups[best]): (float(rewards[best]), float(rewards[worst])) for best, worst in pairs} == expected
    assert all(groups[best] == groups[worst] for best, worst in pairs)
