"""Every mode of the engines beside one process, for every case: samples, gradients, updates and metrics.

    python scripts/proofs/parity.py --out docs/parity.md
    python scripts/proofs/parity.py --ranks 4 --modes fsdp hsdp --cases "gpt2 ppo"

All modes run in one set of processes over gloo, on the CPU in float32. The bounds are those of the test suite, which
runs a part of this table (tests/uniml_rl/test_ranks.py); the exit code is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (5e-2, 5e-1)}
"""Of the relative distance of the first gradient, and of the update."""
COLOURS = 1.01 / 255


def pairs(modes: list[str] | None, cases: list[str] | None) -> list[tuple[str, str]]:
    """(mode, case); policies whose rollouts are no forward passes of their modules need whole weights in them, and
    heads are divided of those alone that have enough."""
    from contracts.catalog import DIVISIBLE
    from rank_work import CASES, MODES

    return [
        (mode, case)
        for case in cases or CASES
        for mode in modes or MODES
        if not (MODES[mode].rollout_weights == "sharded" and CASES[case][0] == "toy")
        and (getattr(MODES[mode], "tensor_parallel", 1) == 1 or CASES[case][0] in DIVISIBLE)
    ]


def work(folder: Path, table: list[tuple[str, str]], precision: str) -> None:
    """What each rank does; rank 0 writes a line of results after each pair."""
    import torch
    from contracts.catalog import run_config
    from rank_work import CASES, MODES, Run, compare

    from uniml_rl.engines.ranks import ending_together, launched
    from uniml_rl.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    launch = launched()
    own = folder / f"models-{launch.rank}"
    own.mkdir()
    configs = {entry: run_config(entry, own / entry) for entry in {CASES[case][0] for _, case in table}}
    alone: tuple[str, Run | None] = ("", None)
    with ending_together(launch), (folder / f"results-{launch.rank}.jsonl").open("w") as results:
        for mode, case in table:
            config = configs[CASES[case][0]]
            engine = MODES[mode].model_copy(update={"precision": precision}).build()
            if alone[0] != case:
                alone = case, Run(case, TorchEngine("cpu", precision), config, own) if launch.rank == 0 else None
            started = time.monotonic()
            found = compare(case, alone[1], engine, config, own)
            print(json.dumps([mode, case, found, time.monotonic() - started]), file=results, flush=True)


def start(ranks: int, folder: Path, table: list[tuple[str, str]], precision: str) -> list[dict[str, Any]]:
    """Runs the processes and returns what rank 0 found."""
    from pairs import start_ranks

    (folder / "table.json").write_text(json.dumps(table))
    processes = start_ranks(ranks, [__file__, "--worker", str(folder), "--precision", precision])
    said = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    lines = (folder / "results-0.jsonl").read_text().splitlines()
    rows = [dict(zip(("mode", "case", "found", "seconds"), json.loads(line), strict=True)) for line in lines]
    if any(codes):
        sys.exit(f"{said[0][1][-3000:]}\nthe processes ended with {codes} after {len(rows)} of {len(table)} pairs.")
    return rows


def holds(found: dict[str, Any], precision: str) -> bool:
    """Whether the pair keeps the bounds. In half precision, samples may part after the first update."""
    gradient, update = BOUNDS[precision]
    alike = precision != "fp32" or (found["samples"] <= COLOURS and not found["metrics"])
    return bool(alike and found["gradient"] <= gradient and found["update"] <= update)


def as_markdown(rows: list[dict[str, Any]], ranks: int, precision: str) -> str:
    about = (
        f"Made by `python scripts/proofs/parity.py`: {ranks} processes over gloo beside one, on the CPU in "
        f"{precision}, tiny models, 5 iterations of AdamW (20 steps for PPO), 3 prompts that the ranks cannot share "
        "equally. Relative L2 distances of the first step's gradient and of the whole update; samples are equal but "
        "for colours by one level (1/255); every metric agrees to 1e-3, or is named."
    )
    lines = [
        "# Parity of the engines",
        "",
        *wrap(about, 120),
        "",
        "| policy, algorithm | engine | samples | gradient | update | metrics |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row["found"]
        samples = "equal" if found["samples"] == 0 else f"{found['samples'] * 255:.0f}/255"
        metrics = "equal" if not found["metrics"] else "; ".join(found["metrics"][:2])
        distances = f"{found['gradient']:.0e} | {found['update']:.0e}"
        lines.append(f"| {row['case']} | {row['mode']} | {samples} | {distances} | {metrics} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precision", choices=BOUNDS, default="fp32")
    parser.add_argument("--modes", nargs="*")
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, json.loads((arguments.worker / "table.json").read_text()), arguments.precision)
        return
    with tempfile.TemporaryDirectory() as folder:
        table = pairs(arguments.modes, arguments.cases)
        rows = start(arguments.ranks, Path(folder), table, arguments.precision)
    text = as_markdown(rows, arguments.ranks, arguments.precision)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    broken = [f"{row['mode']}: {row['case']}" for row in rows if not holds(row["found"], arguments.precision)]
    if broken:
        sys.exit(f"outside of the bounds: {broken}")


if __name__ == "__main__":
    main()
