"""Losses and gradients against TRL's own trainers, at given log-probs, masks, advantages and references.

The trainers are made without `__init__`, and their `_compute_loss` is called with a "model" that gives the log-probs.
Ours are the real objectives of the presets, with a policy that does the same. The log-probs are the parameters, so that
every entry of the gradient is compared.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from direct_world import loss_and_gradient, scored
from torch import Tensor, nn

from modalities.base import Cut, Policy, Replay, Request, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.weights import WeightSets
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import build_objective
from uniml_rl.experience import SegmentExperience
from uniml_rl.objectives.credit import CreditAssignment

logging.getLogger("trl").setLevel(logging.ERROR)

PROMPTS, SIZE, LENGTH, LONGEST = 3, 2, 5, 7
ROWS = PROMPTS * SIZE
PROMPT_OF_ROW = torch.arange(PROMPTS).repeat_interleave(SIZE)
MASK = torch.arange(LENGTH) < torch.tensor([5, 3, 1, 4, 2, 5])[:, None]
ADVANTAGES = torch.tensor([1.3, -0.7, 0.4, -2.0, 0.0, 1.0])
LABELS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])


def random(*shape: int, seed: int, scale: float) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OLD = -1 + random(PROMPTS, ROWS, LENGTH, seed=0, scale=0.3)
"""[P, B, T]: the log-prob of each decision of each sample under each prompt; OLD[p, b] is its own where p is b's."""
NOW = OLD + random(PROMPTS, ROWS, LENGTH, seed=1, scale=0.4)
REFERENCE = OLD + random(PROMPTS, ROWS, LENGTH, seed=2, scale=0.3)


def own(table: Tensor, prompts: Tensor = PROMPT_OF_ROW) -> Tensor:
    """[B, T] of samples under the prompts [B]."""
    return table[prompts, torch.arange(ROWS)]


class Given(Policy):
    """A policy whose log-probs are its parameters: tokens and prompt tokens are the numbers of sample and prompt."""

    name, sample_kind, offers = "given", "text", frozenset({"log_prob"})

    def __init__(self) -> None:
        self.table = nn.ParameterList([nn.Parameter(REFERENCE.clone())])
        self.weight_sets = WeightSets(self.trainable_modules())
        self.keep("reference")
        self.table[0].data.copy_(NOW)

    def decisions(self) -> Any:
        return [("tokens", "token")]

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"table": self.table}

    def replay(self, trajectory: Trajectory, cut: Cut, needs: Any) -> Replay:
        segment = trajectory.segments[0]
        assert isinstance(segment, TokenSegment)
        prompts = segment.prompt_tokens[segment.prompt_index[cut.rows], 0]
        return Replay(log_prob=self.table[0][prompts, segment.tokens[cut.rows, 0]][:, cut.steps])

    def rollout(self, requests: Any, sampling: Any = None) -> Trajectory:
        raise NotImplementedError

    def decode(self, trajectory: Any, differentiable: bool = False) -> Any:
        raise NotImplementedError

    def export(self, folder: Any) -> None:
        raise NotImplementedError


def trajectory(mask: Tensor) -> Trajectory:
    keys = [SampleKey(0, 0, 0, int(prompt), row % SIZE) for row, prompt in enumerate(PROMPT_OF_ROW)]
    segment = TokenSegment(
        agent="given",
        group=PROMPT_OF_ROW,
        rollout_log_probs=own(OLD),
        trained_mask=mask,
        length_mask=mask,
        context_mask=torch.zeros_like(mask),
        log_prob_unit="token",
        version=0,
        ended=["eos"] * ROWS,
        keys=keys,
        tokens=torch.arange(ROWS).unsqueeze(1).expand(-1, LENGTH),
        prompt_tokens=torch.arange(PROMPTS).unsqueeze(1),
        prompt_mask=torch.ones(PROMPTS, 1, dtype=torch.bool),
        prompt_index=PROMPT_OF_ROW,
    )
    return Trajectory([segment], [Request(Prompt("p", key.prompt), key.prompt, key) for key in keys])


def ours(algorithm: dict[str, Any], rewards: Tensor, mask: Tensor = MASK) -> tuple[float, Tensor]:
    """Loss and gradient [P, B, T] of one optimizer step, in micro-batches of two rows."""
    policy = Given()
    objective = build_objective(resolve_algorithm(algorithm), None, None)
    loss, gradient, _ = loss_and_gradient(objective, policy, trajectory(mask), scored(rewards.tolist()), 2)
    return loss, gradient.view_as(NOW)


