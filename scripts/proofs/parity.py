"""Every mode of the engines beside one process, for every case: samples, gradients, updates and metrics.

    python scripts/proofs/parity.py --out docs/parity.md
    python scripts/proofs/parity.py --ranks 4 --modes fsdp hsdp --cases "gpt2 ppo"

All modes of a table run in one set of processes over gloo, on the CPU. The bounds are those of the test suite, which
runs a part of this table (tests/uniml_rl/test_ranks.py); the exit code is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from textwrap import wrap
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
BOUNDS = {"fp32": (1e-5, 1e-3), "bf16": (2e-2, 1e-2)}
"""Of the relative distances of the first gradient and of the update; see `holds` for those of bf16."""
OTHER_BATCHES = "one process, `micro_batch: 1`"
COLOURS = 1.01 / 255
TABLES = [
    (2, "fp32", None, None),
    (2, "bf16", None, None),
    (4, "fp32", ["fsdp", "fsdp sharded", "hsdp", "tensor", "fsdp tensor"], ["llama-heads grpo", "qwen3-heads ppo"]),
]
"""(processes, precision, modes, cases); None is all of them."""
ABOUT = (
    "Made by `python scripts/proofs/parity.py --out docs/parity.md`: processes over gloo beside one, on the CPU, tiny "
    "models, 5 iterations of AdamW (20 steps for PPO), prompts that two ranks cannot share equally. Gradient and "
    "update are relative L2 distances of the first step's gradient and of what 5 iterations have changed. A sample is "
    "apart if one process has made none that is equal: a near-tie of tokens that fell otherwise, or a colour rounded "
    "to the next of 256 levels. A metric is apart by more than 1e-3; apart from clocks, all of them are compared. In "
    "bf16 forward passes round to 8 bits, otherwise when a batch has other rows, and after the first step samples are "
    "of weights that differ so much; so each policy begins with what one process makes of other micro-batches."
)


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
    from rank_work import CASES, MODES, Run, apart, compare

    from uniml_rl.engines.ranks import ending_together, launched
    from uniml_rl.engines.torch_engine import TorchEngine

    torch.set_num_threads(1)
    launch = launched()
    own = folder / f"models-{launch.rank}"
    own.mkdir()
    texts = "one two three" + " four five" * (launch.world_size > 2)
    configs = {entry: run_config(entry, own / entry) for entry in {CASES[case][0] for _, case in table}}
    last, alone = "", None
    with ending_together(launch), (folder / f"results-{launch.rank}.jsonl").open("w") as results:

        def found(mode: str, what: dict[str, Any]) -> None:
            print(json.dumps([mode, case, what]), file=results, flush=True)

        for mode, case in table:
            config = configs[CASES[case][0]]
            engine = MODES[mode].model_copy(update={"precision": precision}).build()
            if last != case and launch.rank == 0:
                alone, other = (
                    Run(case, TorchEngine("cpu", precision), config, own, texts, micro_batch) for micro_batch in (2, 1)
                )
                found(OTHER_BATCHES, apart(other, other.samples, other.first_samples, alone))
            last = case
            found(mode, compare(case, alone, engine, config, own, texts))


def start(ranks: int, folder: Path, table: list[tuple[str, str]], precision: str) -> list[dict[str, Any]]:
    """Runs the processes and returns what rank 0 found."""
    from pairs import start_ranks

    (folder / "table.json").write_text(json.dumps(table))
    processes = start_ranks(ranks, [__file__, "--worker", str(folder), "--precision", precision])
    said = [process.communicate() for process in processes]
    codes = [process.returncode for process in processes]
    lines = (folder / "results-0.jsonl").read_text().splitlines()
    rows = [dict(zip(("mode", "case", "found"), json.loads(line), strict=True)) for line in lines]
    if any(codes):
        sys.exit(f"{said[0][1][-3000:]}\nthe processes ended with {codes} after {len(rows)} results.")
    return rows


def holds(row: dict[str, Any], rows: list[dict[str, Any]], precision: str) -> bool:
    """Whether a row keeps the bounds.

    In half precision distances are compared where the first rollout made the same samples, and an update may be three
    times as far from one process's as that is from its own with other micro-batches.
    """
    (gradient, update), found = BOUNDS[precision], row["found"]
    if precision == "fp32":
        alike = found["samples"] <= COLOURS and not found["metrics"]
        return bool(alike and found["gradient"] <= gradient and found["update"] <= update)
    by_rounding = next(r["found"]["update"] for r in rows if (r["case"], r["mode"]) == (row["case"], OTHER_BATCHES))
    near = found["gradient"] <= gradient and found["update"] <= max(update, 3 * by_rounding)
    return bool(near or found["parted"][0])


def as_markdown(rows: list[dict[str, Any]], ranks: int, precision: str) -> str:
    """A section of the page."""
    gradient, update = BOUNDS[precision]
    bounds = f"Bounds: gradient {gradient:g}, update {update:g}"
    if precision != "fp32":
        bounds = (
            f"Bounds, where no sample of the first rollout is apart: gradient {gradient:g}; update {update:g}, or "
            "thrice the distance of the first row, which rounding alone makes in one process"
        )
    lines = [
        f"## {ranks} processes, {precision}",
        "",
        *wrap(f"{bounds}.", 120),
        "",
        "| policy, algorithm | engine | samples apart, first rollout | of all | gradient | update | metrics apart |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row["found"]
        apart = [f"{parted} of {made}" for parted, made in zip(found["parted"], found["made"], strict=True)]
        if precision == "fp32" and found["samples"] > 0:
            apart[1] += f", by {found['samples'] * 255:.0f} / 255"
        distances = f"{found['gradient']:.0e} | {found['update']:.0e}"
        lines.append(
            f"| {row['case']} | {row['mode']} | {' | '.join(apart)} | {distances} | {len(found['metrics']) or '-'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the tables, or the one that is asked for, and ends with 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="any of these four: one table only, by default of two processes")
    parser.add_argument("--precision", choices=BOUNDS)
    parser.add_argument("--modes", nargs="*")
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, json.loads((arguments.worker / "table.json").read_text()), arguments.precision or "fp32")
        return
    asked = arguments.ranks, arguments.precision, arguments.modes, arguments.cases
    tables = [(asked[0] or 2, asked[1] or "fp32", *asked[2:])] if any(asked) else TABLES
    text, broken = "# Parity of the engines\n\n" + "\n".join(wrap(ABOUT, 120)) + "\n", list[str]()
    for ranks, precision, modes, cases in tables:
        with tempfile.TemporaryDirectory() as folder:
            rows = start(ranks, Path(folder), pairs(modes, cases), precision)
        section = as_markdown(rows, ranks, precision)
        print(section, flush=True)
        text += "\n" + section
        broken += [f"{row['mode']}: {row['case']}" for row in rows if not holds(row, rows, precision)]
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    if broken:
        sys.exit(f"outside of the bounds: {broken}")


if __name__ == "__main__":
    main()
