"""A run that has diverged: where, what to lower, and the last checkpoint from before."""

from __future__ import annotations

import json
from pathlib import Path

from uniml_rl.build import RunConfig
from uniml_rl.checkpoint import MANIFEST, CheckpointStore
from uniml_rl.engines import phases
from uniml_rl.engines.endings import DivergedError


def diverged(
    error: FloatingPointError, config: RunConfig, stage: int, optimizer_steps: int, store: CheckpointStore
) -> DivergedError:
    """What ends the run, with the advice. `error` says what was not finite under the weights of `stage` after
    `optimizer_steps` of its optimizer steps.
    """
    return DivergedError(
        f"the run has diverged in {phases.now()}: {error} {_advice(config, stage, optimizer_steps)} "
        f"{_last_good(store, config.stages[stage].name, optimizer_steps)}"
    )


def _advice(config: RunConfig, stage: int, optimizer_steps: int) -> str:
    block, precision = config.stages[stage], config.engine.precision
    others = [] if precision == "fp32" else [f"take engine.precision: fp32 instead of {precision}"]
    if optimizer_steps == 0:
        seen = (
            "This stage has not changed a weight yet: look at the model that it starts from and at its rewards' scale"
        )
        return f"{'; or '.join([seen, *others])}."
    owners = {"optimizer": block.optimizer} | ({"critic.optimizer": block.critic.optimizer} if block.critic else {})
    rates = [f"stages.{block.name}.{key}.learning_rate ({each.learning_rate:g})" for key, each in owners.items()]
    others += [
        f"set stages.{block.name}.{key}.gradient_clip, which is null, to 1.0"
        for key, each in owners.items()
        if each.gradient_clip is None
    ]
    return f"{'; or '.join(['Lower ' + ' and '.join(rates), *others])}."


def _last_good(store: CheckpointStore, stage: str, optimizer_steps: int) -> str:
    """Names the newest checkpoint whose weights are of an earlier optimizer step than those that failed."""
    failed: list[Path] = []
    for folder in reversed(store.complete()):
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["stage"] != stage or manifest.get("optimizer_steps", 0) < optimizer_steps:
            newer = f" ({' and '.join(map(str, failed))} has the weights that failed.)" if failed else ""
            return (
                f"The last good checkpoint is {folder}: `uniml-rl export {folder} --to FOLDER` writes its model, from "
                f"which a new run may start.{newer}"
            )
        failed.append(folder)
    newer = f": {' and '.join(map(str, failed))} has the weights that failed" if failed else ""
    return f"No checkpoint is from before that{newer}. Start again with another --folder."