def assert_same(found: tuple[float, Tensor], loss: Tensor, parameters: Tensor) -> None:
    (wanted,) = torch.autograd.grad(loss, [parameters])
    assert wanted.abs().max() > 1e-3
    assert found[0] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(found[1], wanted, rtol=1e-5, atol=1e-7)


def trainer_of(trainer_class: type, **attributes: Any) -> Any:
    """TRL's trainer with no more than what `_compute_loss` reads."""
    trainer = object.__new__(trainer_class)
    same = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        sync_gradients=True,
        gather=lambda value: value,
        gather_for_metrics=lambda value: value,
        reduce=lambda value, reduction: value,
    )
    defaults = {
        "model": nn.Linear(1, 1).train(),
        "accelerator": same,
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(trainer).update(defaults | attributes)
    return trainer


# -- GRPO and its relatives ------------------------------------------------------------------------------------------


def trl_grpo(parameters: Tensor, mask: Tensor = MASK, delta: float | None = None, **attributes: Any) -> Tensor:
    from trl.trainer.grpo_trainer import GRPOTrainer

    defaults = {
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": LONGEST,
        "_entropy_bonus_enabled": False,
        "args": SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
    }
    trainer = trainer_of(GRPOTrainer, **defaults | attributes)
    log_probs = own(parameters)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros(ROWS, LENGTH), None)
    empty = torch.zeros(ROWS, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": own(OLD),
        "ref_per_token_logps": own(REFERENCE),
        "num_items_in_batch": mask.sum(),
    }
    loss: Tensor = trainer._compute_loss(trainer.model, inputs)
    return loss


