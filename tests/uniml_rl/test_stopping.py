"""SIGTERM and SIGUSR1: the run saves, says so, and the same command ends it as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_policy import ToyPolicy
from toy_runs import COUNT_B, Surprise, held_out, rows_of, stage, weights_of, write_run

from uniml_rl import checkpoint, curriculum, run
from uniml_rl.engines.endings import StoppedError
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.evaluation import Evaluator
from uniml_rl.run import train_from_yaml
from uniml_rl.stopping import SIGNALS, Stop


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, with evaluations, rewards that remember, an average and a critic."""
    folder = tmp_path_factory.mktemp("config")
    first = stage(
        folder,
        "first",
        rewards={"surprise": {"type": "toy_runs:SurpriseConfig"}},
        algorithm={"name": "grpo", "minibatches": 2, "replay": {"iterations": 2}},
        ema={"decay": 0.5},
        evaluation=held_out(folder, every=2),
        until={"iterations": 5},
    )
    second = stage(folder, "second", rewards=COUNT_B, algorithm={"name": "ppo"}, critic={}, until={"iterations": 3})
    return write_run(folder, first, second, checkpoint={"every": 3})


@pytest.fixture(scope="module")
def uninterrupted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_from_yaml(config, [], folder)
    return folder


def saved_iterations(folder: Path) -> int:
    latest = checkpoint.CheckpointStore(folder / "checkpoints", 1).latest()
    return int(latest.name.removeprefix("iteration-")) if latest else 0


def signal_at(monkeypatch: pytest.MonkeyPatch, target: object, name: str, call: int) -> None:
    """Has this process get a SIGTERM at the n-th call of `target.name`."""
    original, calls = getattr(target, name), [0]

    def counted(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)


MOMENTS = {
    "start-up": (run, "preflight", 1, 0),
    "first evaluation": (Evaluator, "sample", 1, 0),
    "rollout": (ToyPolicy, "rollout", 4, 2),  # after those of the first evaluation and of one iteration
    "reward": (Surprise, "score", 2, 1),
    "update": (TorchEngine, "step", 7, 4),
    "evaluation": (Evaluator, "sample", 3, 2),  # with the averaged weights
    "checkpoint": (checkpoint, "store", 1, 3),
    "end of a stage": (curriculum, "export_policy", 1, 5),
    "between stages": (checkpoint, "sync_folder", 6, 5),
    "opening": (TorchEngine, "attach", 2, 5),
    "second stage": (TorchEngine, "step", 11, 6),
    "end of the run": (curriculum, "export_policy", 2, 8),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stopped_run_has_saved_what_it_did_and_ends_like_an_uninterrupted_one(
    config: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    target, name, call, saved = MOMENTS[moment]
    stop = Stop()
    with monkeypatch.context() as patch, stop.listening():
        signal_at(patch, target, name, call)
        if saved == 8:
            train_from_yaml(config, [], tmp_path, stop)  # nothing is left to stop
        else:
            with pytest.raises(StoppedError, match="Stopped by SIGTERM; the same command continues"):
                train_from_yaml(config, [], tmp_path, stop)
    assert stop.signal == "SIGTERM"
    assert saved_iterations(tmp_path) == saved
    train_from_yaml(config, [], tmp_path)
    assert torch.equal(weights_of(tmp_path), weights_of(uninterrupted))
    assert rows_of(tmp_path) == rows_of(uninterrupted)


def test_signals_are_the_process_s_own_again_afterwards() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = Stop()
    with stop.listening():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"!")
            time.sleep(60)  # as a process that a reward forks would
            os._exit(0)
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert stop.signal == ""


STUCK = """
import ctypes, os, sys, threading, time
from uniml_rl import stopping

def signals():
    for number in map(int, sys.argv[2:]):
        time.sleep(0.3)
        os.kill(os.getpid(), number)
    time.sleep(0.3)
    libc.pthread_mutex_unlock(lock)

stopping._SAME = float(sys.argv[1])
libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
stop = stopping.Stop()
with stop.listening():
    stop.postpone()
    threading.Thread(target=signals).start()
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)  # a wait that no signal interrupts, as in an exchange
print("ended by itself after", stop.signal)
"""


@pytest.mark.parametrize(
    ("same", "numbers", "code"),
    [
        (0, [signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM),
        (0, [signal.SIGUSR1, signal.SIGTERM], 128 + signal.SIGTERM),
        (60, [signal.SIGTERM, signal.SIGTERM], 0),  # the launcher's copy of the first
    ],
)
def test_a_second_signal_ends_at_once_a_process_that_waits_outside_of_python(
    same: int, numbers: list[int], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(same), *map(str, map(int, numbers))], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert (done.stdout == f"ended by itself after {signal.Signals(numbers[0]).name}\n") == (code == 0)
    assert ("A second signal: this process ends without saving." in done.stderr) == (code != 0)
