"""The processes of a run: which one this is, how they meet, and how all of them end when one does."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

import torch
import torch.distributed as dist

from modalities.errors import UserError
from uniml_rl.engines import groups, phases
from uniml_rl.engines.endings import (
    DIVERGED,
    INTERRUPTED,
    MISTAKE,
    REQUEUE,
    DivergedError,
    EndedByAnotherRankError,
    LostRankError,
    StoppedError,
)
from uniml_rl.engines.groups import Launch
from uniml_rl.engines.meeting import ENDED, PATIENCE, launcher_keeps_store, meet, reason
from uniml_rl.engines.phases import Phase

_POLL, _GRACE, _GRACE_AT_START, _FAREWELL = 0.5, 10.0, 1.0, 5.0
"""Seconds: between two looks for an ending, until a rank that does not notice by itself is ended (before a stage has
begun, where it has nothing to lose), and for which rank 0 stays so that the others can read why."""
_HEARTBEAT = 5.0
"""Seconds after which a rank says again where it is, though nothing has changed."""
_LEFT, _PHASE = "left", "phase-{}"
_PACKAGE = str(Path(__file__).resolve().parents[1])
_EXCHANGES, _GLOO = str(Path(dist.__file__).parent), "/gloo/transport/"


def launched() -> Launch:
    """Reads RANK, LOCAL_RANK and WORLD_SIZE, which torchrun and others set; without WORLD_SIZE it is one process.

    Raises UserError if a variable is missing or no number.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return Launch()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    wrong = [f"{name}={os.environ[name]}" for name in names if not os.environ.get(name, "0").isdigit()]
    if missing or wrong:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} asks for several processes, but the environment has "
            f"{'no ' + ', '.join(missing) if missing else ' '.join(wrong) + ', which is no number'}. Start them with "
            "`torchrun --nproc-per-node N -m uniml_rl train ...`, or unset WORLD_SIZE for one process."
        )
    on_node = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    rank, local_rank, world_size = (int(os.environ[name]) for name in names)
    if rank >= world_size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={world_size}; ranks count from 0.")
    return Launch(rank, local_rank, world_size, int(on_node))


def gather_on_first(value: Any) -> list[Any]:
    """On rank 0 the values of all ranks, in their order; nothing on the others. Values must pickle."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    with exchanging("gathering on rank 0"):
        dist.gather_object(value, everyone)
    return everyone or []


@contextmanager
def exchanging(what: str) -> Iterator[None]:
    """Turns the failure of an exchange between ranks into a LostRankError; other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if not _comes_from_exchange(error):
            raise
        raise _lost(what, error, _place(_outward(sys._getframe()))) from error


def _comes_from_exchange(error: BaseException) -> TypeGuard[RuntimeError]:
    """Whether an exchange failed, for which torch has no class that all of its backends raise.

    It comes out of torch.distributed, or says that a backend failed: where a library waits for an exchange that it
    began before, there is no frame but the library's own.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError) or not dist.is_initialized():
        return False
    innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-4:]
    comes_out_of_it = any(frame.f_code.co_filename.startswith(_EXCHANGES) for frame in innermost)
    return comes_out_of_it or isinstance(error, dist.DistError) or _GLOO in str(error)


def _lost(what: str, error: RuntimeError, place: str) -> LostRankError:
    return LostRankError(
        f"rank {dist.get_rank()} of {dist.get_world_size()} lost another one while {what}, in {place}: "
        f"{reason(error)}. A process was killed, a node or the network failed, or engine.timeout_seconds passed. The "
        "same command continues from the last checkpoint."
    )


def as_lost_rank(error: BaseException) -> BaseException:
    """A LostRankError in place of what came out of an exchange that a library makes inside of a model's pass."""
    if not _comes_from_exchange(error):
        return error
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
    return _lost("running a model", error, _place(frames))


@contextmanager
def ending_together(launch: Launch, patience: float = PATIENCE) -> Iterator[None]:
    """Whatever ends the block with an exception on one rank ends it on all, once all have met.

    They wait for the last one for `patience` seconds; a UserError says who has not come. The exception leaves the
    context on the rank that was first; on the others EndedByAnotherRankError does, also in place of what a wait for
    that rank raised, and a rank that does not even wait is ended after some seconds. A LostRankError says what each
    rank was doing. In one process it does nothing.
    """
    if launch.world_size == 1:
        yield
        return
    meeting = _Meeting(launch, *meet(launch.rank, launch.world_size, patience))
    try:
        yield
    except BaseException as error:
        raise meeting.first_to_end(as_lost_rank(error)) from error
    finally:
        meeting.stop_watching()
        groups.end()


