"""SFT, DPO, IPO, KTO and Diffusion-DPO against the same formulas on plain transformers and diffusers models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from denoising_helpers import image_policy, perturb
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models_diffusion import tiny_stable_diffusion
from tiny_models_text import tiny_gpt2
from torch import Tensor

from modalities.base import ForwardSegment, Policy, Trajectory
from modalities.randomness import SampleKey, seeded_generator
from modalities.samples import Image, Prompt, Text
from modalities.text import TextPolicy, TextPolicyConfig
from rewards.combine import RewardResult
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import build_objective
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective
from uniml_rl.objectives.preference import best_and_worst

PROMPTS = ["a", "b c d", "e f"]
RESPONSES = [["a b", "c"], ["d e f g", "a"], ["b", "h i j"]]
BUDGETS = (1, 3, 100)


def text_policy(folder: Path) -> TextPolicy:
    policy = TextPolicyConfig.model_validate({"model": str(tiny_gpt2(folder / "gpt2"))}).build("writer", "cpu", 0)
    policy.keep("reference")
    moved(policy, 0.1)
    return policy


def moved(policy: Policy, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def given_texts(policy: Policy, labels: list[float]) -> tuple[Trajectory, RewardResult]:
    """Two responses to each prompt, as a group; a label of NaN is a failed reward."""
    rows = [(prompt, number) for prompt in range(3) for number in range(2)]
    trajectory = policy.encode(
        [Prompt(PROMPTS[prompt], prompt) for prompt, _ in rows],
        [Text(RESPONSES[prompt][number], 0, True) for prompt, number in rows],
        [SampleKey(0, 0, 0, prompt, number) for prompt, number in rows],
    )
    return trajectory, scored(labels)


def scored(labels: list[float]) -> RewardResult:
    total = torch.tensor(labels)
    return RewardResult(total, total.isfinite(), {}, {}, {}, {})


def loss_and_gradient(
    objective: Objective, policy: Policy, trajectory: Trajectory, result: RewardResult, budget: int
) -> tuple[float, Tensor, dict[str, float]]:
    """Of one optimizer step over everything, cut into micro-batches of `budget` rows."""
    engine, metrics = TorchEngine("cpu"), Metrics()
    trajectory, result = objective.as_trained(policy, trajectory, result)
    roots = torch.arange(trajectory.segments[0].num_rows)
    cuts = objective.plan(policy, trajectory, roots, budget)
    experience = objective.prepare(policy, trajectory, result, cuts, engine, metrics)
    minibatch = objective.minibatch(experience, roots, engine)
    parameters = list(policy.weight_sets.parameters().values())
    total, gradient = 0.0, torch.zeros(sum(p.numel() for p in parameters))
    for cut in cuts:
        loss = objective.loss(policy, minibatch, cut, 0, metrics)
        total += loss.item()
        gradient += flat(torch.autograd.grad(loss, parameters, materialize_grads=True))
    return total, gradient, metrics.reduce(engine)


def flat(gradients: Any) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


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
        objective.check_policy(policy)
        found_loss, found, metrics = loss_and_gradient(objective, policy, *data, budget)
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
    policy = text_policy(tmp_path)
    data = given_texts(policy, [1.0] * 6)

    def expected() -> Tensor:
        losses = []
        for prompt, responses in zip(PROMPTS, RESPONSES, strict=True):
            for response in responses:
                asked = policy.tokenizer(prompt).input_ids
                answer = [*policy.tokenizer(response, add_special_tokens=False).input_ids, 0]
                tokens = torch.tensor([asked + answer])
                labels = torch.tensor([[-100] * len(asked) + answer])
                loss = policy.model.causal_lm(input_ids=tokens, labels=labels).loss
                losses += [loss * len(answer)]
        return torch.stack(losses).sum() / sum(len(r.split()) + 1 for pair in RESPONSES for r in pair)

    metrics = assert_same({"name": "sft"}, policy, data, expected)
    assert metrics["supervised/log_prob"] == pytest.approx(-expected().item(), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_dpo(tmp_path: Path, smoothing: float) -> None:
    """One pair is given the other way round, and one has a failed reward and teaches nothing."""
    policy = text_policy(tmp_path)
    plain = Plain(policy)
    data = given_texts(policy, [1.0, 0.0, 0.0, 1.0, 1.0, math.nan])

    def expected() -> Tensor:
        first = plain.ratio("a", "a b")[0] - plain.ratio("a", "c")[0]
        second = plain.ratio("b c d", "a")[0] - plain.ratio("b c d", "d e f g")[0]
        right = torch.stack([first, second]).mul(0.3).sigmoid()
        return -((1 - smoothing) * right.log() + smoothing * (1 - right).log()).mean()

    block = {"name": "dpo", "loss": {"beta": 0.3, "label_smoothing": smoothing}}
    metrics = assert_same(block, policy, data, expected)
    margins = [
        (plain.ratio("a", "a b")[0] - plain.ratio("a", "c")[0]).item(),
        (plain.ratio("b c d", "a")[0] - plain.ratio("b c d", "d e f g")[0]).item(),
    ]
    assert metrics["preference/margin"] == pytest.approx(sum(margins) / 2, rel=1e-4)
    assert metrics["preference/accuracy"] == sum(margin > 0 for margin in margins) / 2


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


@pytest.mark.parametrize("exchanged", [True, False])
def test_kto(tmp_path: Path, exchanged: bool) -> None:
    """With its drift, which is 0 if it would be negative (the weights of policy and reference change places)."""
    policy = text_policy(tmp_path)
    if exchanged:
        state = policy.weight_state()
        swap = {"current": "reference", "reference": "current"}
        policy.load_weight_state({f"{swap[k.split('/', 1)[0]]}/{k.split('/', 1)[1]}": v for k, v in state.items()})
    plain = Plain(policy)
    labels = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    data = given_texts(policy, labels)
    rows = [(prompt, response) for prompt, pair in zip(PROMPTS, RESPONSES, strict=True) for response in pair]
    with torch.no_grad():
        others = [plain.ratio(rows[row - 1][0], rows[row][1])[0].item() for row in range(6)]
    drift = max(0.0, sum(others) / 6)

    def expected() -> Tensor:
        losses = []
        for (prompt, response), label in zip(rows, labels, strict=True):
            distance = 0.7 * (plain.ratio(prompt, response)[0] - drift)
            losses += [2.0 * (1 - distance.sigmoid()) if label else 0.5 * (1 - (-distance).sigmoid())]
        return torch.stack(losses).mean()

    block = {"name": "kto", "beta": 0.7, "desirable_weight": 2.0, "undesirable_weight": 0.5}
    metrics = assert_same(block, policy, data, expected)
    assert metrics["kto/drift"] == pytest.approx(drift, rel=1e-4)
    assert metrics["kto/desirable_share"] == pytest.approx(2 / 6)


def test_kto_of_rollouts_compares_a_sample_with_its_prompts_mean(tmp_path: Path) -> None:
    policy = text_policy(tmp_path)
    objective = build_objective(resolve_algorithm({"name": "kto", "desirable_above": "group_mean"}), None, None)
    trajectory, result = given_texts(policy, [3.0, 2.0, -5.0, -4.0, 7.0, 7.0])
    cuts = objective.plan(policy, trajectory, torch.arange(6), 6)
    experience = objective.prepare(policy, trajectory, result, cuts, TorchEngine("cpu"), Metrics())
    assert experience.segments[0].advantages.flatten().tolist() == [1, -1, -1, 1, -1, -1]


# -- images: every latent and every draw alone, through the plain diffusers model ----------------------------------


def given_images(policy: Policy, labels: list[float]) -> tuple[Trajectory, RewardResult]:
    generator = torch.Generator().manual_seed(4)
    rows = [(prompt, number) for prompt in range(2) for number in range(2)]
    trajectory = policy.encode(
        [Prompt(PROMPTS[prompt], prompt) for prompt, _ in rows],
        [Image(torch.randint(0, 256, (3, 16, 16), generator=generator, dtype=torch.uint8)) for _ in rows],
        [SampleKey(0, 0, 0, prompt, number) for prompt, number in rows],
    )
    return trajectory, scored(labels)


def test_diffusion_dpo(tmp_path: Path) -> None:
    """Per draw -log sigmoid(beta (model's advantage of the chosen image over the reference's)), epsilon prediction."""
    policy = image_policy(tiny_stable_diffusion(tmp_path / "sd"), {"guidance_scale": 1.0})
    policy.keep("reference")
    perturb(policy, 0.02)
    data = given_images(policy, [1.0, 0.0, 0.0, 1.0])
    block = {"name": "diffusion_dpo", "loss": {"beta": 20.0}, "forward": {"draws": 2, "shared_in_group": True}}
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
