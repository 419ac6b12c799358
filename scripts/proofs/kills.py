"""Kills runs at random moments and compares their ends with an uninterrupted run's, bit for bit.

    python scripts/proofs/kills.py configs/quickstart.yaml --kills 20 --runs runs/kills
    python scripts/proofs/kills.py scripts/proofs/kills.yaml --ranks 2 --kills 20 --runs runs/rank-kills

Every kill comes after a random share of the time that the uninterrupted run took, imports and the loading of models
included, so kills fall before the first checkpoint, into rollouts, updates, writes and evaluations. The same command
follows until a run reaches its end; that is compared, and the next run begins.

With several ranks one of them, drawn at random, gets the signal: SIGKILL or SIGTERM, and some of the jobs run under
`torchrun --max-restarts 3`, which goes on by itself. There, SIGTERM goes to torchrun. All ranks must have ended within
a minute. Four of five signals come after a share of the time from the first iteration on, since small runs take longer
to start than to train. What is printed is a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.engines.endings import REQUEUE

VOLATILE = ("time/", "throughput/", "memory/")
LIMIT, LAUNCHER_STEPS_IN = 60.0, 30.0
"""Seconds: in which all ranks must have ended, and after which the ones that have not met yet are ended, as srun and
torchrun do: a rank that never met another one cannot miss it."""
KILL, TERM = signal.SIGKILL, signal.SIGTERM
KINDS = [(KILL, False), (KILL, True), (TERM, False), (KILL, False), (KILL, False), (TERM, True), (KILL, False)]
"""Signals in turn, and whether the job runs under torchrun."""


class Job:
    """The training command, in one process or several."""

    def __init__(self, command: list[str], log: Path, ranks: int = 1, torchrun: bool = False) -> None:
        self.log, self.ranks, self.torchrun = log, ranks, torchrun
        with log.open("w") as output, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])

            def start(*launcher: str, **more: str) -> subprocess.Popen[bytes]:
                line = [sys.executable, *launcher, *command]
                return subprocess.Popen(line, stdout=output, stderr=output, env=os.environ | more)

            if torchrun:
                launcher = "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3"
                self.processes = [start("-m", "torch.distributed.run", *launcher)]
            elif ranks == 1:
                self.processes = [start()]
            else:
                world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
                self.processes = [start(**world, RANK=str(r), LOCAL_RANK=str(r)) for r in range(ranks)]

    def workers(self) -> dict[int, int]:
        """The process of each rank; fewer while torchrun starts."""
        if not self.torchrun:
            return {rank: process.pid for rank, process in enumerate(self.processes)}
        children = Path(f"/proc/{self.processes[0].pid}/task/{self.processes[0].pid}/children").read_text().split()
        ranks = {pid: re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()) for pid in children}
        return {int(rank[1]): int(pid) for pid, rank in ranks.items() if rank}

    def wait(self, seconds: float | None) -> bool:
        """Whether everything has ended in the time."""
        until = time.monotonic() + (seconds or 1e9)
        while time.monotonic() < until:
            if all(process.poll() is not None for process in self.processes):
                return True
            time.sleep(0.05)
        return False

    @property
    def codes(self) -> list[int | None]:
        """The exit codes."""
        return [process.returncode for process in self.processes]

    def wait_for_training(self) -> None:
        """Until the first iteration is about to begin, or everything has ended."""
        while not re.search("^[^:]*: (starts|continues after)", self.log.read_text(), re.MULTILINE):
            if self.wait(0.05):
                return

    def succeeded(self) -> bool:
        """Whether the run, which has ended, is finished. Ends this script if it failed by itself."""
        if any(self.codes):
            raise SystemExit(f"training failed with {self.codes}:\n{self.log.read_text()[-3000:]}")
        return True


@dataclass(frozen=True)
class Killed:
    """What one signal did."""

    rank: int
    phase: str  # of the rank that got it
    seconds: float  # until all ranks had ended
    reason: str  # as printed


def deliver(job: Job, number: signal.Signals, chance: random.Random) -> Killed:
    """Sends the signal to one rank (or SIGTERM to torchrun) and waits until all are gone, or torchrun has replaced
    them."""
    while len(workers := job.workers()) < job.ranks:
        time.sleep(0.05)
    rank = chance.randrange(job.ranks)
    os.kill(job.processes[0].pid if job.torchrun and number == TERM else workers[rank], number)
    sent = time.monotonic()
    ended, again = False, LAUNCHER_STEPS_IN
    while not ended and time.monotonic() - sent < LIMIT:
        ended = not any(map(_alive, workers.values())) if job.torchrun and number == KILL else job.wait(0.2)
        if not ended and not job.torchrun and time.monotonic() - sent > again:
            again += 5  # the second one ends also a process that waits for the others to come
            for process in job.processes:
                process.terminate()
    seconds, said = time.monotonic() - sent, job.log.read_text()
    if not ended:
        raise SystemExit(f"after {LIMIT:.0f} s not all ranks had ended:\n{said[-3000:]}")
    where = re.findall(rf"^  rank {rank}: (.*?) for \d+ s", said, re.MULTILINE)
    if re.search(r"^\[rank\d+\]: Traceback", said, re.MULTILINE):
        raise SystemExit(f"{job.log}: a rank ended with a traceback where one message says why")
    reasons = re.findall(r"^(?:Error|Stopped).*", said, re.MULTILINE)
    return Killed(rank, where[-1] if where else "", seconds, reasons[-1] if reasons else "")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rows(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """The metrics without what a clock measures."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["stage"], line["iteration"], {k: v for k, v in line["metrics"].items() if not k.startswith(VOLATILE)})
        for line in lines
    ]


