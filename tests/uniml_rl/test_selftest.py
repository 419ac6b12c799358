"""The known answers of the self-test against other ways to find them, and that its table can fail."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.special
import torch
from numpy.typing import NDArray

from modalities.base import Request, Trajectory
from modalities.errors import UserError
from modalities.randomness import SampleKey
from uniml_rl.algorithms.presets import PRESETS
from uniml_rl.objectives import divergence as divergence_module
from uniml_rl.selftest import enumeration, report
from uniml_rl.selftest import linear_quadratic as lq
from uniml_rl.selftest.claims import ROWS, Row
from uniml_rl.selftest.denoising import DenoisingProblem
from uniml_rl.selftest.running import Problem
from uniml_rl.selftest.targets import Optimum, Preferred
from uniml_rl.selftest.tokens import TokenProblem

Array = NDArray[np.float64]

SAMPLERS: list[dict[str, Any]] = [
    {"type": "flow_sde"},
    {"type": "dance_sde"},
    {"type": "cps"},
    {"type": "ddim"},
]


def requests(problem: Problem, count: int) -> list[Request]:
    return [
        Request(prompt, prompt.index, SampleKey(3, 0, 0, prompt.index, sample))
        for prompt in problem.prompts
        for sample in range(count)
    ]


# Tokens


def test_enumerated_log_probs_are_products_of_torchs_categoricals() -> None:
    problem = TokenProblem()
    log_probs = problem.log_probs(problem.policy())
    assert np.allclose(np.exp(log_probs).sum(1), 1)
    logits = torch.tensor(problem.logits)
    for prompt, (first, second) in itertools.product(range(2), itertools.product(range(3), repeat=2)):
        expected = torch.distributions.Categorical(logits=logits[prompt, 0]).log_prob(torch.tensor(first))
        after = torch.distributions.Categorical(logits=logits[prompt, 1 + first])
        expected = expected + after.log_prob(torch.tensor(second))
        assert math.isclose(log_probs[prompt, 3 * first + second], float(expected), rel_tol=1e-6)


def test_the_table_samples_the_distribution_that_is_enumerated() -> None:
    problem = TokenProblem()
    policy = problem.policy()
    trajectory = policy.rollout(requests(problem, 4000))
    texts = [sample.text for sample in policy.decode(trajectory)]
    for prompt in range(2):
        own = texts[4000 * prompt : 4000 * (prompt + 1)]
        share = np.array([own.count(text) / len(own) for text in problem.texts])
        expected = np.exp(problem.log_probs(policy)[prompt])
        assert (np.abs(share - expected) < 4.5 * np.sqrt(expected / len(own))).all()


def test_given_texts_get_their_enumerated_log_probs() -> None:
    problem = TokenProblem()
    policy, prompts = problem.policy(), problem.prompts
    rows = [(prompt, sequence) for prompt in range(2) for sequence in range(9)]
    keys = [SampleKey(0, 0, 0, prompt, sequence) for prompt, sequence in rows]
    samples = [problem.text(sequence) for _, sequence in rows]
    trajectory = policy.encode([prompts[prompt] for prompt, _ in rows], samples, keys)
    (cut,) = policy.plan(trajectory, torch.arange(18), 100)
    scores = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").sum(1)
    assert np.allclose(scores.detach().numpy(), problem.log_probs(policy).flatten(), atol=1e-5)


def objective_of(problem: TokenProblem, beta: float, flat: Array) -> float:
    """-(E[r] - beta KL(pi || pi_ref)), summed over prompts, of a table of logits."""
    table = flat.reshape(problem.logits.shape)
    pi, reference = (problem.sequences.log_probs(logits) for logits in (table, problem.logits))
    return -float((np.exp(pi) * (problem.rewards - beta * (pi - reference))).sum())


def test_the_tilted_distribution_is_what_a_numerical_search_finds() -> None:
    problem, beta = TokenProblem(), 0.25
    found = scipy.optimize.minimize(lambda x: objective_of(problem, beta, x), problem.logits.flatten(), method="BFGS")
    best = problem.sequences.log_probs(found.x.reshape(problem.logits.shape))
    assert np.allclose(np.exp(best), np.exp(problem.target_log_probs(Optimum(beta, True))), atol=2e-4)


@pytest.mark.parametrize("scale", ["none", "group_mean", "group_std"])
def test_no_single_decision_can_improve_on_the_decisionwise_optimum(scale: Any) -> None:
    """At each prefix the policy is the best response in E[A] - beta KL of that decision, given all the others."""
    problem, beta, size = TokenProblem(), 0.5, 4
    target = Optimum(beta, False, scale=scale, group_size=size, epsilon=1e-4)
    log_pi = problem.target_log_probs(target)
    joint = np.exp(log_pi).reshape(2, 3, 3)
    advantages = enumeration.expected_advantages(log_pi, problem.rewards, scale, size, 1e-4).reshape(2, 3, 3)
    reference = scipy.special.log_softmax(problem.logits, axis=2)
    second = joint / joint.sum(2, keepdims=True)
    first_worth = (second * advantages).sum(2)
    for prompt in range(2):
        places = [(joint[prompt].sum(1), first_worth[prompt], reference[prompt, 0])]
        places += [(second[prompt, a], advantages[prompt, a], reference[prompt, 1 + a]) for a in range(3)]
        for chosen, worth, prior in places:
            loss = lambda x, w=worth, q=prior: -_regularised(scipy.special.log_softmax(x), w, q, beta)  # noqa: E731
            found = scipy.optimize.minimize(loss, prior, method="BFGS")
            assert np.allclose(scipy.special.softmax(found.x), chosen, atol=1e-3)


def _regularised(log_p: Array, worth: Array, prior: Array, beta: float) -> float:
    return float((np.exp(log_p) * (worth - beta * (log_p - prior))).sum())


def test_both_optima_are_one_for_a_single_token() -> None:
    problem = TokenProblem(vocabulary=4, length=1)
    whole, single = (problem.target_log_probs(Optimum(0.3, whole_path)) for whole_path in (True, False))
    assert np.allclose(whole, single)


def test_expected_advantages_are_the_mean_of_drawn_groups() -> None:
    problem, size = TokenProblem(), 5
    log_pi = problem.sequences.log_probs(problem.logits)[:1]
    rewards = problem.rewards[:1]
    exact = enumeration.expected_advantages(log_pi, rewards, "group_std", size, 0.01)[0]
    draw = np.random.default_rng(0)
    others = draw.choice(rewards[0], (40_000, size - 1), p=np.exp(log_pi[0]))
    for sequence in range(9):
        group = np.concatenate([np.full((len(others), 1), rewards[0, sequence]), others], axis=1)
        values = (group[:, 0] - group.mean(1)) / (group.std(1) + 0.01)
        assert abs(values.mean() - exact[sequence]) < 4.5 * values.std() / math.sqrt(len(values)) + 1e-12


@pytest.mark.parametrize("loss", ["logistic", "square"])
def test_the_preferred_policy_is_what_a_numerical_search_finds(loss: str) -> None:
    problem, beta = TokenProblem(), 0.5
    log_pi = problem.target_log_probs(Preferred(loss, beta, from_reference=True))[0]  # type: ignore[arg-type]
    reference = problem.sequences.log_probs(problem.logits)[0]
    places = {text: place for place, text in enumerate(problem.texts)}
    pairs = np.array(
        [
            [places[sample.text] for sample in record.samples]
            for record in problem.records("preferences")
            if record.prompt.index == 0
        ]
    )

    def total(h: Array) -> float:
        margin = h[pairs[:, 0]] - h[pairs[:, 1]]
        if loss == "logistic":
            return float(np.logaddexp(0, -beta * margin).sum())
        return float(((margin - 1 / (2 * beta)) ** 2).sum())

    found = scipy.optimize.minimize(total, np.zeros(9), method="BFGS", options={"gtol": 1e-8}).x
    assert np.allclose(scipy.special.log_softmax(reference + found), log_pi, atol=1e-4)


# Denoising


def flat_chain(chain: lq.Chain) -> Array:
    return np.concatenate([chain.gain.flatten(), chain.offset.flatten()])


def chain_from(flat: Array, like: lq.Chain) -> lq.Chain:
    split = like.gain.size
    return lq.Chain(flat[:split].reshape(like.gain.shape), flat[split:].reshape(like.offset.shape), like.std)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_policys_samples_have_the_moments_of_its_chain(sampler: dict[str, Any]) -> None:
    problem = DenoisingProblem(sampler=sampler)
    policy = problem.policy()
    count = 4000
    final = policy.rollout(requests(problem, count)).segments[0].final_latents.double().numpy()  # type: ignore[attr-defined]
    mean, covariance = problem.chain(policy).moments()[-1]
    assert np.abs((final.mean(0) - mean) / np.sqrt(np.diag(covariance) / count)).max() < 4.5
    assert np.abs(np.cov(final.T) - covariance).max() < 0.1 * np.abs(covariance).max()
    scores = problem.reward.score(policy.decode(policy.rollout(requests(problem, count))), []).double()
    assert abs(float(scores.mean()) - problem.expected_reward(policy)) < 4.5 * float(scores.std()) / math.sqrt(count)


def test_the_exact_denoiser_is_the_regression_of_drawn_noise() -> None:
    problem = DenoisingProblem()
    draw = np.random.default_rng(0)
    x0 = draw.multivariate_normal(problem.data_mean, problem.data_covariance, 200_000)
    noise = draw.standard_normal(x0.shape)
    for step, sigma in enumerate(problem.schedule.times[:-1].tolist()):
        x = (1 - sigma) * x0 + sigma * noise
        inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        fitted = np.linalg.lstsq(inputs, noise - x0, rcond=None)[0].T
        assert np.allclose(fitted[:, :2], problem.weight[step], atol=0.02)
        assert np.allclose(fitted[:, 2], problem.bias[step], atol=0.02)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_riccati_solution_is_what_a_numerical_search_finds(sampler: dict[str, Any]) -> None:
    problem, beta = DenoisingProblem(sampler=sampler), 0.3
    stochastic = problem.reference.std > 0
    free = np.concatenate([np.repeat(stochastic, 4), np.repeat(stochastic, 2)])
    start = flat_chain(problem.reference)

    def loss(values: Array) -> float:
        flat = start.copy()
        flat[free] = values
        chain = chain_from(flat, problem.reference)
        return -problem.quadratic.expected(chain) + beta * lq.divergence(chain, problem.reference)

    found = scipy.optimize.minimize(loss, start[free], method="BFGS", options={"gtol": 1e-7})
    best = problem.target_chain(Optimum(beta, whole_path=True))
    assert loss(flat_chain(best)[free]) <= found.fun + 1e-9
    assert np.allclose(found.x, flat_chain(best)[free], atol=2e-3)


@pytest.mark.parametrize("divergence", ["kl", "prediction_mse"])
def test_no_single_step_can_improve_on_the_decisionwise_solution(divergence: Any) -> None:
    problem, beta = DenoisingProblem(steps=4), 0.3
    best = problem.target_chain(Optimum(beta, False, divergence))
    on_prediction = problem._coefficients()[1]
    weights = lq.kl_weights(best.std) if divergence == "kl" else 1 / on_prediction**2
    for step in np.flatnonzero(best.std > 0):

        def loss(values: Array, step: int = int(step)) -> float:
            gain, offset = best.gain.copy(), best.offset.copy()
            gain[step], offset[step] = values[:4].reshape(2, 2), values[4:]
            chain = lq.Chain(gain, offset, best.std)
            own = weights[step] * lq.squared_differences(chain, problem.reference)[step]
            return -problem.quadratic.expected(chain) + beta * own

        found = scipy.optimize.minimize(loss, np.zeros(6), method="BFGS", options={"gtol": 1e-8})
        assert np.allclose(found.x, np.concatenate([best.gain[step].flatten(), best.offset[step]]), atol=1e-3)


def test_both_solutions_are_one_for_a_single_stochastic_step() -> None:
    problem = DenoisingProblem(window={"steps": (1, 1)})
    whole, single = (problem.target_chain(Optimum(0.3, whole_path)) for whole_path in (True, False))
    assert np.allclose(flat_chain(whole), flat_chain(single))


def test_many_equal_steps_lead_to_the_stationary_riccati_equation() -> None:
    """With x' = A x + u + noise and the cost w |u|^2 the value matrix converges to that of the discrete equation."""
    gain, weight, steps = np.array([[1.3, 0.2], [0.0, 1.1]]), 0.8, 200
    reference = lq.Chain(np.tile(gain, (steps, 1, 1)), np.zeros((steps, 2)), np.full(steps, 0.5))
    reward = lq.QuadraticReward(np.eye(2), np.zeros(2))
    first = lq.optimal_chain(reference, reward, np.full(steps, weight), whole_path=True).gain[0]
    value = scipy.linalg.solve_discrete_are(gain, np.eye(2), np.zeros((2, 2)), 2 * weight * np.eye(2))
    feedback = np.linalg.solve(2 * weight * np.eye(2) + value, value @ gain)
    assert np.allclose(first, gain - feedback, atol=1e-8)