def _exit_code(error: BaseException) -> int:
    codes = {UserError: MISTAKE, DivergedError: DIVERGED, StoppedError: REQUEUE, KeyboardInterrupt: INTERRUPTED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


class _Meeting:
    """What the ranks tell one another besides their exchanges, in a store: how the run ended, and where each is."""

    def __init__(self, launch: Launch, store: dist.Store, stale: str) -> None:
        self.launch, self.store, self.stale = launch, store, stale
        self.seen: dict[int, str] = {}
        self._ending = ""  # how another rank has ended the run, as soon as it is known
        self._said, self._said_at = Phase(), 0.0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._watched, daemon=True)
        self._watch.start()

    def stop_watching(self) -> None:
        """From here on nothing is asked of the store, which another rank may end, without this one's knowing."""
        self._over.set()
        phases.changed.set()
        self._watch.join()

    def _watched(self) -> None:
        """Publishes this rank's phase, and ends it when another one has ended the run and it cannot notice."""
        said = self.stale
        while said == self.stale and not self._over.is_set():
            phases.changed.wait(_POLL)
            phases.changed.clear()
            try:
                self._say_phase()
                if self.launch.rank != 0:
                    self._read_phase(0)  # while its process lives, which may be the one that keeps the store
                said = self.store.get(ENDED).decode() if self.store.check([ENDED]) else self.stale
            except RuntimeError:  # the store is gone; the next exchange says what happened
                return
        if said == self.stale:
            return
        self._ending = said
        if self._over.wait(_GRACE if phases.now().stage else _GRACE_AT_START):
            return
        ending = json.loads(said)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        print(
            f"rank {self.launch.rank} ends, because rank {ending['rank']} did; it was in {phases.now()}, in "
            f"{_place(_outward(frame))}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ending["exit_code"])

    def first_to_end(self, error: BaseException) -> BaseException:
        """Says to the other ranks that the run ends. The error itself if no rank was faster."""
        own = json.dumps({"rank": self.launch.rank, "exit_code": _exit_code(error), "at": time.time()})
        try:
            said = self.store.compare_set(ENDED, self.stale, own).decode()
        except RuntimeError:  # the store died with the process that kept it
            if not self._ending:  # and nobody else can say why
                return self._with_phases(error)
            said = self._ending
        ending = json.loads(said)
        if ending["rank"] == self.launch.rank:
            error = self._with_phases(error)
        else:
            error = EndedByAnotherRankError(ending["rank"], ending["exit_code"])
        self.stop_watching()  # rank 0 and its store leave when all the others have said that they do
        with suppress(RuntimeError):
            left, until = self.store.add(_LEFT, 1), time.monotonic() + _FAREWELL
            keeps_store = self.launch.rank == 0 and not launcher_keeps_store()
            while keeps_store and left < self.launch.world_size and time.monotonic() < until:
                time.sleep(0.05)
                left = self.store.add(_LEFT, 0)
        return error

    def _say_phase(self) -> None:
        if phases.now() is not self._said or time.monotonic() - self._said_at > _HEARTBEAT:
            self._said, self._said_at = phases.now(), time.monotonic()
            self.seen[self.launch.rank] = f"{time.time()} {self._said.dumps()}"
            self.store.set(_PHASE.format(self.launch.rank), self.seen[self.launch.rank])

    def _read_phase(self, rank: int) -> None:
        if self.store.check([_PHASE.format(rank)]):
            self.seen[rank] = self.store.get(_PHASE.format(rank)).decode()

    def _with_phases(self, error: BaseException) -> BaseException:
        if not isinstance(error, LostRankError):
            return error
        with suppress(RuntimeError):
            self._say_phase()
            for rank in range(self.launch.world_size):
                self._read_phase(rank)
        lines = [f"  rank {rank}: {_when(self.seen.get(rank))}" for rank in range(self.launch.world_size)]
        return LostRankError("\n".join([f"{error} What each rank was doing:", *lines]))


def _when(said: str | None) -> str:
    """A published phase in words, with its age, and that of the news if there should have been newer."""
    if said is None:
        return "unknown"
    at, _, text = said.partition(" ")
    phase, silent = Phase.loads(text), time.time() - float(at)
    heard = f", last heard of {silent:.0f} s ago" if silent > 2 * _HEARTBEAT else ""
    return f"{phase} for {time.time() - phase.since:.0f} s{heard}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frames: Iterable[FrameType]) -> str:
    """Of frames, innermost first, the innermost functions of this package outside of its engines, outermost first: the
    phase of the run."""
    names: list[str] = []
    for frame in frames:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(str(Path(_PACKAGE) / "engines")):
            names.append(f"{Path(path).stem}.{frame.f_code.co_name}")
    return " > ".join(reversed(names[:3])) or "its start"
