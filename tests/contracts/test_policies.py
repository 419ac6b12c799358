"""What every policy, algorithm and engine of the catalogue promises; see `docs/writing_a_policy.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from contracts.catalog import ALGORITHMS, COMBINATIONS, ENGINES, POLICIES, POLICY, run_config
from contracts.harness import (
    ROWS,
    first_update,
    log_probs,
    make_trainer,
    padded,
    perturb,
    requests,
)
from torch import Tensor, nn
from torch.nn.functional import pad

from modalities.base import (
    DenoisingSegment,
    ForwardSegment,
    Need,
    Policy,
    Request,
    Segment,
    TokenSegment,
    Trajectory,
    summary_of,
)
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.randomness import SampleKey
from modalities.samples import Audio, Prompt, Sample, Text
from modalities.trajectories import concatenate, load_trajectory, select, trajectory_state
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import RunConfig, build_policy, inspect_policy
from uniml_rl.export import export_policy
from uniml_rl.saved import SavedRun


@dataclass
class Case:
    """One policy of the catalogue, a rollout of it, and its weights at that time."""

    config: RunConfig
    policy: Policy
    trajectory: Trajectory
    weights: dict[str, Tensor]

    def restore(self) -> None:
        """Back to the weights of the rollout."""
        self.policy.forget_all()
        self.policy.load_weight_state(self.weights)


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Builds each policy once."""

    @cache
    def build(name: str) -> Case:
        config = run_config(name, tmp_path_factory.mktemp(name))
        policy = build_policy(config, POLICY, "cpu")
        weights = {key: value.clone() for key, value in policy.weight_state().items()}
        return Case(config, policy, policy.rollout(requests()), weights)

    return build


@pytest.fixture
def case(policy: str, case_of: Callable[[str], Case]) -> Iterator[Case]:
    found = case_of(policy)
    yield found
    found.restore()


def has_kl_loss(algorithm: str) -> bool:
    kl = resolve_algorithm(ALGORITHMS[algorithm]).kl
    return kl is not None and kl.placement == "loss"


every_policy = pytest.mark.parametrize("policy", POLICIES)
with_a_kl_loss = pytest.mark.parametrize(
    ("policy", "algorithm", "engine"), [each for each in COMBINATIONS if has_kl_loss(each[1])]
)
every_combination = pytest.mark.parametrize(("policy", "algorithm", "engine"), COMBINATIONS)


def test_nothing_of_the_catalogue_is_left_out() -> None:
    policies, algorithms, engines = (set(names) for names in zip(*COMBINATIONS, strict=True))
    assert (policies, algorithms, engines) == (set(POLICIES), set(ALGORITHMS), set(ENGINES))


@every_policy
def test_what_is_said_of_a_policy_without_its_weights_is_true(case: Case) -> None:
    summary, built = inspect_policy(case.config, POLICY), summary_of(case.policy)
    for name in ("sample_kind", "decisions", "offers", "feature_size", "sampling"):
        assert getattr(summary, name) == getattr(built, name), name


@every_combination
def test_the_first_update_does_not_depend_on_how_it_is_cut(case: Case, algorithm: str, engine: str) -> None:
    """For any micro-batch and any padding the ratio is 1, nothing is clipped, and the gradient is the same."""
    block = ALGORITHMS[algorithm]
    case.policy.keep("reference")
    whole = first_update(case.policy, case.trajectory, block, ENGINES[engine]("fp32"), budget=100)
    norm = whole.gradient.norm()
    assert norm > 0
    wide = replace(case.trajectory, segments=[padded(segment) for segment in case.trajectory.segments])
    for trajectory, budget in ((case.trajectory, 1), (wide, 4)):
        update = first_update(case.policy, trajectory, block, ENGINES[engine]("fp32"), budget)
        assert update.metrics.get("policy/clip_share", 0) == 0
        assert update.metrics.get("policy/ratio_max_deviation", 0) <= 1e-5, budget
        assert (update.gradient - whole.gradient).norm() <= 1e-5 * norm, budget


@pytest.mark.parametrize(
    ("policy", "algorithm", "engine", "precision"),
    [(*names, "bf16") for names in COMBINATIONS] + [(*names, "fp16") for names in COMBINATIONS if "grpo" in names],
)
def test_in_half_precision_the_ratio_is_exactly_one(case: Case, algorithm: str, engine: str, precision: str) -> None:
    """For the split with which the old log-probs were scored, which is the one that training uses."""
    case.policy.keep("reference")
    update = first_update(case.policy, case.trajectory, ALGORITHMS[algorithm], ENGINES[engine](precision), budget=4)
    assert update.metrics.get("policy/ratio_max_deviation", 0) == 0
    assert update.metrics.get("policy/clip_share", 0) == 0


