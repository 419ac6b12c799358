"""Advantage estimators against scipy, exact fractions and explicit double sums."""

import threading
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from uniml_rl.algorithms.advantages import (
    GroupReport,
    RunningPromptStatistics,
    batch_advantages,
    broadcast_to_decisions,
    clip_advantages,
    discounted_returns,
    gae,
    group_advantages,
    leave_one_out,
    place_terminal_reward,
)

rewards_of_groups = st.lists(st.lists(st.integers(-40, 40), min_size=1, max_size=5), min_size=1, max_size=5)


def flatten(groups):
    """Nested rewards as tensors: rewards / 8 (exact in float32) and unordered group ids."""
    rewards = torch.tensor([r / 8 for group in groups for r in group])
    ids = torch.tensor([10**12 - 7 * g for g, group in enumerate(groups) for _ in group])
    return rewards, ids


def all_valid(rewards):
    return torch.ones(len(rewards), dtype=torch.bool)


def on_ranks(function, parts):
    """function(part, reduce, gather) on one thread per part, with real sums and concatenations between them."""
    barrier = threading.Barrier(len(parts))
    slots, results = [None] * len(parts), [None] * len(parts)

    def run(rank):
        def exchange(tensor, combine):
            slots[rank] = tensor.clone()
            barrier.wait(10)
            combined = combine(list(slots))
            barrier.wait(10)
            return combined

        results[rank] = function(parts[rank], lambda x: exchange(x, sum), lambda x: exchange(x, torch.cat))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# -- groups ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(rewards_of_groups)
def test_group_advantages_are_population_z_scores(groups):
    rewards, ids = flatten(groups)
    found, report = group_advantages(rewards, all_valid(rewards), ids, scale="group_std", epsilon=0.0)
    expected = [
        scipy.stats.zscore(np.array(group) / 8, ddof=0) if len(set(group)) > 1 else np.zeros(len(group))
        for group in groups
    ]
    has_signal = torch.tensor([len(set(group)) > 1 for group in groups for _ in group])
    torch.testing.assert_close(found[has_signal], torch.tensor(np.concatenate(expected)).float()[has_signal])
    assert report == GroupReport(
        without_signal=sum(len(set(group)) == 1 for group in groups),
        groups=len(groups),
        singletons=sum(len(group) == 1 for group in groups),
    )


def test_epsilon_is_added_to_the_standard_deviation():
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])  # mean 1/2, population std 1/2
    found, _ = group_advantages(
        rewards, all_valid(rewards), torch.zeros(4, dtype=torch.long), scale="group_std", epsilon=1.5
    )
    assert found.tolist() == [-0.25, 0.25, -0.25, 0.25]


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("reward", [0.1, -3.3, 1e7 + 1, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_tied_group_gets_exactly_zero_and_is_counted(scale, reward, size):
    rewards = torch.cat([torch.full((size,), reward), torch.tensor([0.0, 1.0])])
    ids = torch.tensor([4] * size + [2] * 2)
    found, report = group_advantages(rewards, all_valid(rewards), ids, scale=scale, epsilon=1e-8)
    assert torch.equal(found[:size], torch.zeros(size))
    assert found[-1] == -found[-2] > 0
    assert report == GroupReport(without_signal=1, groups=2, singletons=int(size == 1))


def test_batch_std_divides_by_the_spread_of_all_rewards():
    rewards, ids = torch.tensor([0.0, 2.0, 10.0, 14.0]), torch.tensor([0, 0, 1, 1])
    found, _ = group_advantages(rewards, all_valid(rewards), ids, scale="batch_std", epsilon=0.5)
    expected = np.array([-1, 1, -2, 2]) / (np.std([0, 2, 10, 14]) + 0.5)
    torch.testing.assert_close(found, torch.tensor(expected).float())


def test_scale_none_only_centres():
    rewards, ids = torch.tensor([0.0, 3.0, 10.0, 14.0]), torch.tensor([0, 0, 1, 1])
    assert group_advantages(rewards, all_valid(rewards), ids, scale="none", epsilon=9.0)[0].tolist() == [
        -1.5,
        1.5,
        -2,
        2,
    ]


def test_a_large_offset_does_not_change_the_advantage():
    # float32's E[x^2] - E[x]^2 is off by far more than the variance here.
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0])
    ids = torch.zeros(4, dtype=torch.long)
    near, _ = group_advantages(rewards, all_valid(rewards), ids, scale="group_std", epsilon=0.0)
    far, _ = group_advantages(rewards + 2.0**20, all_valid(rewards), ids, scale="group_std", epsilon=0.0)
    assert torch.equal(near, far)


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "none"])
@pytest.mark.parametrize("failed_reward", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_a_failed_sample_leaves_mean_and_std_and_gets_zero(scale, failed_reward):
    rewards = torch.tensor([1.0, failed_reward, 4.0, 2.0, failed_reward, 7.0, failed_reward])
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 3])
    valid = torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()
    found, report = group_advantages(rewards, valid, ids, scale=scale, epsilon=1e-4)
    without, _ = group_advantages(rewards[valid], valid[valid], ids[valid], scale=scale, epsilon=1e-4)
    assert torch.equal(found[valid], without)
    assert torch.equal(found[~valid], torch.zeros(3))
    assert report == GroupReport(without_signal=2, groups=3, singletons=2)  # the group without a valid one is none
    of_others, _ = leave_one_out(rewards, valid, ids)
    assert of_others.tolist() == [-3.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]