@pytest.fixture
def given_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages are inputs of both sides; how rewards become advantages has tests of its own."""

    def assign(credit: Any, part: SegmentExperience, *_: Any) -> None:
        part.advantages = ADVANTAGES.unsqueeze(1) * part.mask

    monkeypatch.setattr(CreditAssignment, "assign", assign)


RANGE = {"type": "ppo_clip", "low": 0.2, "high": 0.28}
WIDER = {"epsilon_low": 0.2, "epsilon_high": 0.28}
K3 = {"kl": {"coefficient": 0.3, "estimator": "k3", "placement": "loss"}}
PLAIN = {"dynamic_sampling": None, "overlong": None}
GRPO_LIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"name": "grpo", "kl": None}, {"loss_type": "grpo"}),
    "grpo, k3": ({"name": "grpo", **K3}, {"loss_type": "grpo", "beta": 0.3}),
    "grpo, two bounds": ({"name": "grpo", "kl": None, "surrogate": RANGE}, {"loss_type": "grpo", **WIDER}),
    "grpo, dual clip": (
        {"name": "grpo", "kl": None, "surrogate": {"low": 0.2, "dual": 1.5}},
        {"loss_type": "grpo", "delta": 1.5},
    ),
    "bnpo": ({"name": "grpo", "kl": None, "aggregation": {"mode": "token_mean"}}, {"loss_type": "bnpo"}),
    "dapo": ({"name": "dapo", **PLAIN}, {"loss_type": "dapo", **WIDER}),
    "dapo, k3": ({"name": "dapo", **PLAIN, **K3}, {"loss_type": "dapo", "beta": 0.3, **WIDER}),
    "dr_grpo": (
        {"name": "dr_grpo", "aggregation": {"mode": "sum_over_constant", "constant": ROWS * LONGEST}},
        {"loss_type": "dr_grpo"},
    ),
    "cispo": (
        {"name": "cispo", "surrogate": {"high": 1.3}},
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "gspo": (
        {"name": "gspo", "surrogate": {"low": 0.05, "high": 0.08}},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.08},
    ),
    "gspo, k3": (
        {"name": "gspo", "surrogate": {"low": 0.05, "high": 0.08}, **K3},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.05,
            "epsilon_high": 0.08,
            "beta": 0.3,
        },
    ),
}


@pytest.mark.parametrize("case", GRPO_LIKE)
def test_a_policy_gradient_is_trls(case: str, given_advantages: None) -> None:
    algorithm, theirs = GRPO_LIKE[case]
    parameters = NOW.clone().requires_grad_()
    assert_same(ours(algorithm, torch.arange(float(ROWS))), trl_grpo(parameters, **theirs), parameters)


def test_a_sample_without_a_decision_leaves_our_mean_and_stays_in_trls(given_advantages: None) -> None:
    """The one difference that `aggregate` states."""
    mask = MASK.clone()
    mask[3] = False
    parameters = NOW.clone().requires_grad_()
    theirs = trl_grpo(parameters, mask, loss_type="grpo")
    found = ours({"name": "grpo", "kl": None}, torch.arange(float(ROWS)), mask)
    assert_same(found, theirs * ROWS / (ROWS - 1), parameters)


# -- preferences -----------------------------------------------------------------------------------------------------


def model_of(log_probs: Tensor, mask: Tensor) -> Any:
    """What TRL's trainers ask of a model: the log-prob of each token that has a label, behind a prompt of one token."""
    nothing = torch.zeros(mask.shape)
    output = SimpleNamespace(
        log_probs=torch.where(mask, log_probs, 0.0), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    return lambda **_: output


def with_prompt(mask: Tensor) -> Tensor:
    return nn.functional.pad(mask.long(), (1, 0))


@pytest.mark.parametrize(
    ("algorithm", "loss_type"),
    [
        ({"name": "dpo", "loss": {"beta": 0.4}}, "sigmoid"),
        ({"name": "ipo", "loss": {"beta": 0.4, "per_decision": True}}, "ipo"),
    ],
    ids=["dpo", "ipo"],
)
def test_a_loss_of_pairs_is_trls(algorithm: dict[str, Any], loss_type: str) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    parameters = NOW.clone().requires_grad_()
    chosen, rejected = (LABELS == 1).nonzero().flatten(), (LABELS == 0).nonzero().flatten()
    rows = torch.cat([chosen, rejected])  # TRL's order; the k-th of each are of one prompt
    mask = MASK[rows]
    reference = (own(REFERENCE) * MASK).sum(1)
    inputs = {
        "input_ids": with_prompt(mask),
        "attention_mask": with_prompt(mask),
        "completion_mask": with_prompt(mask),
        "ref_chosen_logps": reference[chosen],
        "ref_rejected_logps": reference[rejected],
    }
    trainer = trainer_of(
        DPOTrainer,
        beta=0.4,
        loss_types=[loss_type],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
    )
    loss = trainer._compute_loss(model_of(own(parameters)[rows], mask), inputs, False)
    assert_same(ours(algorithm, LABELS), loss, parameters)


@pytest.mark.parametrize("away", [0.0, 0.5])
def test_the_loss_of_labelled_samples_is_trls(away: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a drift and without one: where the samples have become less likely under other prompts, it is 0."""
    from trl.trainer.kto_trainer import KTOTrainer

    monkeypatch.setitem(globals(), "REFERENCE", NOW - away + random(*NOW.shape, seed=3, scale=0.1))
    parameters = NOW.clone().requires_grad_()
    other = torch.tensor([1, 1, 0, 0, 1, 1])  # two and two exchange prompts, the last one takes its neighbour's
    exchanged, behind = model_of(own(parameters, other), MASK), model_of(own(parameters), MASK)
    inputs = {
        "input_ids": with_prompt(MASK),
        "attention_mask": with_prompt(MASK),
        "completion_mask": with_prompt(MASK),
        "label": LABELS.bool(),
        "ref_logps": (own(REFERENCE) * MASK).sum(1),
        "ref_KL_logps": (own(REFERENCE, other) * MASK).sum(1),
        "KL_input_ids": with_prompt(MASK) + 1,  # by which the model tells them from the others
        "KL_attention_mask": with_prompt(MASK),
        "KL_completion_mask": with_prompt(MASK),
    }
    trainer = trainer_of(
        KTOTrainer,
        beta=0.4,
        loss_type="kto",
        desirable_weight=1.2,
        undesirable_weight=0.7,
        calculate_KL=True,
        precompute_ref_logps=True,
    )

    def model(**given: Any) -> Any:
        return (exchanged if torch.equal(given["input_ids"], inputs["KL_input_ids"]) else behind)(**given)

    loss = trainer._compute_loss(model, inputs, False)
    assert (trainer._metrics["train"]["kl"][0] > 0) == (away > 0)
    assert_same(
        ours({"name": "kto", "beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7}, LABELS), loss, parameters
    )
