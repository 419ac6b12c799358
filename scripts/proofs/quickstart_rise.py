"""Proves the quickstart's rise: the shipped config in several seeds against a control whose rewards are shuffled.

Every run is an ordinary run folder, so the script continues where it was stopped. The only changes to the config are
the seed, the size of the evaluation and, for the control, `reward_control: shuffle`.

    python scripts/proofs/quickstart_rise.py --seeds 0 1 2 3 4 --out docs/quickstart_rise.md
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from uniml_rl.build import RunConfig
from uniml_rl.config import load_yaml, validate
from uniml_rl.evaluation import Evaluation, compare
from uniml_rl.monitor.report import PairedDifference
from uniml_rl.run import train_from_yaml

CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True)
class StageResult:
    """What one stage of one run changed on its held-out prompts."""

    differences: dict[str, PairedDifference]
    final_metrics: dict[str, float]


def run(config: str, folder: Path, seed: int, control: bool, count: int, samples: int) -> dict[str, StageResult]:
    """Trains (or finds) one run and reads its results, by stage."""
    stages = validate(RunConfig, load_yaml(config)).stages
    overrides = [f"seed={seed}"]
    for stage in stages:
        overrides += [
            f"stages.{stage.name}.evaluation.count={count}",
            f"stages.{stage.name}.evaluation.samples_per_prompt={samples}",
        ]
        if control:
            overrides.append(f"stages.{stage.name}.reward_control=shuffle")
    train_from_yaml(config, overrides, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    results = {}
    for stage in stages:
        paths = sorted((folder / "evaluations" / stage.name).glob("*.pt"))
        differences = compare(Evaluation.load(paths[0]), Evaluation.load(paths[-1]))
        results[stage.name] = StageResult(differences, [r["metrics"] for r in rows if r["stage"] == stage.name][-1])
    return results


def table(results: dict[str, dict[str, StageResult]], stage: str) -> list[str]:
    """Markdown rows: a run each, a reward each."""
    lines = [
        "| run | reward | before | after | difference | 95 % interval | KL at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, stages in results.items():
        for reward, paired in stages[stage].differences.items():
            kl = stages[stage].final_metrics.get("kl/reference", float("nan"))
            lines.append(
                f"| {name} | {reward} | {paired.before:.3f} | {paired.after:.3f} | {paired.difference:+.3f} | "
                f"{paired.low:+.3f} to {paired.high:+.3f} | {kl:.4g} |"
            )
    return lines


def main() -> None:
    """Runs every seed and the control, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--count", type=int, default=64, help="held-out prompts")
    parser.add_argument("--samples", type=int, default=4, help="samples per held-out prompt")
    parser.add_argument("--runs", type=Path, default=Path("runs/rise"), help="folder of the runs")
    parser.add_argument("--out", type=Path, default=Path("docs/quickstart_rise.md"))
    arguments = parser.parse_args()
    results = {}
    for control, seeds in ((False, arguments.seeds), (True, arguments.control_seeds)):
        for seed in seeds:
            name = f"{'shuffled' if control else 'seed'} {seed}"
            folder = arguments.runs / name.replace(" ", "-")
            results[name] = run(arguments.config, folder, seed, control, arguments.count, arguments.samples)
    lines = [
        "# Does the quickstart's reward really rise?",
        "",
        f"Made by `scripts/proofs/quickstart_rise.py`: `{arguments.config}` in {len(arguments.seeds)} seeds, "
        f"{arguments.count} held-out prompts x {arguments.samples} samples before and after each stage. Differences "
        "are paired by prompt, with Student's t-interval over prompts. In the *shuffled* runs an iteration's rewards "
        "are permuted among its samples: nothing can be learned, and nothing may rise.",
    ]
    for stage in next(iter(results.values())):
        lines += ["", f"## {stage}", "", *table(results, stage)]
    arguments.out.write_text("\n".join(lines) + "\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