@settings(max_examples=30, deadline=None)
@given(rewards_of_groups, st.integers(0, 2**31), st.sampled_from(["group_std", "batch_std", "none", "leave_one_out"]))
def test_permuting_samples_permutes_advantages(groups, seed, kind):
    rewards, ids = flatten(groups)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))

    def estimate(r, i):
        if kind == "leave_one_out":
            return leave_one_out(r, all_valid(r), i)
        return group_advantages(r, all_valid(r), i, scale=kind, epsilon=1e-4)

    found, report = estimate(rewards, ids)
    permuted, permuted_report = estimate(rewards[order], ids[order])
    torch.testing.assert_close(permuted, found[order])
    assert permuted_report == report


def test_integer_rewards_do_not_make_integer_advantages():
    rewards, ids = torch.tensor([0, 1, 1, 0, 0]), torch.zeros(5, dtype=torch.long)
    found, _ = group_advantages(rewards, all_valid(rewards), ids, scale="none", epsilon=0.0)
    torch.testing.assert_close(found, torch.tensor([-0.4, 0.6, 0.6, -0.4, -0.4]))
    torch.testing.assert_close(leave_one_out(rewards, all_valid(rewards), ids)[0], found * 5 / 4)
    whitened = batch_advantages(rewards, all_valid(rewards), epsilon=0.0)
    torch.testing.assert_close(whitened, torch.tensor(scipy.stats.zscore([0, 1, 1, 0, 0])).float())


@settings(max_examples=50, deadline=None)
@given(rewards_of_groups)
def test_leave_one_out_subtracts_the_mean_of_the_others(groups):
    rewards, ids = flatten(groups)
    found, report = leave_one_out(rewards, all_valid(rewards), ids)
    expected = []
    for group in groups:
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            expected.append(float(Fraction(reward) - Fraction(sum(others), len(others))) / 8 if others else 0.0)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert report.without_signal == sum(len(set(group)) == 1 for group in groups)


# -- batch -----------------------------------------------------------------------------------------------------------