def differences(folder: Path, other: Path) -> list[str]:
    """What differs between the ends of two runs; empty if they are equal bit for bit."""
    found = []
    newest = [CheckpointStore(run / "checkpoints", keep=1).latest() for run in (folder, other)]
    if newest[0] is None or newest[1] is None:
        return ["a run has no checkpoint"]
    first, second = (load_checkpoint(path).weights for path in newest if path is not None)
    for name in sorted(first.keys() | second.keys()):
        mine, theirs = first.get(name, {}), second.get(name, {})
        if mine.keys() != theirs.keys() or any(not torch.equal(mine[key], theirs[key]) for key in mine):
            found.append(f"weights of {name}")
    if rows(folder) != rows(other):
        found.append("metrics.jsonl")
    return found


def interrupted(
    command: list[str],
    folder: Path,
    durations: tuple[float, float],
    kinds: Iterator[tuple[signal.Signals, bool]],
    left: int,
    ranks: int,
    chance: random.Random,
) -> int:
    """Trains with kills, at most `left` of them, to the end; how many there were. Prints a row for each.

    `durations` are those of the whole command and of its training.
    """
    kills = 0
    while True:
        number, torchrun = next(kinds) if kills < left else (KILL, False)
        job = Job(command, folder.with_suffix(f".{kills}.log"), ranks, torchrun and ranks > 1)
        in_training = kills < left and ranks > 1 and chance.random() < 0.8
        seconds = chance.uniform(0, durations[in_training]) if kills < left else None
        if in_training:
            job.wait_for_training()
        if job.wait(seconds) and job.succeeded():
            return kills
        killed = deliver(job, number, chance)
        kills += 1
        newest = CheckpointStore(folder / "checkpoints", keep=1).latest()
        target = "torchrun" if job.torchrun and number == TERM else f"rank {killed.rank}"
        print(
            f"| {folder.name} | {number.name} to {target}{' under torchrun' * job.torchrun} | "
            f"{seconds:.1f}{' of training' * in_training} | {killed.phase or '-'} | "
            f"{killed.seconds:.1f} | {', '.join(map(str, job.codes))} | "
            f"{newest.name.removeprefix('iteration-').lstrip('0') if newest else '-'} | {killed.reason[:90]} |",
            flush=True,
        )
        if number == TERM and not job.torchrun and killed.phase and set(job.codes) != {REQUEUE}:
            raise SystemExit(f"SIGTERM ended with {job.codes}")
        if job.torchrun and number == KILL and job.wait(None) and job.succeeded():
            return kills


def main() -> None:
    """Trains once without interruption, then with kills until there were enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/kills"), help="an empty folder")
    arguments = parser.parse_args()
    if arguments.runs.exists():
        raise SystemExit(f"{arguments.runs} exists; name an empty folder.")
    arguments.runs.mkdir(parents=True)
    chance, kinds = random.Random(arguments.seed), itertools.cycle(KINDS if arguments.ranks > 1 else [(KILL, False)])
    command = ["-m", "uniml_rl", "train", arguments.config, *arguments.overrides, "--folder"]
    whole, started = arguments.runs / "whole", time.perf_counter()
    job = Job([*command, str(whole)], arguments.runs / "whole.log", arguments.ranks)
    job.wait_for_training()
    until_training = time.perf_counter() - started
    job.wait(None)
    job.succeeded()
    duration = time.perf_counter() - started
    durations = (duration, duration - until_training)
    print(f"uninterrupted: {duration:.0f} s, of which training {durations[1]:.0f} s\n", flush=True)
    print("| run | signal | after s | what the rank was doing | all ended in s | exit codes | checkpoint | message |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    kills, ends = 0, list[str]()
    for run in itertools.count(1):
        folder = arguments.runs / f"run-{run}"
        kills += interrupted(
            [*command, str(folder)], folder, durations, kinds, arguments.kills - kills, arguments.ranks, chance
        )
        found = differences(folder, whole)
        ends.append(f"{folder.name}: {'DIFFERENT: ' + ', '.join(found) if found else 'equal bit for bit'}")
        if kills >= arguments.kills:
            break
    print("\n" + "\n".join(ends))
    raise SystemExit(any("DIFFERENT" in end for end in ends))


if __name__ == "__main__":
    main()