def against_tilted(steps: int, **sampler: Any) -> float:
    """The largest relative error of mean and covariance of the optimal sampler against the tilted Gaussian."""
    problem = DenoisingProblem(steps=steps, sampler=sampler)
    mean, covariance = problem.reference.moments()[-1]
    # N(mean, covariance) exp(r / beta): precisions add up, and precision times mean
    precision, pull = np.linalg.inv(covariance), problem.quadratic.curvature / 0.5
    tilted = np.linalg.inv(precision + pull)
    expected = (tilted @ (precision @ mean + pull @ problem.quadratic.target), tilted)
    found = problem.target_chain(Optimum(0.5, True)).moments()[-1]
    shift = np.abs(found[0] - expected[0]).max() / np.abs(expected[0] - mean).max()
    return max(float(shift), float(np.abs(found[1] - expected[1]).max() / np.abs(expected[1] - covariance).max()))


def test_the_tilted_gaussian_is_right_only_where_the_schedule_makes_it_so() -> None:
    """Flow-SDE's noise grows without bound towards sigma = 1, so that in the limit of many steps the sample forgets the
    initial noise (Domingo-Enrich et al. 2024). Dance-SDE's does not; and few steps cannot change the covariance as the
    tilt asks."""
    assert against_tilted(400, type="flow_sde") < 0.02
    assert against_tilted(3, type="flow_sde") > 0.1
    assert against_tilted(400, type="dance_sde") > 0.1


