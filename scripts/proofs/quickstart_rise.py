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

from modalities.samples import Text
from uniml_rl.build import RunConfig
from uniml_rl.config import load_yaml, validate
from uniml_rl.evaluation import Evaluation, compare
from uniml_rl.monitor.report import PairedDifference
from uniml_rl.monitor.sample_metrics import distinct_share
from uniml_rl.run import train_from_yaml

CONFIG = "configs/quickstart.yaml"


@dataclass(frozen=True)
class Bounds:
    """What a stage of the quickstart must show."""

    rising: tuple[str, ...]
    """Rewards whose interval must lie above 0 in every seed."""
    not_falling: tuple[str, ...]
    """Rewards that are never trained on and whose interval must not lie below 0 in any seed."""
    kl: float
    """Largest distance to the reference at the end, in the unit of `kl/reference`."""
    distinct: float | None
    """Smallest share of the distinct word pairs among a held-out prompt's samples that must be left; None: no texts."""


BOUNDS = {
    "text-align": Bounds(("total",), ("mood", "distinct"), kl=0.5, distinct=0.9),
    "image-align": Bounds(("total", "judge"), (), kl=0.02, distinct=None),
}
CONTROL_SHARE = 0.1
"""A control may move at most this share of the smallest rise of the seeds, if its interval does not hold 0."""


@dataclass(frozen=True)
class StageResult:
    """What one stage of one run changed on its held-out prompts."""

    differences: dict[str, PairedDifference]
    kl: float
    distinct: tuple[float, float] | None
    """Mean distinct-2 of a held-out prompt's samples, before and after."""


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
    return {stage.name: read(folder, stage.name) for stage in stages}


def read(folder: Path, stage: str) -> StageResult:
    """The results of a finished stage."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kl = [row["metrics"]["kl/reference"] for row in rows if row["stage"] == stage and "kl/reference" in row["metrics"]]
    paths = sorted((folder / "evaluations" / stage).glob("*.pt"))
    before, after = Evaluation.load(paths[0]), Evaluation.load(paths[-1])
    distinct = None
    if isinstance(before.samples[0], Text):
        distinct = (distinct_pairs(before), distinct_pairs(after))
    return StageResult(compare(before, after), kl[-1], distinct)


def distinct_pairs(evaluation: Evaluation) -> float:
    """Mean over prompts of distinct-2 over all texts of a prompt."""
    texts = [sample.text for sample in evaluation.samples if isinstance(sample, Text)]
    size = len(texts) // len(evaluation.prompts)
    shares = [distinct_share(texts[start : start + size], 2) for start in range(0, len(texts), size)]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known)


def failures(runs: dict[str, StageResult], controls: dict[str, StageResult], bounds: Bounds) -> list[str]:
    """What a stage does not keep of its bounds, in words."""
    found = []
    for name, result in runs.items():
        for reward in bounds.rising:
            if not result.differences[reward].low > 0:
                found.append(f"{name}: {reward} does not rise")
        for reward in bounds.not_falling:
            if result.differences[reward].high < 0:
                found.append(f"{name}: {reward} falls")
        if result.kl > bounds.kl:
            found.append(f"{name}: KL {result.kl:.3g} is above {bounds.kl:g}")
        if bounds.distinct and result.distinct and result.distinct[1] < bounds.distinct * result.distinct[0]:
            found.append(f"{name}: distinct-2 fell from {result.distinct[0]:.3f} to {result.distinct[1]:.3f}")
    for name, result in controls.items():
        for reward in bounds.rising:
            smallest = min(run.differences[reward].difference for run in runs.values())
            paired = result.differences[reward]
            if paired.low > 0 and paired.difference > CONTROL_SHARE * smallest:
                found.append(f"{name}: {reward} rises without a signal")
    return found


def table(results: dict[str, StageResult]) -> list[str]:
    """Markdown rows: a run each, a reward each."""
    lines = [
        "| run | reward | before | after | difference | 95 % interval | KL at the end | distinct-2 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        distinct = "" if result.distinct is None else "{:.3f} → {:.3f}".format(*result.distinct)
        for reward, paired in result.differences.items():
            lines.append(
                f"| {name} | {reward} | {paired.before:.3f} | {paired.after:.3f} | {paired.difference:+.3f} | "
                f"{paired.low:+.3f} to {paired.high:+.3f} | {result.kl:.4g} | {distinct} |"
            )
    return lines


def in_words(bounds: Bounds) -> str:
    """What the stage must show, as a sentence."""
    distinct = ""
    if bounds.distinct is not None:
        distinct = f", distinct-2 of a prompt's samples stays above {bounds.distinct:.0%} of what it was"
    held = f"{' and '.join(bounds.not_falling)} do not fall, " if bounds.not_falling else ""
    return f"Must hold in every seed: {' and '.join(bounds.rising)} rise, {held}KL stays below {bounds.kl:g}{distinct}."


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
    results: dict[bool, dict[str, dict[str, StageResult]]] = {False: {}, True: {}}
    for control, seeds in ((False, arguments.seeds), (True, arguments.control_seeds)):
        for seed in seeds:
            name = f"{'shuffled' if control else 'seed'} {seed}"
            folder = arguments.runs / name.replace(" ", "-")
            results[control][name] = run(arguments.config, folder, seed, control, arguments.count, arguments.samples)
    lines = [
        "# Does the quickstart's reward really rise?",
        "",
        f"Made by `scripts/proofs/quickstart_rise.py`: `{arguments.config}` in {len(arguments.seeds)} seeds, "
        f"{arguments.count} held-out prompts x {arguments.samples} samples before and after each stage. Differences "
        "are paired by prompt, with Student's t-interval over prompts. In the *shuffled* runs an iteration's rewards "
        "are permuted among its samples: nothing can be learned, and nothing may rise (an interval above 0 is let "
        f"pass below {CONTROL_SHARE:.0%} of the smallest rise of the seeds: a drifting policy is not exactly the old "
        "one). `mood` and `judge` are rewards that are never trained on.",
    ]
    missed = []
    for stage, bounds in BOUNDS.items():
        runs, controls = ({name: stages[stage] for name, stages in results[c].items()} for c in (False, True))
        found = failures(runs, controls, bounds)
        missed += found
        verdict = "**It holds.**" if not found else f"**It does not hold:** {'; '.join(found)}."
        lines += ["", f"## {stage}", "", f"{in_words(bounds)} {verdict}", "", *table({**runs, **controls})]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"written: {arguments.out}")
    if missed:
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