def test_whitening_is_a_z_score_over_the_entries_under_the_mask():
    values = torch.tensor([[1.0, 5.0, torch.nan], [2.0, torch.inf, -4.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    found = batch_advantages(values, mask, epsilon=0.0)
    torch.testing.assert_close(found[mask], torch.tensor(scipy.stats.zscore([1, 5, 2, -4])).float())
    assert torch.equal(found[~mask], torch.zeros(2))
    damped = batch_advantages(values, mask, epsilon=2.0)[mask]
    torch.testing.assert_close(
        damped, torch.tensor((np.array([1, 5, 2, -4]) - 1) / (np.std([1, 5, 2, -4]) + 2)).float()
    )
    assert batch_advantages(values, mask, epsilon=0.0, scale=False)[mask].tolist() == [0.0, 4.0, 1.0, -5.0]


@pytest.mark.parametrize("value", [0.1, -7.7])
def test_whitening_one_or_equal_entries_gives_exactly_zero(value):
    for mask in ([1, 0, 0], [1, 1, 1]):
        found = batch_advantages(torch.full((3,), value), torch.tensor(mask).bool(), epsilon=1e-8)
        assert torch.equal(found, torch.zeros(3))


def test_statistics_over_ranks_equal_those_of_one_rank_even_if_a_rank_has_nothing():
    values = torch.tensor([3.0, -1.0, 8.0, 2.0, torch.nan])
    mask = torch.tensor([1, 1, 1, 1, 0]).bool()
    groups = torch.tensor([0, 0, 1, 1, 2])
    slices = [slice(0, 2), slice(2, 4), slice(4, 5)]
    whole = batch_advantages(values, mask, epsilon=1e-4)
    parts = on_ranks(lambda s, reduce, _: batch_advantages(values[s], mask[s], epsilon=1e-4, reduce=reduce), slices)
    assert torch.equal(torch.cat(parts), whole)
    whole, _ = group_advantages(values, mask, groups, scale="batch_std", epsilon=1e-4)
    parts = on_ranks(
        lambda s, reduce, _: group_advantages(
            values[s], mask[s], groups[s], scale="batch_std", epsilon=1e-4, reduce=reduce
        )[0],
        slices,
    )
    assert torch.equal(torch.cat(parts), whole)


# -- running statistics per prompt -----------------------------------------------------------------------------------


def test_running_statistics_use_the_last_rewards_of_the_prompt_and_the_batch_until_there_are_enough():
    tracker = RunningPromptStatistics(buffer_size=3, min_count=2, epsilon=0.5)
    first, report = tracker.update(torch.tensor([1.0, 5.0, 3.0]), all_valid([0] * 3), torch.tensor([8, 8, 9]))
    expected = [
        (1 - 3) / (np.std([1, 5]) + 0.5),
        (5 - 3) / (np.std([1, 5]) + 0.5),
        (3 - 3) / (np.std([1, 5, 3]) + 0.5),  # prompt 9 has one reward: the batch's statistics
    ]
    assert first.tolist() == pytest.approx(expected)
    assert report == GroupReport(without_signal=1, groups=2, singletons=1)
    second, _ = tracker.update(torch.tensor([9.0, 4.0, 0.0]), all_valid([0] * 3), torch.tensor([8, 9, 8]))
    remembered_8, remembered_9 = [5, 9, 0], [3, 4]  # prompt 8 forgot its oldest reward
    expected = [
        (9 - np.mean(remembered_8)) / (np.std(remembered_8) + 0.5),
        (4 - np.mean(remembered_9)) / (np.std(remembered_9) + 0.5),
        (0 - np.mean(remembered_8)) / (np.std(remembered_8) + 0.5),
    ]
    assert second.tolist() == pytest.approx(expected)


def test_running_statistics_never_remember_a_failed_sample():
    clean, dirty = (RunningPromptStatistics(buffer_size=4, min_count=2, epsilon=1e-6) for _ in range(2))
    expected, _ = clean.update(torch.tensor([1.0, 2.0, 5.0]), all_valid([0] * 3), torch.tensor([1, 1, 2]))
    found, report = dirty.update(
        torch.tensor([1.0, torch.nan, 2.0, 5.0]), torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([1, 1, 1, 2])
    )
    assert found.tolist() == [expected[0], 0.0, expected[1], expected[2]]
    assert report.singletons == 1
    for key, value in clean.state_dict().items():
        assert torch.equal(dirty.state_dict()[key], value)


def test_running_statistics_of_equal_rewards_give_exactly_zero():
    tracker = RunningPromptStatistics(buffer_size=8, min_count=2, epsilon=1e-8)
    for _ in range(2):
        found, report = tracker.update(torch.full((3,), 0.1), all_valid([0] * 3), torch.tensor([5, 5, 5]))
        assert torch.equal(found, torch.zeros(3))
        assert report.without_signal == 1


def test_running_statistics_continue_from_a_saved_state_bit_for_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(6, generator=generator), torch.randint(0, 3, (6,), generator=generator) + 2**40) for _ in range(6)
    ]
    whole, resumed = (RunningPromptStatistics(buffer_size=5, min_count=3, epsilon=1e-6) for _ in range(2))
    outcomes = [whole.update(rewards, all_valid(rewards), prompts)[0] for rewards, prompts in batches]
    before = RunningPromptStatistics(buffer_size=5, min_count=3, epsilon=1e-6)
    for rewards, prompts in batches[:3]:
        before.update(rewards, all_valid(rewards), prompts)
    torch.save(before.state_dict(), tmp_path / "state.pt")
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for (rewards, prompts), expected in zip(batches[3:], outcomes[3:], strict=True):
        assert torch.equal(resumed.update(rewards, all_valid(rewards), prompts)[0], expected)


def test_running_statistics_are_the_same_on_every_rank_and_on_one():
    rewards, prompts = torch.tensor([1.0, 4.0, 2.0, 9.0]), torch.tensor([3, 5, 3, 3])
    alone = RunningPromptStatistics(buffer_size=8, min_count=2, epsilon=1e-6)
    expected, _ = alone.update(rewards, all_valid(rewards), prompts)
    trackers = [RunningPromptStatistics(buffer_size=8, min_count=2, epsilon=1e-6) for _ in range(2)]
    parts = on_ranks(
        lambda rank, _, gather: trackers[rank].update(
            rewards[2 * rank : 2 * rank + 2], all_valid([0] * 2), prompts[2 * rank : 2 * rank + 2], gather=gather
        )[0],
        [0, 1],
    )
    assert torch.equal(torch.cat(parts), expected)
    for tracker in trackers:
        assert all(torch.equal(tracker.state_dict()[key], value) for key, value in alone.state_dict().items())


# -- along a trajectory ----------------------------------------------------------------------------------------------


@st.composite
def trajectories(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rows, steps = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    mask = torch.rand(rows, steps, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    rewards, values = (torch.randn(rows, steps, generator=generator) for _ in range(2))
    return torch.where(mask, rewards, torch.nan), torch.where(mask, values, torch.inf), mask


@settings(max_examples=50, deadline=None)
@given(trajectories(), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_double_sum_over_trained_decisions(trajectory, gamma, lambda_):
    rewards, values, mask = trajectory
    advantages, returns = gae(rewards, values, mask, gamma, lambda_)
    for row in range(len(mask)):
        r, v = rewards[row][mask[row]].double().numpy(), values[row][mask[row]].double().numpy()
        delta = r + gamma * np.append(v, 0.0)[1:] - v
        expected = [sum((gamma * lambda_) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))]
        np.testing.assert_allclose(advantages[row][mask[row]].numpy(), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(returns[row][mask[row]].numpy(), np.array(expected) + v, rtol=1e-4, atol=1e-5)
    assert torch.equal(advantages[~mask], torch.zeros(int((~mask).sum())))
    assert torch.equal(returns[~mask], torch.zeros(int((~mask).sum())))


def test_gae_worked_out_by_hand_across_a_gap():
    # Trained decisions 0, 2 and 3; decision 1 is tool output. gamma = 1/2, lambda = 1/2.
    rewards = torch.tensor([[0.0, 100.0, 0.0, 8.0, 100.0]])
    values = torch.tensor([[4.0, 100.0, 2.0, 4.0, 100.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0]]).bool()
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    # delta: 0 + 2/2 - 4 = -3; 0 + 4/2 - 2 = 0; 8 + 0 - 4 = 4. A: 4; 0 + 4/4 = 1; -3 + 1/4.
    assert advantages.tolist() == [[-2.75, 0.0, 1.0, 4.0, 0.0]]
    assert returns.tolist() == [[1.25, 0.0, 3.0, 8.0, 0.0]]


def test_lambda_one_is_the_return_minus_the_value_and_lambda_zero_the_temporal_difference():
    rewards, values = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.5, 2.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gae(rewards, values, mask, 1.0, 1.0)[0].tolist() == [[5.5, 3.5, 0.5]]
    assert gae(rewards, values, mask, 1.0, 0.0)[0].tolist() == [[2.0, 3.0, 0.5]]


def test_gae_gives_the_critic_no_gradient():
    values = torch.zeros(1, 2, requires_grad=True)
    advantages, returns = gae(torch.ones(1, 2), values, torch.ones(1, 2, dtype=torch.bool), 1.0, 1.0)
    assert not advantages.requires_grad and not returns.requires_grad


@settings(max_examples=30, deadline=None)
@given(trajectories(), st.floats(0.1, 1))
def test_discounted_returns_are_polynomials_in_gamma(trajectory, gamma):
    rewards, _, mask = trajectory
    found = discounted_returns(rewards, mask, gamma)
    for row in range(len(mask)):
        r = rewards[row][mask[row]].double().numpy()
        expected = [np.polynomial.polynomial.polyval(gamma, r[t:]) for t in range(len(r))]
        np.testing.assert_allclose(found[row][mask[row]].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_terminal_reward_sits_on_the_last_trained_decision():
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    found = place_terminal_reward(torch.tensor([3, 5, -2, 7]), mask)
    assert found.tolist() == [[0, 0, 0, 3, 0], [0] * 5, [-2, 0, 0, 0, 0], [0, 0, 0, 0, 7]]
    assert place_terminal_reward(torch.zeros(4).double(), mask).dtype == found.dtype == torch.float32


def test_an_empty_response_receives_no_reward():
    assert place_terminal_reward(torch.tensor([5.0]), torch.zeros(1, 0, dtype=torch.bool)).shape == (1, 0)
    nowhere = place_terminal_reward(torch.tensor([torch.nan]), torch.zeros(1, 3, dtype=torch.bool))
    assert torch.equal(nowhere, torch.zeros(1, 3))


def test_an_advantage_is_given_to_trained_decisions_alone():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]]).bool()
    assert broadcast_to_decisions(torch.tensor([2.0, torch.nan]), mask).tolist() == [[2, 0, 2], [0, 0, 0]]


def test_advantages_are_clamped_on_both_sides():
    advantages = torch.tensor([-9.0, -5.0, 0.3, 9.0])
    assert clip_advantages(advantages, 5.0).tolist() == pytest.approx([-5.0, -5.0, 0.3, 5.0])
    assert torch.equal(clip_advantages(advantages, None), advantages)


def test_no_estimator_passes_a_gradient_on_to_the_rewards():
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.0], requires_grad=True)
    groups, valid = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    mask = torch.ones(4, 2, dtype=torch.bool)
    found = [
        group_advantages(rewards, valid, groups, scale="group_std", epsilon=0.0)[0],
        leave_one_out(rewards, valid, groups)[0],
        batch_advantages(rewards, valid, epsilon=0.0),
        *gae(place_terminal_reward(rewards, mask), rewards.unsqueeze(1).expand(4, 2), mask, 1.0, 0.5),
        RunningPromptStatistics(4, 1, 0.0).update(rewards, valid, groups)[0],
    ]
    assert not any(advantages.requires_grad for advantages in found)
