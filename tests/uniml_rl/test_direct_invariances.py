"""What must not change the loss and the gradient of the rows that learn from whole samples or a reward's gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from denoising_helpers import image_policy, perturb, requests
from direct_world import given_images, given_texts, loss_and_gradient, moved, scored, text_policy
from tiny_models_diffusion import tiny_stable_diffusion
from tiny_models_text import tiny_gpt2
from torch import Tensor
from toy_runs import on_ranks

from modalities.base import Policy, Trajectory
from modalities.reward_model import TextRewardModelConfig
from modalities.trajectories import select
from rewards.combine import RewardResult, RewardSet
from rewards.image import MeanColourConfig
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import build_objective
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.experience import select_results
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective

LABELS = [2.0, 0.0, -1.0, 1.0, 3.0, -2.0, 1.0, 4.0]
"""Four groups of two."""
PAIRS = {
    "dpo": ("texts", {"name": "dpo", "loss": {"beta": 0.3, "label_smoothing": 0.1}}),
    "ipo": ("texts", {"name": "ipo", "loss": {"beta": 0.5, "per_decision": True}}),
    "reward_model": ("scores", {"name": "reward_model"}),
    "diffusion_dpo": ("images", {"name": "diffusion_dpo", "loss": {"beta": 20.0}, "forward": {"draws": 2}}),
}
MEAN = {"kto of the mean": ("texts", {"name": "kto", "beta": 0.7, "desirable_above": "group_mean"})}
KTO = MEAN | {
    "kto": ("texts", {"name": "kto", "beta": 0.7, "undesirable_weight": 0.5}),
    "kto of images": ("images", {"name": "kto", "beta": 20.0, "forward": {"draws": 2}}),
}
SFT = {
    "sft": ("texts", {"name": "sft", "aggregation": {"mode": "sequence_mean_token_mean"}}),
    "sft of images": ("images", {"name": "sft", "forward": {"draws": 2}}),
}
GRADIENT = {
    "refl": ("rollout", {"name": "refl", "gradient": {"first": 0.0}}),
    "draft": ("rollout", {"name": "draft", "gradient": {"count": 2}}),
    "alignprop": ("rollout", {"name": "alignprop"}),
}
CASES = PAIRS | KTO | SFT | GRADIENT


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    folder: Path = tmp_path_factory.mktemp("models")
    judge = TextRewardModelConfig(model=str(tiny_gpt2(folder / "judge"))).build("judge", "cpu", 0)
    moved(judge, 0.1)
    painter = image_policy(tiny_stable_diffusion(folder / "sd"), {"guidance_scale": 1.0})
    painter.keep("reference")
    perturb(painter, 0.02)
    return {"texts": text_policy(folder), "scores": judge, "images": painter, "rollout": painter}


class Case:
    """One algorithm with its policy and its samples."""

    def __init__(self, name: str, policies: dict[str, Policy], labels: Sequence[float] = LABELS) -> None:
        kind, self.block = CASES[name]
        self.policy = policies[kind]
        if kind == "rollout":
            self.trajectory, self.result = self.policy.rollout(requests(len(labels))), scored(labels)
        else:
            given = given_images if kind == "images" else given_texts
            self.trajectory, self.result = given(self.policy, labels)

    def objective(self) -> Objective:
        rewards = RewardSet.build({"red": MeanColourConfig(target=(1.0, 0.0, 0.0))}, "cpu")
        return build_objective(resolve_algorithm(self.block), None, rewards)

    def rows(self, rows: list[int]) -> tuple[Trajectory, RewardResult]:
        """Some of the samples."""
        chosen = torch.tensor(rows)
        return select(self.trajectory, chosen), select_results(self.result, chosen)

    def step(
        self, data: tuple[Trajectory, RewardResult] | None = None, budget: int = 100, engine: Engine | None = None
    ) -> tuple[float, Tensor]:
        """Loss and gradient of all samples, or of `data`."""
        policy = copy.deepcopy(self.policy) if engine else self.policy  # ranks do not share weights
        data = data or (self.trajectory, self.result)
        return loss_and_gradient(self.objective(), policy, *data, budget, engine)[:2]


def assert_equal(found: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert expected[1].norm() > 1e-6
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    assert (found[1] - expected[1]).norm() <= 1e-3 * expected[1].norm()


@pytest.mark.parametrize("name", CASES)
def test_micro_batches_do_not_matter(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    expected = case.step()
    for budget in (1, 3):
        assert_equal(case.step(budget=budget), expected)


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_not_matter(name: str, policies: dict[str, Policy]) -> None:
    """The sum over two ranks, of which one has more; KTO exchanges prompts two and two, so there both have two."""
    case = Case(name, policies)
    first = 4 if name in KTO else 2
    shares = [case.rows([*range(first)]), case.rows([*range(first, len(LABELS))])]
    parts = on_ranks(2, lambda engine: case.step(shares[engine.rank], engine=engine))
    found = sum(loss for loss, _ in parts), torch.stack([gradient for _, gradient in parts]).sum(0)
    assert_equal(found, case.step())


@pytest.mark.parametrize(("mode", "together"), [("prompt_mean", True), ("token_mean", False)])
def test_imitation_keeps_a_prompts_samples_together_where_the_mean_is_over_prompts(mode: str, together: bool) -> None:
    algorithm = resolve_algorithm({"name": "sft", "aggregation": {"mode": mode}})
    assert build_objective(algorithm, None, None).keeps_groups == together


@pytest.mark.parametrize("name", CASES)
def test_the_order_of_samples_does_not_matter(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    assert_equal(case.step(case.rows([5, 2, 7, 0, 1, 3, 6, 4])), case.step())


@pytest.mark.parametrize("name", CASES)
def test_a_sample_whose_reward_failed_teaches_nothing(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    expected = case.step(case.rows([0, 2, 3, 5, 6, 7]))
    case.result.total[[1, 4]] = math.nan
    case.result.valid[[1, 4]] = False
    assert_equal(case.step(), expected)


@pytest.mark.parametrize("name", ["dpo", "ipo", "reward_model", "kto", "sft"])
def test_a_sample_without_a_trained_decision_teaches_nothing(name: str, policies: dict[str, Policy]) -> None:
    """Nor does the other sample of its pair."""
    case = Case(name, policies)
    expected = case.step(case.rows([0, 2, 3, 5, 6, 7]))
    mask = case.trajectory.segments[0].trained_mask.clone()
    mask[[1, 4]] = False
    case.trajectory.segments[0].trained_mask = mask
    assert_equal(case.step(), expected)


@pytest.mark.parametrize("name", PAIRS | KTO | GRADIENT)
def test_a_step_counts_the_samples_or_pairs_that_it_trains(name: str, policies: dict[str, Policy]) -> None:
    """Of the second half of the rows, one of which failed."""
    case, engine = Case(name, policies), TorchEngine("cpu")
    case.result.total[7], case.result.valid[7] = math.nan, False
    objective = case.objective()
    trajectory, result = objective.as_trained(case.policy, case.trajectory, case.result)
    rows = torch.arange(trajectory.segments[0].num_rows)
    cuts = objective.plan(case.policy, trajectory, rows, 8)
    experience = objective.prepare(case.policy, trajectory, result, cuts, engine, Metrics())
    counted = {"kto of the mean": 2} | dict.fromkeys(PAIRS, 1)  # the failed one leaves the other without a rival
    assert objective.minibatch(experience, rows[4:], engine).trained_decisions == counted.get(name, 3)


@pytest.mark.parametrize("name", PAIRS)
def test_a_micro_batch_holds_whole_pairs_and_no_more_rows_than_it_may(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    objective = case.objective()
    trajectory, _ = objective.as_trained(case.policy, case.trajectory, case.result)
    for budget, largest in {1: 2, 2: 2, 3: 2, 4: 4, 5: 4, 6: 6, 7: 6, 8: 8, 100: 8}.items():
        cuts = objective.plan(case.policy, trajectory, torch.arange(8), budget)
        assert max(len(cut.rows) for cut in cuts) == largest
        assert all((trajectory.segments[0].group[cut.rows].bincount() % 2 == 0).all() for cut in cuts)


@pytest.mark.parametrize("name", PAIRS)
def test_prompts_whose_samples_are_equally_good_have_no_pair(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    expected = case.step(case.rows([2, 3, 6, 7]))
    case.result.total[[0, 1, 4, 5]] = 1.0
    assert_equal(case.step(), expected)


@pytest.mark.parametrize("name", PAIRS | MEAN)
def test_an_iteration_of_equally_good_samples_or_of_single_ones_changes_nothing(
    name: str, policies: dict[str, Policy]
) -> None:
    case = Case(name, policies, labels=[1.0] * 4)
    for data in (case.rows([0, 1, 2, 3]), case.rows([0, 2])):
        objective, engine = case.objective(), TorchEngine("cpu")
        trajectory, result = objective.as_trained(case.policy, *data)
        roots = torch.arange(trajectory.segments[0].num_rows)
        cuts = objective.plan(case.policy, trajectory, roots, 8)
        experience = objective.prepare(case.policy, trajectory, result, cuts, engine, metrics := Metrics())
        minibatch = objective.minibatch(experience, roots, engine)
        assert minibatch.trained_decisions == 0
        assert all(objective.loss(case.policy, minibatch, cut, 0, metrics) == 0 for cut in cuts)
        assert not any(name.startswith("nonfinite/") for name in metrics.reduce())


@pytest.mark.parametrize("name", CASES)
def test_integer_rewards_are_numbers_too(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    expected = case.step()
    case.result.total = case.result.total.long()
    assert_equal(case.step(), expected)


@pytest.mark.parametrize("name", PAIRS)
def test_the_better_sample_of_a_pair_may_be_better_by_a_rounding_error(name: str, policies: dict[str, Policy]) -> None:
    case = Case(name, policies)
    expected = case.step()
    less = torch.linspace(0.1, 0.9, 4)
    more = less.nextafter(torch.ones(4))
    better = torch.tensor(LABELS).view(4, 2).diff().flatten() > 0
    case.result.total = torch.stack([torch.where(better, less, more), torch.where(better, more, less)], 1).flatten()
    assert_equal(case.step(), expected)