def test_the_denoiser_interpolates_its_weights_between_the_times_of_its_table() -> None:
    policy = DenoisingProblem().policy()
    times = policy.denoiser.times
    between = 0.25 * times[0] + 0.75 * times[1]
    levels = policy.denoiser.levels(torch.stack([*times, between, times[-1] / 2]))
    assert torch.equal(levels[:3], torch.eye(3))
    assert torch.allclose(levels[3], torch.tensor([0.25, 0.75, 0.0]))
    assert torch.equal(levels[4], torch.tensor([0.0, 0.0, 1.0]))


# The table


def test_every_preset_has_a_claim() -> None:
    assert set(PRESETS) - {row.algorithm for row in ROWS} == set()


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def optima() -> list[Row]:
    return [row for row in ROWS if isinstance(row.target, Optimum)]


@pytest.mark.parametrize("row", optima(), ids=lambda row: row.name)
def test_a_bound_excludes_other_optima(row: Row) -> None:
    """A policy that ended at twice or half of beta, at the KL's wrong sign, or that of the other kind of KL fails."""
    problem, target = row.make_problem(), row.target
    assert isinstance(target, Optimum)
    wrong = [replace(target, beta=factor * target.beta) for factor in (2.0, 0.5)]
    wrong.append(replace(target, whole_path=not target.whole_path))
    for other in wrong:
        policy = problem.policy()
        put(problem, policy, other)
        assert problem.distance(policy, other) < 1e-3
        assert not row.passes(problem.distance(policy, target)), other