@every_policy
def test_a_sample_does_not_depend_on_what_else_is_sampled(case: Case) -> None:
    together = case.trajectory
    alone = [case.policy.rollout([request]) for request in requests()]
    ties = sum(getattr(segment, "near_ties", 0) for trajectory in (together, *alone) for segment in trajectory.segments)
    different = 0
    for index, segment in enumerate(together.segments):
        roots = together.roots(index)
        for row, trajectory in enumerate(alone):
            own, mine = trajectory.segments[index], roots == row
            if isinstance(segment, TokenSegment) and isinstance(own, TokenSegment):
                found = [t[m] for t, m in zip(segment.tokens[mine], segment.length_mask[mine], strict=True)]
                different += not torch.equal(torch.cat(found), own.tokens[own.length_mask])
            if isinstance(segment, DenoisingSegment) and isinstance(own, DenoisingSegment):
                expected = segment.final_latents[mine]
                different += not torch.allclose(own.final_latents, expected, rtol=1e-4, atol=1e-4)
    assert different <= ties


@every_policy
def test_samples_of_a_group_differ(case: Case) -> None:
    """Each has its own random numbers, whatever it shares with the others."""
    segment = case.trajectory.segments[-1]
    rows = segment.tokens if isinstance(segment, TokenSegment) else segment.final_latents
    for group in segment.group.unique():
        own = rows[segment.group == group]
        assert len(own.unique(dim=0)) > 1


@every_policy
@pytest.mark.parametrize("budget", [1, 4, 100])
def test_the_plan_covers_every_trained_decision_once(case: Case, budget: int) -> None:
    for roots in (torch.arange(ROWS), torch.tensor([4, 0, 3])):
        cuts = case.policy.plan(case.trajectory, roots, budget)
        assert all(0 < len(cut.rows) <= budget for cut in cuts)
        for index, segment in enumerate(case.trajectory.segments):
            count = torch.zeros(segment.num_rows, segment.num_steps)
            for cut in cuts:
                if cut.segment == index:
                    count[cut.rows, cut.steps] += 1
            mine = torch.isin(case.trajectory.roots(index), roots)
            assert torch.equal(count * segment.trained_mask, (segment.trained_mask & mine[:, None]).float())


@every_policy
def test_trained_decisions_exist_and_what_was_recorded_is_aligned(case: Case) -> None:
    for segment, (kind, unit) in zip(case.trajectory.segments, case.policy.decisions(), strict=True):
        shape = (segment.num_rows, segment.num_steps)
        for name in ("trained_mask", "length_mask", "context_mask"):
            assert getattr(segment, name).shape == shape
            assert getattr(segment, name).dtype == torch.bool
        assert (segment.kind, segment.log_prob_unit) == (kind, unit)
        assert segment.trained_mask.any()
        assert not (segment.trained_mask & ~segment.length_mask).any()
        assert segment.rollout_log_probs[segment.trained_mask].isfinite().all()
        assert len(segment.keys) == len(segment.ended) == segment.num_rows


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if "denoising" in entry.kinds])
def test_a_transition_is_scored_by_its_gaussian(case: Case) -> None:
    """torch.distributions is the oracle, with the mean and std that replay gives for the same transition."""
    needs: frozenset[Need] = frozenset({"mean", "std"})
    for cut in case.policy.plan(case.trajectory, torch.arange(ROWS), 100):
        segment = case.trajectory.segments[cut.segment]
        if not isinstance(segment, DenoisingSegment):
            continue
        with torch.no_grad():
            replay = case.policy.replay(case.trajectory, cut, needs)
        states = {**segment.states, segment.num_steps: segment.final_latents}
        following = states[cut.steps.stop][cut.rows].float()
        mean = replay.of("mean")[:, 0]
        std = replay.of("std").reshape(-1, *[1] * (mean.ndim - 1))
        expected = torch.distributions.Normal(mean, std).log_prob(following).flatten(1).mean(1)
        assert torch.allclose(cut.take(segment.rollout_log_probs)[:, 0], expected, atol=1e-5)


def scores(policy: Policy, trajectory: Trajectory) -> list[Tensor]:
    """[B_s, T_s] of each segment: the log-probs of the trained decisions, 0 elsewhere."""
    found = [torch.zeros(segment.num_rows, segment.num_steps) for segment in trajectory.segments]
    for cut in policy.plan(trajectory, torch.arange(trajectory.segments[0].num_rows), 4):
        mask = cut.take(trajectory.segments[cut.segment].trained_mask)
        with torch.no_grad():
            log_prob = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        found[cut.segment][cut.rows, cut.steps] = log_prob * mask
    return found


