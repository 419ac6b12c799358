"""Roughly how much memory a stage takes: simple sums over what is known before anything is loaded.

Sizes in bytes; N parameters, of them n trainable; v is 2 with bf16 autocast or half-precision weights, else 4.

* weights: (N - n) x the frozen weights' size + 4 n. Policies that earlier stages trained stay: counted too.
* gradients: 4 n. Optimizer: 8 n for AdamW, 2 n in 8 bits, next to nothing for the others.
* copies: 4 n for each kept weight set: the reference (none if it is fixed and no earlier stage trained the adapter:
  it is the adapter switched off) and the moving average.
* critic: a second model with its gradients and optimizer for `source: model`; a head alone is too small to count.
* step: 8 n for the moment of an optimizer step, whose size is measured against a copy of the weights.
* cache: keys and values of the rows that a rollout or an evaluation computes at once, at their longest, in v.
* activations: `micro_batch` rows x tokens x what `modalities.summary` says a forward pass keeps per token, in v, and
  three float32 copies of the logits that exist at once.

The peak is the sum of what stays, and the largest of step, cache and activations, which take turns. Left out: rewards'
models, decoding (VAE, codec), text encoders' activations, the objective's further forward passes, trajectories (on the
CPU), the libraries themselves, and what the allocator leaves unused. Prompts count with the longest that was seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modalities.summary import PolicySummary, RowMemory
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings
from uniml_rl.build import RunConfig, StageConfig, build_objective, part_names, policies_of
from uniml_rl.engines.optimizers import OptimizerSettings

STAYS = ("weights", "gradients", "optimizer", "copies", "critic")
TAKES_TURNS = ("step", "cache", "activations")
FLOAT32 = 4
GIB = 2**30


_REWARDS: Any = object()
"""An objective keeps its rewards and reads them while it trains."""


def estimate(
    config: RunConfig, index: int, summaries: Mapping[str, PolicySummary], longest_prompt: int
) -> dict[str, float]:
    """GiB of each item of stage `index` and, as `peak`, of all of them: this module's docstring."""
    stage = config.stages[index]
    summary = summaries[stage.policy]
    trainable = FLOAT32 * summary.trainable_parameters
    critic = stage.critic if stage.critic is not None and stage.critic.source == "model" else None
    items = {
        "weights": sum(_weights(summaries[name]) for name in _loaded(config, index)),
        "gradients": trainable,
        "optimizer": _moments(stage.optimizer) * trainable,
        "copies": (_copies_reference(config, index) + (stage.ema is not None)) * trainable,
        "critic": _weights(summary) + (1 + _moments(critic.optimizer)) * trainable if critic is not None else 0,
        "step": 2 * trainable,
        "cache": max((_cache(row, stage, longest_prompt) for row in summary.rows), default=0),
        "activations": max((_activations(row, stage, longest_prompt) for row in summary.rows), default=0),
    }
    values = 2 if getattr(config.engine, "precision", "fp32") == "bf16" else summary.bytes_per_parameter
    items["cache"] *= values
    items["activations"] *= values
    items["activations"] += 3 * FLOAT32 * max((row.logits for row in summary.rows), default=0)
    peak = sum(items[name] for name in STAYS) + max(items[name] for name in TAKES_TURNS)
    return {name: size / GIB for name, size in (items | {"peak": peak}).items()}


def _weights(summary: PolicySummary) -> int:
    frozen = summary.parameters - summary.trainable_parameters
    return frozen * summary.bytes_per_parameter + FLOAT32 * summary.trainable_parameters


def _moments(settings: OptimizerSettings) -> float:
    return {"adamw": 2.0, "adamw_8bit": 0.5}.get(settings.type, 0.0)


def _loaded(config: RunConfig, index: int) -> set[str]:
    """The policies in memory: those of this stage and the ones before; a chain is its parts."""
    names = policies_of(config, config.stages[: index + 1])
    return {name for name in names if not part_names(config.policies[name])}


def _copies_reference(config: RunConfig, index: int) -> bool:
    algorithm = config.stages[index].algorithm
    if not build_objective(algorithm, None, _REWARDS).needs_reference:
        return False
    if isinstance(algorithm, PolicyGradientSettings) and algorithm.kl and algorithm.kl.reference.type != "fixed":
        return True
    own = policies_of(config, [config.stages[index]])
    models = [config.policies[name] for name in own if not part_names(config.policies[name])]
    is_fresh = not own & policies_of(config, config.stages[:index])
    return not is_fresh or any(getattr(block, "lora", None) is None for block in models)


def _cache(row: RowMemory, stage: StageConfig, longest_prompt: int) -> int:
    rows = [stage.prompts_per_iteration * stage.group_size] if stage.group_size is not None else []
    if stage.evaluation is not None:
        rows.append(stage.evaluation.rows_at_once)
    return row.cache * (row.tokens + longest_prompt) * min(row.rows_at_once, max(rows, default=0))


def _activations(row: RowMemory, stage: StageConfig, longest_prompt: int) -> int:
    return row.activations * (row.tokens + (longest_prompt if row.cache else 0)) * stage.micro_batch


def describe(sizes: Mapping[str, float], names: Sequence[str] = (*STAYS, *TAKES_TURNS)) -> str:
    """`weights 1.20 GiB, gradients 12.0 MiB, ...`, without what takes nothing."""
    return ", ".join(f"{name} {in_words(sizes[name])}" for name in names if sizes[name])


def in_words(gib: float) -> str:
    """GiB, or MiB where that is little."""
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.1f} MiB"