def put(problem: Any, policy: Any, target: Optimum) -> None:
    """Writes the answer itself into the weights."""
    with torch.no_grad():
        if isinstance(problem, TokenProblem):
            joint = np.exp(problem.target_log_probs(target)).reshape(2, 3, 3)
            table = np.concatenate([joint.sum(2)[:, None], joint], axis=1)
            policy.table.logits.copy_(torch.tensor(np.log(table)))
        else:
            chain = problem.target_chain(target)
            on_x, on_prediction = problem._coefficients()
            gain = (chain.gain - on_x[:, None, None] * np.eye(2)) / on_prediction[:, None, None]
            policy.denoiser.weight.copy_(torch.tensor(gain))
            policy.denoiser.bias.copy_(torch.tensor(chain.offset / on_prediction[:, None]))


FAST = [row for row in ROWS if row.name in ("grpo, tokens", "grpo, tokens, KL in the reward", "sft, tokens")]
FAST += [row for row in ROWS if row.name == "flow_grpo, denoising, no std"]


@pytest.mark.parametrize("row", FAST, ids=lambda row: row.name)
def test_a_row_keeps_its_bound(row: Row) -> None:
    assert report.check(row, seeds=1).passed


def test_a_kl_of_the_wrong_sign_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in ROWS if row.name == "flow_grpo, denoising, no std")
    right = divergence_module.gaussian_kl
    monkeypatch.setattr(divergence_module, "gaussian_kl", lambda *arguments: -right(*arguments))
    assert not report.check(replace(row, iterations=30), seeds=1).passed


