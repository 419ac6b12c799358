"""The weighted sum and its failures: every invariant on rewards small enough to be their own closed form."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.errors import UserError
from modalities.randomness import seeded_generator
from modalities.samples import Image, Prompt, Text
from rewards import isolation
from rewards.base import Reward, RewardConfig
from rewards.combine import RewardSet
from rewards.text import RegexConfig


class Rule(Reward):
    kinds = frozenset({"text"})

    def __init__(self, rule: Callable[[str], float]) -> None:
        self.rule = rule
        self.calls: list[int] = []

    def score(self, samples: Sequence[Text], prompts: Sequence[Prompt]) -> torch.Tensor:
        self.calls.append(len(samples))
        return torch.tensor([self.rule(sample.text) for sample in samples], dtype=torch.float64)


class Gate(Rule):
    """Waits for ever on the text "hang"."""

    def __init__(self) -> None:
        self.open = threading.Event()
        super().__init__(lambda text: float(self.open.wait()) if text == "hang" else len(text))


def texts(*values: str) -> tuple[list[Text], list[Prompt]]:
    return [Text(value, len(value), True) for value in values], [Prompt("p", index) for index in range(len(values))]


def fails_on(bad: str, error: Exception) -> Callable[[str], float]:
    def rule(text: str) -> float:
        if text == bad:
            raise error
        return float(len(text))

    return rule


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), max_size=7),
    weights=st.tuples(st.floats(-3, 3, width=32), st.floats(-3, 3, width=32)),
    micro_batch_size=st.integers(1, 8),
)
def test_total_is_the_weighted_sum_in_the_samples_order(lengths, weights, micro_batch_size):
    first, second = Rule(len), Rule(lambda text: 1 / (1 + len(text)))
    blocks = [RewardConfig(weight=weight, micro_batch_size=micro_batch_size) for weight in weights]
    result = RewardSet({"a": (blocks[0], first), "b": (blocks[1], second)}).score(
        *texts(*("x" * n for n in lengths)), 0
    )
    expected = [weights[0] * n + weights[1] / (1 + n) for n in lengths]
    torch.testing.assert_close(result.total, torch.tensor(expected, dtype=torch.float32))
    assert result.total.dtype == result.raw["a"].dtype == torch.float32
    assert result.raw["a"].tolist() == lengths
    assert result.valid.all() and result.failures == {"a": {}, "b": {}}
    assert max(first.calls, default=0) <= micro_batch_size and sum(first.calls) == len(lengths)


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_an_exception_leaves_out_one_sample_and_keeps_its_neighbours(timeout, caplog):
    block = RewardConfig(weight=2.0, timeout_seconds=timeout)
    reward = Rule(fails_on("bad", ArithmeticError("boom")))
    with caplog.at_level(logging.WARNING):
        result = RewardSet({"length": (block, reward)}).score(*texts("a", "bad", "four", "bad"), 0)
    assert result.valid.tolist() == [True, False, True, False]
    assert result.raw["length"].isnan().tolist() == [False, True, False, True]
    assert result.total[result.valid].tolist() == [2.0, 8.0]
    assert result.total[1].isnan() and result.weighted["length"][1].isnan()
    assert result.failures["length"] == {"ArithmeticError": 2}
    assert "boom" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_score_is_masked_and_counted(value):
    reward = Rule(lambda text: value if text == "bad" else 1.0)
    result = RewardSet({"r": (RewardConfig(), reward)}).score(*texts("a", "bad", "c"), 0)
    assert result.valid.tolist() == [True, False, True]
    assert result.raw["r"].isnan().tolist() == [False, True, False]
    assert result.failures["r"] == {"non_finite": 1}
    assert reward.calls == [3]  # a NaN needs no second call


def test_a_failure_counts_against_the_total_only_with_a_weight_in_force():
    broken = Rule(lambda text: float("nan"))
    fine = (RewardConfig(), Rule(len))
    for block in (RewardConfig(weight=0), RewardConfig(weight=3, fade_in_iterations=4)):
        result = RewardSet({"fine": fine, "broken": (block, broken)}).score(*texts("abc", "d"), 0)
        assert result.valid.all() and result.total.tolist() == [3.0, 1.0]
        assert result.failures["broken"] == {"non_finite": 2}
    result = RewardSet({"fine": fine, "broken": (RewardConfig(weight=1e-6), broken)}).score(*texts("abc", "d"), 0)
    assert not result.valid.any()


def test_fade_in_is_linear_and_then_constant():
    block = RewardConfig(weight=-2.0, fade_in_iterations=4)
    rewards = RewardSet({"r": (block, Rule(len))})
    results = [rewards.score(*texts("abc"), iteration) for iteration in (0, 1, 2, 3, 4, 5, 100)]
    assert [result.weights["r"] for result in results] == [0, -0.5, -1, -1.5, -2, -2, -2]
    assert [float(result.weighted["r"]) for result in results] == [0, -1.5, -3, -4.5, -6, -6, -6]
    assert all(float(result.raw["r"]) == 3 for result in results)


@pytest.mark.parametrize("rule", [fails_on("bad", ArithmeticError("boom")), lambda text: float("nan")])
def test_on_error_fail_ends_the_run_and_names_the_reward(rule):
    rewards = RewardSet({"mine": (RewardConfig(on_error="fail"), Rule(rule))})
    with pytest.raises(RuntimeError, match=r"'mine' failed .*on_error: mask"):
        rewards.score(*texts("a", "bad"), 0)


def test_mistakes_of_the_user_and_wrong_shapes_are_never_masked():
    with pytest.raises(UserError, match="no such file"):
        RewardSet({"r": (RewardConfig(), Rule(fails_on("bad", UserError("no such file"))))}).score(*texts("bad"), 0)

    class Column(Rule):
        def score(self, samples, prompts):
            return super().score(samples, prompts)[:, None]

    with pytest.raises(UserError, match=r"\(2, 1\) for 2 samples"):
        RewardSet({"r": (RewardConfig(), Column(len))}).score(*texts("a", "b"), 0)

    class Plain(Rule):
        def score(self, samples, prompts):
            return [1.0, 2.0]

    with pytest.raises(UserError, match="returned list for 2 samples"):
        RewardSet({"r": (RewardConfig(), Plain(len))}).score(*texts("a", "b"), 0)
    with pytest.raises(TypeError, match="sample of 'image'"):
        RewardSet({"r": (RewardConfig(), Rule(len))}).score([Image(torch.zeros(3, 1, 1))], [Prompt("p", 0)], 0)


def test_a_hanging_sample_is_left_behind_and_its_neighbours_scored_from_any_thread():
    gate = Gate()
    rewards = RewardSet({"r": (RewardConfig(timeout_seconds=0.1), gate)})
    results = []
    thread = threading.Thread(target=lambda: results.append(rewards.score(*texts("ab", "hang", "c"), 0)))
    thread.start()
    thread.join(5)
    gate.open.set()
    assert results[0].raw["r"][[0, 2]].tolist() == [2.0, 1.0]
    assert results[0].valid.tolist() == [True, False, True]
    assert results[0].failures["r"] == {"time_out": 1}


def test_too_many_hanging_calls_end_the_run(monkeypatch):
    monkeypatch.setattr(isolation, "MAX_ABANDONED", 2)
    gate = Gate()
    rewards = RewardSet({"r": (RewardConfig(timeout_seconds=0.02), gate)})
    with pytest.raises(isolation.TooManyHangingError):
        rewards.score(*texts("hang", "hang", "hang", "hang"), 0)
    gate.open.set()


BACKTRACKING = r"(x+x+)+y"
"""Exponential in the number of x, and it holds the interpreter lock: no thread could end it."""


def test_a_pattern_that_backtracks_for_ever_is_killed_off_the_main_thread_and_the_next_sample_scored():
    rewards = RewardSet.build({"r": RegexConfig(pattern=BACKTRACKING, timeout_seconds=1.0, micro_batch_size=1)}, "cpu")
    results = []
    thread = threading.Thread(target=lambda: results.append(rewards.score(*texts("x" * 60, "xxy", "z"), 0)))
    thread.start()
    thread.join(60)
    rewards.close()
    assert results[0].raw["r"][1:].tolist() == [1.0, 0.0]
    assert results[0].failures["r"] == {"time_out": 1}


def test_a_process_passes_on_exceptions_and_outlives_a_crash(tmp_path, monkeypatch):
    (tmp_path / "crashing_reward.py").write_text(
        textwrap.dedent(
            """
            import os
            from rewards.base import RewardConfig
            from rewards.text import TextReward
            class Crashing(TextReward):
                separate_process = True
                def score_text(self, sample, prompt):
                    if sample.text == "crash":
                        os._exit(3)
                    return 1 / len(sample.text)
            class CrashingConfig(RewardConfig):
                def build(self, device):
                    return Crashing()
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import crashing_reward

    rewards = RewardSet.build({"r": crashing_reward.CrashingConfig(timeout_seconds=5.0, micro_batch_size=1)}, "cpu")
    result = rewards.score(*texts("ab", "", "crash", "abcd"), 0)
    rewards.close()
    del sys.modules["crashing_reward"]
    assert result.raw["r"][[0, 3]].tolist() == [0.5, 0.25]
    assert result.failures["r"] == {"ZeroDivisionError": 1, "process_died": 1}


