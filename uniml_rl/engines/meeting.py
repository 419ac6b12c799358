"""How the processes of a run find each other at its start, and what they say while one of them is awaited."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from modalities.errors import UserError
from uniml_rl.engines.endings import MISTAKE, EndedByAnotherRankError, LostRankError

PATIENCE = 600.0
"""Seconds for which a process waits for the last one to start, unless the configuration says otherwise."""
KEY = "engine.start_timeout_seconds"
_SILENCE, _AGAIN, _POLL = 5.0, 60.0, 0.1
"""Seconds: after which a process that waits says for whom, says the same again, and asks again."""
_REQUEST = timedelta(minutes=10)
"""Longest wait for one answer of the store."""
_COME, _HERE = "come", "here-{}"
ENDED = "ended"
"""Under which the first rank that ends says so."""


def launcher_keeps_store() -> bool:
    """Whether the store that the ranks meet at is torchrun's, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def reason(error: Exception) -> str:
    """The first sentence of what torch says, without the place in its sources."""
    return re.sub(r"^\[\S+\] ", "", str(error)).split("\n")[0].split(". ")[0].rstrip(".")


def meet(rank: int, world_size: int, patience: float) -> tuple[dist.Store, str]:
    """The store of the run, once every rank has come to it, and how an earlier attempt ended, if that is in it still.

    After some seconds stderr says which ranks are awaited. Raises UserError if they have not come after `patience`
    seconds, EndedByAnotherRankError where another rank says so, and LostRankError if the store is gone.
    """
    waiting = _Waiting(rank, world_size, patience)
    store = _store(waiting)
    kept = dist.PrefixStore("uniml-rl", store)
    try:
        # Before any of these ranks can have ended, which they do after all have come.
        stale = kept.get(ENDED).decode() if launcher_keeps_store() and kept.check([ENDED]) else ""
        _await_all(dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store), waiting)
    except RuntimeError as error:
        raise LostRankError(
            f"rank {rank} of {world_size} lost the meeting point before all had come ({reason(error)}): rank 0, or the "
            "launcher, has ended."
        ) from error
    return kept, stale


class _Waiting:
    """How long this process has waited, and what it has said."""

    def __init__(self, rank: int, world_size: int, patience: float) -> None:
        self.rank, self.world_size, self.patience = rank, world_size, patience
        self.begun = time.monotonic()
        self._looks, self._said, self._said_at = self.begun + _SILENCE, "", self.begun

    def is_over(self) -> bool:
        return time.monotonic() - self.begun > self.patience

    def is_time_to_look(self) -> bool:
        """For whom it is."""
        is_time = time.monotonic() > self._looks or self.is_over()
        if is_time:
            self._looks = time.monotonic() + _SILENCE
        return is_time

    def say(self, what: str) -> None:
        """What is new, or was said long ago."""
        if what == self._said and time.monotonic() - self._said_at < _AGAIN:
            return
        self._said, self._said_at = what, time.monotonic()
        print(
            f"rank {self.rank} of {self.world_size} waits {what}, for at most {self.patience:g} seconds from its start "
            f"({KEY}).",
            file=sys.stderr,
            flush=True,
        )


def _store(waiting: _Waiting) -> dist.Store:
    """torchrun's, or one that rank 0 opens and the others look for."""
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        if launcher_keeps_store():
            store: dist.Store = next(iter(dist.rendezvous("env://", timeout=_REQUEST)))[0]
            return store
        if waiting.rank != 0:
            _await_answer(host, int(port), waiting)
        return dist.TCPStore(
            host, int(port), None, waiting.rank == 0, _REQUEST, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
            f"rank {waiting.rank} of {waiting.world_size} did not meet the others at {host}:{port} (MASTER_ADDR and "
            f"MASTER_PORT): {reason(error)}. Have all {waiting.world_size} processes started, and can this machine "
            f"reach that address? It waits for {waiting.patience:g} seconds ({KEY})."
        ) from error


def _await_answer(host: str, port: int, waiting: _Waiting) -> None:
    """Raises OSError if there is none in time. torch's own attempts would each print where in torch they failed."""
    while True:
        try:
            socket.create_connection((host, port), timeout=_SILENCE).close()
        except OSError:
            if waiting.is_over():
                raise
            if waiting.is_time_to_look():
                waiting.say(f"for rank 0, which does not answer yet at {host}:{port} (MASTER_ADDR and MASTER_PORT)")
            time.sleep(_POLL)
        else:
            return


def _await_all(store: dist.Store, waiting: _Waiting) -> None:
    store.set(_HERE.format(waiting.rank), "")
    come = store.add(_COME, 1)
    while come < waiting.world_size:
        if waiting.is_time_to_look():
            _say_who_is_awaited(store, waiting)
        time.sleep(_POLL)
        come = store.add(_COME, 0)


def _say_who_is_awaited(store: dist.Store, waiting: _Waiting) -> None:
    """By the first rank that has come; the others stay silent."""
    here = [rank for rank in range(waiting.world_size) if store.check([_HERE.format(rank)])]
    awaited = [rank for rank in range(waiting.world_size) if rank not in here]
    if waiting.is_over() and awaited:
        if here[0] != waiting.rank:
            raise EndedByAnotherRankError(here[0], MISTAKE)
        raise UserError(
            f"rank {_listed(awaited)} of {waiting.world_size} did not come within {waiting.patience:g} seconds "
            f"({KEY}); rank {_listed(here)} did. Start all {waiting.world_size} processes (WORLD_SIZE), with the same "
            "MASTER_ADDR and MASTER_PORT, or use torchrun."
        )
    if here[0] == waiting.rank and awaited:
        waiting.say(f"for rank {_listed(awaited)}; rank {_listed(here)} has come")


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} ... ({len(ranks)} of them)"