def test_a_doubled_beta_fails() -> None:
    row = next(row for row in ROWS if row.name == "grpo, tokens, KL in the reward")
    doubled = {"kl": {**row.parts["kl"], "coefficient": 2 * row.parts["kl"]["coefficient"]}}
    assert not report.check(replace(row, parts=doubled), seeds=1).passed


def test_nothing_learned_fails() -> None:
    assert not any(row.passes(0.0 if row.target is None else 1.0) for row in ROWS)
    assert not any(row.passes(math.nan) for row in ROWS)


def test_the_page_shows_the_worst_seed_and_what_failed() -> None:
    rises, ends = replace(ROWS[1], bound=0.5), replace(ROWS[0], bound=0.2)
    assert rises.target is None and ends.target is not None
    page = report.page([report.Outcome(rises, [0.9, 0.4], 1.0), report.Outcome(ends, [0.1, 0.15], 1.0)], seeds=2)
    first, second = page.splitlines()[-4:-2]
    assert "0.400" in first and "NO" in first
    assert "0.150" in second and "yes" in second


def test_an_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'gprpo'.*grpo"):
        report.chosen_rows(["gprpo"])


def test_the_selftest_says_which_rows_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    good = replace(ROWS[1], iterations=1, bound=-1.0)
    bad = replace(ROWS[0], iterations=1, bound=0.0)
    monkeypatch.setattr(report, "ROWS", (good, bad))
    assert report.selftest([], 1, tmp_path / "page.md") == [bad.name]
    assert bad.name in (tmp_path / "page.md").read_text()
    assert "E[r] - 0.25 KL" in capsys.readouterr().out


@pytest.mark.parametrize("width", ["80", "120"])
def test_nothing_of_the_table_is_cut_on_a_narrow_terminal(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(report, "check", lambda row, seeds: report.Outcome(row, [row.bound], 1.0))
    report.selftest([], 5, None)
    table, legend = capsys.readouterr().out.split("measured: ")
    assert "…" not in table and "0.120" in table
    cells = [line.strip("│").split("│")[:2] for line in table.splitlines() if line.startswith("│")]
    names, claims = ("".join(column).replace(" ", "") for column in zip(*cells, strict=True))
    for row in ROWS:
        assert row.name.replace(" ", "") in names
        assert row.claim.replace(" ", "").replace("_", "") in claims
    assert "share of what is possible" in " ".join(legend.split()) and "worst of 5 seeds" in legend


def test_the_policies_replay_what_they_rolled_out() -> None:
    for problem in (TokenProblem(), DenoisingProblem()):
        policy = problem.policy()
        trajectory: Trajectory = policy.rollout(requests(problem, 5))
        for cut in policy.plan(trajectory, torch.arange(trajectory.segments[0].num_rows), 3):
            replayed = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
            assert torch.allclose(replayed, cut.take(trajectory.segments[0].rollout_log_probs), atol=1e-6)