def test_check_refuses_the_wrong_kind_and_unknown_fields():
    class Fielded(Rule):
        fields = frozenset({"answer"})

    rewards = RewardSet({"right": (RewardConfig(), Fielded(len))})
    rewards.check("text")
    rewards.check("text", [Prompt("p", 0, record={}), Prompt("p", 1, record={"answer": "x"})])
    with pytest.raises(UserError, match=r"'right' .*scores text, but the policy makes image"):
        rewards.check("image")
    with pytest.raises(UserError, match=r"'answer'.*did you mean 'answers'"):
        rewards.check("text", [Prompt("p", 0, record={"answers": "x"})])
    with pytest.raises(UserError, match="at least one"):
        RewardSet({})


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), iteration=st.integers(0, 1000))
def test_the_shuffled_control_permutes_total_and_valid_together_and_repeatably(lengths, iteration):
    rule = Rule(lambda text: len(text) or float("nan"))
    rewards = RewardSet({"r": (RewardConfig(), rule)})
    batch = texts(*("x" * n for n in lengths))
    plain = rewards.score(*batch, 0)
    runs = [rewards.score(*batch, 0, shuffle=seeded_generator(7, 0, iteration)) for _ in range(2)]
    assert torch.equal(runs[0].total.nan_to_num(-1), runs[1].total.nan_to_num(-1))
    assert torch.equal(runs[0].total.isnan(), ~runs[0].valid)
    assert sorted(runs[0].total.nan_to_num(-1).tolist()) == sorted(plain.total.nan_to_num(-1).tolist())
    assert torch.equal(runs[0].raw["r"].nan_to_num(-1), plain.raw["r"].nan_to_num(-1))


