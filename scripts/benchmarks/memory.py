"""Bytes per parameter that one process, and each of two ranks, really holds, beside what `check` would say.

    python scripts/benchmarks/memory.py

A small Llama learns by GRPO with all weights in float32 and AdamW; its reference is a copy. What lives is counted
tensor by tensor, each piece of memory once: between iterations, and when all gradients are there before a step.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaling import ONE_PROCESS, make_model, make_trainer, measure, work
from torch import Tensor

MOMENTS = ("between iterations", "before a step")


def live_bytes() -> int:
    """Of all tensors of this process."""
    gc.collect()
    storages = (tensor.untyped_storage() for tensor in _tensors())
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors() -> Iterator[Tensor]:
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and type(found).__name__ != "DTensor" and not found.is_meta:
            yield found
            if found.is_leaf and found.grad is not None:
                yield getattr(found.grad, "_local_tensor", found.grad)


def look(mode: str, folder: Path) -> dict[str, float]:
    """What the mode holds beyond what was there before, and what it should."""
    before = live_bytes()
    trainer = make_trainer(mode, folder)
    step, found = trainer.engine.step, dict[str, float]()

    def looking(iteration: int) -> Any:
        found[MOMENTS[1]] = float(live_bytes() - before)
        return step(iteration)

    trainer.engine.step = looking
    for iteration in range(2):
        trainer.iterate(iteration)
    found[MOMENTS[0]] = float(live_bytes() - before)
    kept_sets = len(trainer.policy.weight_sets.names()) - 1
    trainer.engine.close()
    return found | by_formula(mode, folder, kept_sets)


def by_formula(mode: str, folder: Path, kept_sets: int) -> dict[str, float]:
    """The number of parameters, and both moments as the plan of memory has them."""
    from rank_work import MODES

    from modalities.text import TextPolicyConfig
    from uniml_rl.engines.base import Splits
    from uniml_rl.memory import Alone, divided

    sizes = TextPolicyConfig.model_validate({"model": str(folder / "model")}).inspect().weights
    n = sizes.trainable
    alone = Alone(4 * n, 4 * n, 0, 4 * n, 8 * n, 4 * n * kept_sets, (0, 0, 0), 0, 0, 0, 0, sizes.planned / n)
    items = divided(alone, Splits() if mode == ONE_PROCESS else MODES[mode].splits(2), gathered=True)
    stays = items["weights"] + items["optimizer"] + items["copies"]
    return {"parameters": n, f"{MOMENTS[0]}, formula": stays, f"{MOMENTS[1]}, formula": stays + items["gradients"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.modes, lambda mode: look(mode, arguments.worker))
        return
    from rank_work import MODES

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        found = measure(__file__, Path(folder), arguments.modes or list(MODES), [])
    print(f"| bytes per parameter | {MOMENTS[0]} | by formula | {MOMENTS[1]} | by formula |\n|---|---|---|---|---|")
    for mode, each in found.items():
        columns = [each[key] / each["parameters"] for one in MOMENTS for key in (one, f"{one}, formula")]
        print(f"| {mode} | " + " | ".join(f"{column:.2f}" for column in columns) + " |")


if __name__ == "__main__":
    main()
