"""Kills runs at random moments and compares their ends with an uninterrupted run's, bit for bit.

    python scripts/proofs/kills.py configs/quickstart.yaml --kills 20 --runs runs/kills

Every process is killed with SIGKILL after a random share of the time that the uninterrupted run took, imports and the
loading of models included, so kills fall before the first checkpoint, into rollouts, updates, writes and evaluations. A
run that reaches its end is compared, and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import torch

from uniml_rl.checkpoint import CheckpointStore, load_checkpoint

VOLATILE = ("time/", "throughput/", "memory/")


def start(config: str, overrides: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """The training command in a process of its own."""
    command = [sys.executable, "-m", "uniml_rl", "train", config, *overrides, "--folder", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def finish(config: str, overrides: list[str], folder: Path) -> float:
    """Runs the command to its end; the seconds that it took."""
    started = time.perf_counter()
    if start(config, overrides, folder).wait() != 0:
        raise SystemExit(f"training into {folder} failed.")
    return time.perf_counter() - started


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


def main() -> None:
    """Trains once without interruption, then with kills until there were enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/kills"), help="an empty folder")
    arguments = parser.parse_args()
    if arguments.runs.exists():
        raise SystemExit(f"{arguments.runs} exists; name an empty folder.")
    chance = random.Random(arguments.seed)
    whole = arguments.runs / "whole"
    duration = finish(arguments.config, arguments.overrides, whole)
    print(f"uninterrupted: {duration:.0f} s", flush=True)
    kills, runs, different = 0, 1, 0
    while True:
        folder = arguments.runs / f"killed-{runs}"
        process = start(arguments.config, arguments.overrides, folder)
        seconds = chance.uniform(0, duration) if kills < arguments.kills else None
        try:
            if process.wait(seconds) != 0:
                raise SystemExit(f"training into {folder} failed.")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
            latest = CheckpointStore(folder / "checkpoints", keep=1).latest()
            print(f"kill {kills}: after {seconds:.1f} s, newest checkpoint {latest and latest.name}", flush=True)
            continue
        found = differences(folder, whole)
        different += bool(found)
        print(f"{folder.name}: {'DIFFERENT: ' + ', '.join(found) if found else 'equal bit for bit'}", flush=True)
        if kills >= arguments.kills:
            raise SystemExit(different > 0)
        runs += 1


if __name__ == "__main__":
    main()