def same_fields(one: Segment, other: Segment) -> bool:
    """Whether two segments hold the same, the number of near ties aside."""
    assert type(one) is type(other)
    unequal = [
        each.name
        for each in fields(one)
        if each.name != "near_ties" and not same_values(getattr(one, each.name), getattr(other, each.name))
    ]
    return not unequal


def same_values(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return one == other


def content(sample: Sample) -> Tensor | str:
    if isinstance(sample, Text):
        return sample.text
    return sample.waveform if isinstance(sample, Audio) else sample.unit()


def alike(one: Sample, other: Sample) -> bool:
    ours, theirs = content(one), content(other)
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.allclose(ours, theirs, atol=0.005)  # an eight-bit step: pixels are rounded
    return ours == theirs


@every_policy
def test_rollouts_are_joined_and_rows_selected(case: Case, tmp_path: Path) -> None:
    """What is joined scores and decodes as its parts, comes apart into them again, and survives a checkpoint."""
    others = [
        Request(Prompt(text, index), index, SampleKey(7, 0, 1, index, sample))
        for index, text in enumerate(["e d c b a d e", "b"], start=5)
        for sample in range(2)
    ]
    parts = [case.trajectory, case.policy.rollout(others)]
    joined = concatenate(parts)
    assert joined.requests == [*case.trajectory.requests, *others]
    assert joined.leaf_prompts() == [prompt for part in parts for prompt in part.leaf_prompts()]
    found, expected = scores(case.policy, joined), [scores(case.policy, part) for part in parts]
    for index, score in enumerate(found):
        wanted = [pad(part[index], (0, score.shape[1] - part[index].shape[1])) for part in expected]
        assert torch.allclose(score, torch.cat(wanted), rtol=1e-5, atol=1e-6)
        groups = [part.segments[index].group for part in parts]
        assert torch.equal(joined.segments[index].group, torch.cat(groups))
    decoded = [sample for part in parts for sample in case.policy.decode(part)]
    assert all(alike(ours, theirs) for ours, theirs in zip(case.policy.decode(joined), decoded, strict=True))
    torch.save(trajectory_state(joined), tmp_path / "buffer.pt")
    loaded = load_trajectory(torch.load(tmp_path / "buffer.pt", weights_only=True))
    assert (loaded.requests, loaded.part_requests) == (joined.requests, joined.part_requests)
    assert all(map(same_fields, loaded.segments, joined.segments))
    for part, roots in zip(parts, (torch.arange(ROWS), ROWS + torch.arange(len(others))), strict=True):
        chosen = select(loaded, roots)
        assert (chosen.requests, chosen.part_requests) == (part.requests, part.part_requests)
        assert all(map(same_fields, chosen.segments, part.segments))
    backwards = select(joined, torch.tensor([ROWS, 4, 4]))
    leaves = [joined.roots(len(joined.segments) - 1) == row for row in (ROWS, 4, 4)]
    wanted = [score for mine in leaves for score in found[-1][mine].sum(1).tolist()]
    assert torch.allclose(scores(case.policy, backwards)[-1].sum(1), torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@every_policy
def test_samples_have_a_likelihood_with_a_gradient(case: Case) -> None:
    """Tokens as they are; latents as draws of the forward process, whose score does not depend on how it is cut."""
    perturb(case.policy, 0.05)  # a fresh adapter's first factor has no gradient yet
    trajectory = case.policy.as_likelihood(case.trajectory, ForwardProcessSettings(draws=3))
    assert trajectory.requests == case.trajectory.requests
    for before, after in zip(case.trajectory.segments, trajectory.segments, strict=True):
        assert after is before if isinstance(before, TokenSegment) else isinstance(after, ForwardSegment)
        assert after.decisions_are_draws == isinstance(after, ForwardSegment)
        assert (after.num_rows, after.parent is None) == (before.num_rows, before.parent is None)
    scores = []
    for budget in (1, 4, 100):
        cuts = case.policy.plan(trajectory, torch.arange(ROWS), budget)
        found = [torch.zeros(segment.num_rows, segment.num_steps) for segment in trajectory.segments]
        for cut in cuts:
            log_prob = case.policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
            found[cut.segment][cut.rows, cut.steps] += log_prob
        assert all((score <= 0).all() for score in found)
        scores.append(torch.cat([(s * x.trained_mask).sum(1) for s, x in zip(found, trajectory.segments, strict=True)]))
        assert torch.allclose(scores[0], scores[-1], rtol=1e-5, atol=1e-5)
    parameters = case.policy.weight_sets.parameters()
    gradients = torch.autograd.grad(scores[-1].sum(), list(parameters.values()), allow_unused=True)
    still = [
        name for name, gradient in zip(parameters, gradients, strict=True) if gradient is None or not gradient.any()
    ]
    assert not still


@every_policy
def test_samples_carry_a_gradient_or_say_why_not(case: Case) -> None:
    """The same samples as the rollout's; policies with discrete decisions refuse."""
    if any(kind != "denoising" for kind, _ in case.policy.decisions()):
        with pytest.raises(UserError, match="gradient"):
            case.policy.rollout_with_gradient(requests(), 1)
        return
    perturb(case.policy, 0.05)
    plain = case.policy.rollout(requests()).segments[-1]
    found = case.policy.rollout_with_gradient(requests(), 2).segments[-1]
    assert torch.equal(found.final_latents.detach(), plain.final_latents)
    parameters = case.policy.weight_sets.parameters()
    gradients = torch.autograd.grad(found.final_latents.square().sum(), list(parameters.values()), allow_unused=True)
    still = [name for name, grad in zip(parameters, gradients, strict=True) if grad is None or not grad.any()]
    assert not still


@every_combination
def test_what_should_train_changes_and_nothing_else(case: Case, algorithm: str, engine: str, tmp_path: Path) -> None:
    modules = nn.ModuleList(case.policy.trainable_modules().values())
    before = {name: parameter.detach().clone() for name, parameter in modules.named_parameters()}
    trainer = make_trainer(case.policy, ALGORITHMS[algorithm], ENGINES[engine]("fp32"), tmp_path)
    for iteration in range(2):
        trainer.iterate(iteration)
    for name, parameter in modules.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad), name


@with_a_kl_loss
def test_the_reference_is_where_training_began(case: Case, algorithm: str, engine: str, tmp_path: Path) -> None:
    """Its KL is 0 before training and above it after; alone, with equal rewards, it has a gradient; and `using` it
    gives the initial policy."""
    block = ALGORITHMS[algorithm]
    initial = log_probs(case.policy, case.trajectory)
    case.policy.keep("reference")
    begun = first_update(case.policy, case.trajectory, block, ENGINES[engine]("fp32"), 4)
    assert begun.metrics["kl/reference"] <= 1e-9
    make_trainer(case.policy, ALGORITHMS[algorithm] | {"epochs": 2}, ENGINES[engine]("fp32"), tmp_path).iterate(0)
    trained = first_update(case.policy, case.trajectory, block, ENGINES[engine]("fp32"), 4, spread=0.0)
    assert trained.metrics["kl/reference"] > 1e-9
    assert trained.gradient.norm() > 0
    assert not torch.allclose(log_probs(case.policy, case.trajectory), initial, atol=1e-5)
    with case.policy.using("reference"):
        assert torch.allclose(log_probs(case.policy, case.trajectory), initial, atol=1e-6)


@every_policy
def test_weights_are_restored_bit_for_bit(case: Case, tmp_path: Path) -> None:
    initial = log_probs(case.policy, case.trajectory)
    case.policy.keep("reference")
    perturb(case.policy, 0.05)
    case.policy.average("ema", 0.5)
    perturb(case.policy, 0.05)
    saved = {key: value.clone() for key, value in case.policy.weight_state().items()}
    sets = ("current", "reference", "ema")

    def scores() -> list[Tensor]:
        result = []
        for name in sets:
            with case.policy.using(name):
                result.append(log_probs(case.policy, case.trajectory))
        return result

    expected = scores()
    case.restore()
    assert torch.equal(log_probs(case.policy, case.trajectory), initial)
    case.policy.load_weight_state(saved)
    assert all(torch.equal(found, wanted) for found, wanted in zip(scores(), expected, strict=True))


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if entry.has_model])
def test_weights_that_are_not_finite_make_no_samples_and_no_export(case: Case, tmp_path: Path) -> None:
    parameters = list(case.policy.weight_sets.parameters().values())
    parameters[-1].data.flatten()[-1:] = torch.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        export_policy(case.policy, tmp_path / "exported")
    assert not list(tmp_path.iterdir())
    for parameter in parameters:
        parameter.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        case.policy.decode(case.policy.rollout(requests()))


@pytest.mark.parametrize("policy", [name for name, entry in POLICIES.items() if entry.has_model])
def test_what_is_exported_is_what_was_trained(case: Case, tmp_path: Path) -> None:
    """The folder alone, opened as a run without a checkpoint opens it, scores and samples as the policy does."""
    perturb(case.policy, 0.05)
    export_policy(case.policy, tmp_path / "export" / POLICY)
    reloaded = SavedRun(tmp_path, case.config, checkpoint=None).build(POLICY)
    expected = log_probs(case.policy, case.trajectory)
    assert torch.allclose(log_probs(reloaded, case.trajectory), expected, atol=1e-5)
    ours, theirs = (policy.rollout(requests()[:2]) for policy in (case.policy, reloaded))
    assert torch.allclose(ours.segments[-1].rollout_log_probs, theirs.segments[-1].rollout_log_probs, atol=1e-4)