def test_the_shuffled_control_says_nothing_about_its_sample():
    rewards = RewardSet({"r": (RewardConfig(), Rule(len))})
    batch = texts(*("x" * n for n in range(400)))
    shuffled = rewards.score(*batch, 0, shuffle=seeded_generator(7, 0, 1)).total
    correlation = torch.corrcoef(torch.stack([shuffled, torch.arange(400.0)]))[0, 1]
    assert abs(float(correlation)) < 4 / 400**0.5
    assert not torch.equal(shuffled, rewards.score(*batch, 0, shuffle=seeded_generator(7, 0, 2)).total)


def test_state_is_kept_by_name():
    class Counting(Rule):
        def __init__(self) -> None:
            super().__init__(len)

        def state_dict(self):
            return {"calls": len(self.calls)}

        def load_state_dict(self, state):
            self.calls = [0] * state["calls"]

    old = RewardSet({"a": (RewardConfig(), Counting()), "b": (RewardConfig(), Rule(len))})
    old.score(*texts("x"), 0)
    fresh = Counting()
    RewardSet({"a": (RewardConfig(), fresh), "b": (RewardConfig(), Rule(len))}).load_state_dict(old.state_dict())
    assert fresh.state_dict() == {"calls": 1}
    with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
        RewardSet({"a": (RewardConfig(), fresh)}).load_state_dict(old.state_dict())


@pytest.mark.parametrize("killed_while", ["building", "scoring"])
def test_the_process_of_a_reward_ends_silently_when_its_parent_is_killed(tmp_path: Path, killed_while: str) -> None:
    (tmp_path / "slow_reward.py").write_text(
        textwrap.dedent(
            """
            import os, time
            import torch
            from pathlib import Path
            from rewards.base import Reward, RewardConfig

            HERE = Path(__file__).parent

            def wait_for_the_end_of_the_parent():
                (HERE / "waiting").touch()
                while not (HERE / "killed").exists():
                    time.sleep(0.01)

            class SlowConfig(RewardConfig):
                def build(self, device):
                    if os.environ["KILLED_WHILE"] == "building":
                        wait_for_the_end_of_the_parent()
                    return Slow()

            class Slow(Reward):
                kinds = frozenset({"text"})

                def score(self, samples, prompts):
                    wait_for_the_end_of_the_parent()
                    return torch.zeros(len(samples))
            """
        )
    )
    program = (
        "from modalities.samples import Prompt, Text; from rewards.isolation import RewardProcess\n"
        "from slow_reward import SlowConfig\n"
        "RewardProcess(SlowConfig()).score([Text('a', 1, True)], [Prompt('p', 0)], 60.0)\n"
    )
    environment = {
        **os.environ,
        "KILLED_WHILE": killed_while,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    parent = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment)
    while not (tmp_path / "waiting").exists():
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    (tmp_path / "killed").touch()
    assert parent.stderr is not None
    assert parent.stderr.read() == ""  # to its end: the process has ended too
