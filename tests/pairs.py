"""Processes that tests start: two ranks without a launcher that would end one when the other does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
LIMIT = 900
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(command: Sequence[str], environment: dict[str, str], program: str = sys.executable) -> subprocess.Popen[str]:
    """A process that finds the tests' own components."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    shared = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    shared |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    shared["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # `python` is this one
    return subprocess.Popen(
        [program, *command], env=shared | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start_pair(command: Sequence[str], **environment: str) -> list[subprocess.Popen[str]]:
    """Two ranks without a launcher that would end one when the other does."""
    return start_ranks(2, command, **environment)


def start_ranks(ranks: int, command: Sequence[str], **environment: str) -> list[subprocess.Popen[str]]:
    """As many ranks, without a launcher."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(ranks)}
    numbers = [str(rank) for rank in range(ranks)]
    return [start(command, address | {"RANK": number, "LOCAL_RANK": number} | environment) for number in numbers]


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each; all are ended if one of them hangs."""
    try:
        said = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]
