"""Calls that end in time: in a thread that is left behind, or in a process that is killed. No signals, any thread.

A thread is cheap and shares the models, but Python cannot stop it: a call that never returns keeps its thread (counted,
and at most `MAX_ABANDONED` of them). It cannot help either against code that holds the interpreter lock, since the
waiting thread would never run again. Verifiers over strings are of that kind, so they are scored in a process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from modalities.errors import UserError
from modalities.samples import Prompt, Sample
from rewards.base import RewardConfig

MAX_ABANDONED = 16
START_SECONDS = 300.0
_GRACE_SECONDS = 5.0

_abandoned: list[threading.Thread] = []


class ScoringError(RuntimeError):
    """One call of `score` failed. `reason` is a short name that failures are counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class TooManyHangingError(RuntimeError):
    """`MAX_ABANDONED` calls timed out and still run: the reward is broken, and masking more samples would hide it."""


def call_in_thread(function: Callable[[], Tensor], seconds: float) -> Tensor:
    """`function()` in a daemon thread with the caller's grad mode and CUDA device.

    Raises ScoringError("time_out") after `seconds`, TooManyHangingError, and whatever `function` raises.
    """
    outcome: list[tuple[Tensor | None, BaseException | None]] = []
    grad = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def work() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            with torch.set_grad_enabled(grad):
                outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
    if len(_abandoned) >= MAX_ABANDONED:
        raise TooManyHangingError(f"{MAX_ABANDONED} calls of rewards timed out and still run; what do they wait for?")
    thread = threading.Thread(target=work, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if not outcome:
        _abandoned.append(thread)
        raise ScoringError("time_out", f"no answer within {seconds:g} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    assert value is not None
    return value


class RewardProcess:
    """A reward built again from its configuration in a process of its own, on the CPU and without gradient.

    Started at the first call and after a kill; the wait for its start is not part of the time-out. The configuration's
    class must be importable there (a module, not a script's `__main__`), samples and prompts must pickle.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], seconds: float) -> Tensor:
        """[B] float32. Raises ScoringError: "time_out", "process_died", or the name of the exception's class."""
        connection = self._start() if self._connection is None else self._connection
        try:
            _send(connection, (list(samples), list(prompts), seconds))
            answered = connection.poll(seconds)
            reply = pickle.loads(connection.recv_bytes()) if answered else None
        except (EOFError, OSError):
            self.close()
            raise ScoringError("process_died", "the process that scores it died") from None
        if reply is None:
            self.close()
            raise ScoringError("time_out", f"no answer within {seconds:g} s")
        return torch.tensor(_unwrap(reply), dtype=torch.float32)

    def close(self) -> None:
        """Kills the process, if any."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> Connection:
        connection, theirs = multiprocessing.Pipe()
        # A fresh interpreter: fork would copy a threaded parent's locks, and multiprocessing's spawn runs a user's
        # unguarded script again. What tells the run to stop reaches its whole process group or container, but the
        # iteration at hand still needs its scores.
        command = (
            "import signal; [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGTERM, signal.SIGUSR1)]; "
            f"import sys; sys.path[:] = {sys.path!r}; from rewards.isolation import serve; serve({theirs.fileno()})"
        )
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-c", command], pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._connection = connection
        try:
            _send(connection, self._config)
            if not connection.poll(START_SECONDS):
                raise TimeoutError(f"not ready after {START_SECONDS:g} s")
            _unwrap(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError, UserError, ScoringError) as error:
            self.close()
            raise UserError(
                f"The process of the reward {type(self._config).__name__} did not start: {error}"
            ) from error
        return connection


def serve(handle: int) -> None:
    """The process's side: builds the reward, then answers each request with its scores or with the exception.

    It ends silently when the parent is gone.
    """
    connection = Connection(handle)
    try:
        config = pickle.loads(connection.recv_bytes())
        try:
            reward = config.build("cpu")
        except Exception as error:
            _send(connection, error_reply(error))
            return
        _send(connection, ("ok", None))
        while True:
            _answer(connection, reward)
    except (EOFError, OSError):  # every failure of the reward itself is a reply
        return


def _answer(connection: Connection, reward: Any) -> None:
    samples, prompts, seconds = pickle.loads(connection.recv_bytes())
    # Should the parent be gone when the time is up, nobody else would end this process.
    faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True)
    try:
        with torch.no_grad():
            reply = ("ok", reward.score(samples, prompts).float().tolist())
    except Exception as error:
        reply = error_reply(error)
    faulthandler.cancel_dump_traceback_later()
    _send(connection, reply)


def error_reply(error: Exception) -> tuple[str, Any]:
    """An exception as plain strings: not every exception survives pickling."""
    kind = "user_error" if isinstance(error, UserError) else type(error).__name__
    return kind, f"{error}\n{traceback.format_exc()}" if kind != "user_error" else str(error)


def _unwrap(reply: tuple[str, Any]) -> Any:
    kind, value = reply
    if kind == "user_error":
        raise UserError(value)
    if kind != "ok":
        raise ScoringError(kind, value)
    return value


def _send(connection: Connection, value: Any) -> None:
    # Plain pickle: torch teaches multiprocessing's own pickler to pass tensors through shared memory, which leaks when
    # a process is killed.
    connection.send_bytes(pickle.dumps(value))
