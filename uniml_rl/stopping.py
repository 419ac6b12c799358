"""SIGTERM and SIGUSR1, by which schedulers say that a machine is taken away: the run saves, and ends to go on later."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from uniml_rl.engines.endings import StoppedError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME = 3.0
"""Seconds in which a signal is the one before it, passed on by the launcher too."""


class Stop:
    """Whether this process was told to stop. While nothing is lost by it, it stops at once, with a StoppedError."""

    def __init__(self) -> None:
        self.signal = ""
        """The first one that came, by its name."""
        self._postponed = self._listens = False

    def postpone(self) -> None:
        """From now on a signal is only kept: somebody asks for it in time, or what ends the run does so by itself."""
        self._postponed = True

    def heed(self) -> None:
        """From now on a signal raises StoppedError where the main thread is; one that was kept does so here."""
        self._postponed = False
        if self.signal:
            raise self.error("from the last checkpoint")

    @contextmanager
    def kept_at_the_end(self) -> Iterator[None]:
        """What ends the block has its exit code already, so from there on signals are only kept."""
        try:
            yield
        finally:
            self.postpone()

    def error(self, saved: str) -> StoppedError:
        """What ends the run; `saved` says where the same command goes on."""
        whose = self.signal or "a signal that another process of the run got"
        return StoppedError(f"Stopped by {whose}; the same command continues {saved}.")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals of this process, which must be in its main thread, and keeps them if there was one.

        Python calls a signal's handler in the main thread once that is back from what it waits for; a thread of its own
        sees to it that a second signal ends a process that is not.
        """
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = {number: signal.signal(number, self._keep) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._listens = True
        os.register_at_fork(after_in_child=self._after_fork)
        threading.Thread(target=_end_at_the_second, args=(reading,), daemon=True).start()
        try:
            yield
        finally:
            self._listens = False
            signal.set_wakeup_fd(wakeup)
            writing.close()
            if not self.signal:  # else a launcher may repeat it until the process has ended, which is about to
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        first, self.signal = not self.signal, self.signal or signal.Signals(number).name
        if first and not self._postponed:
            raise self.error("from the last checkpoint")

    def _after_fork(self) -> None:
        """A process that a reward forks off ends like any other, and its signals are not this one's."""
        if self._listens:
            signal.set_wakeup_fd(-1)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)


def _end_at_the_second(numbers: socket.socket) -> None:
    first = None
    with numbers:
        while received := numbers.recv(1):
            now = time.monotonic()
            if received[0] not in SIGNALS:
                continue
            if first is None:
                first = now
            elif now - first > _SAME:
                print("A second signal: this process ends without saving.", file=sys.stderr, flush=True)
                os._exit(128 + received[0])
