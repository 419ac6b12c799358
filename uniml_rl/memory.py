"""Roughly how much memory a stage takes on each rank: simple sums over what is known before anything is loaded.

Sizes in bytes; N parameters of the trained modules, of them n trainable; v is 2 with autocast or half-precision
weights, else 4. The engine's `splits` says over how many ranks P, G and O it divides parameters, gradients and moments.

Tensor parallelism over T ranks comes first: every size of weights, gradients and moments is multiplied by
1 - d (1 - 1 / T), where d is the share of the parameters that the model's plan divides; the cache is divided by T.
Activations count whole, though parts of them are divided.

* weights: ((N - n) x the frozen weights' size + 4 n) / P. Policies that earlier stages trained stay: counted too.
* beside: weights that no engine divides: text encoders (in their type), the decoder of latents or codes (float32).
* gradients: 4 n / G.
* optimizer: 8 n / O for AdamW, 2 n / O in 8 bits, 4 f / O for Adafactor with f = rows + columns of each matrix; and
  4 n / O where it steps a copy of the weights.
* copies: 4 n / P for each kept weight set: the reference (none if it is fixed and no earlier stage trained the adapter:
  it is the adapter switched off), the old policy of objectives that have one, and the moving average.
* critic: a second model with its gradients and optimizer for `source: model`; a head alone is too small to count.
* rewards: the weights of the models that score, in training and in evaluation, whole on each rank.

Then the largest of four that take turns:

* opening: what is divided is made in the machine's memory and comes here layer by layer, so the largest layers; with
  tensor parallelism whole along P before it is divided further, so the other ranks' parts.
* rollout: the cache (keys and values of the rows that a rollout or an evaluation computes at once, at their longest, in
  v; keys in float32 under autocast over float32 weights, where a rotary embedding makes them so), and with gathered
  weights the other ranks' parts; with sharded ones the largest layers. Under autocast the casts of weights that are
  whole: 2 bytes per float32 weight.
* update: activations (`micro_batch` rows x tokens x what `modalities.summary` says a forward pass keeps per token, in
  v, and three float32 copies of the logits that exist at once), and the largest layers where P > 1, else the casts.
* step: 8 n / P for the moment of an optimizer step, whose size is measured against a copy of the weights; 8 n / O where
  it is a copy of the weights that steps.

Left out: activations of rewards, text encoders and decoders, the objective's further forward passes, trajectories (on
the CPU), buffers for communication, a divided layer's gradient before it is scattered and its casts, the libraries
themselves, and what the allocator leaves unused. Prompts count with the longest that was seen. A cache of sliding
windows counts as if it had none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modalities.summary import PolicySummary, RowMemory, WeightSizes
from uniml_rl.algorithms.policy_gradient_settings import PolicyGradientSettings
from uniml_rl.build import RunConfig, StageConfig, build_objective, part_names, policies_of
from uniml_rl.engines.base import Splits

STAYS = ("weights", "beside", "gradients", "optimizer", "copies", "critic", "rewards")
TAKES_TURNS = ("opening", "rollout", "update", "step")
FLOAT32 = 4
GIB = 2**30

_REWARDS: Any = object()
"""An objective keeps its rewards and reads them while it trains."""


@dataclass(frozen=True)
class Known:
    """What is known of a run before any of its policies is loaded; the lists have an entry per stage."""

    summaries: Mapping[str, PolicySummary]
    longest_prompts: Sequence[int]
    """Tokens."""
    reward_bytes: Sequence[int]
    """Of the weights of the rewards' models."""


def estimate(config: RunConfig, index: int, known: Known, ranks: int = 1, gathered: bool = True) -> dict[str, float]:
    """GiB of each item of stage `index` on each of `ranks` and, as `peak`, of all of them: this module's docstring.

    `gathered` says how divided weights sample. Items that the engine keeps in the machine's memory are 0.
    """
    splits = config.engine.splits(ranks)
    items = divided(_alone(config, index, known), splits, gathered)
    peak = sum(items[name] for name in STAYS) + max(items[name] for name in TAKES_TURNS)
    return {name: size / GIB for name, size in (items | {"peak": peak}).items()}


@dataclass(frozen=True)
class Alone:
    """Bytes of a stage in a process that divides nothing."""

    weights: float  # of the modules of all loaded policies
    stage_weights: float  # of those that this stage trains
    beside: float
    gradients: float
    optimizer: float
    copies: float
    critic: tuple[float, float, float]  # weights, gradients, moments
    rewards: float
    cache: float
    activations: float
    largest_unit: float
    planned: float = 0.0  # share of the parameters that a plan for tensor parallelism divides
    casts: float = 0.0  # what autocast makes of the weights of `stage_weights`


def divided(alone: Alone, splits: Splits, gathered: bool) -> dict[str, float]:
    """Bytes on one rank of an engine that divides by `splits`."""
    parameters, gradients, moments = (
        0.0 if name in splits.on_cpu else 1 / getattr(splits, name) for name in ("parameters", "gradients", "optimizer")
    )
    held = 1 - alone.planned * (1 - 1 / splits.tensor)  # of what else a rank would gather, or hold alone
    elsewhere = held * (1 - parameters)
    arrives = alone.largest_unit if elsewhere or splits.tensor > 1 else 0.0
    unit = held * alone.largest_unit if elsewhere else 0.0
    parameters, gradients, moments = held * parameters, held * gradients, held * moments
    copied = 1 if splits.steps_a_copy else 0
    casts = held * alone.casts
    critic_weights, critic_gradients, critic_moments = alone.critic
    critic = critic_weights * parameters + critic_gradients * (gradients + copied * moments) + critic_moments * moments
    return {
        "weights": alone.weights * parameters,
        "beside": alone.beside,
        "gradients": alone.gradients * gradients,
        "optimizer": (alone.optimizer + copied * alone.gradients) * moments,
        "copies": alone.copies * parameters,
        "critic": critic,
        "rewards": alone.rewards,
        "opening": max(arrives, alone.stage_weights * elsewhere if splits.tensor > 1 else 0.0),
        "rollout": alone.cache / splits.tensor
        + (alone.stage_weights * elsewhere + casts if gathered or not elsewhere else unit),
        "update": alone.activations + (unit or casts),
        "step": 2 * alone.gradients * (moments if copied else parameters),
    }


def _alone(config: RunConfig, index: int, known: Known) -> Alone:
    stage, summaries = config.stages[index], known.summaries
    summary, longest = summaries[stage.policy], known.longest_prompts[index]
    own, loaded = _models(config, summaries, [stage]), _models(config, summaries, config.stages[: index + 1])
    sizes = sum(own, WeightSizes())
    trainable, weights = FLOAT32 * sizes.trainable, sum(each.module_bytes for each in own)
    critic = stage.critic if stage.critic is not None and stage.critic.source == "model" else None
    autocast = getattr(config.engine, "precision", "fp32") != "fp32"
    values = 2 if autocast else sizes.bytes_per_frozen
    float32 = sizes.trainable + (sizes.frozen if sizes.bytes_per_frozen == FLOAT32 else 0)
    keys = FLOAT32 if autocast and float32 == sizes.trainable + sizes.frozen else values
    activations = max((_activations(row, stage, longest) for row in summary.rows), default=0)
    return Alone(
        weights=sum(each.module_bytes for each in loaded),
        stage_weights=weights,
        beside=sum(each.beside_bytes for each in loaded),
        gradients=trainable,
        optimizer=stage.optimizer.state_bytes(sizes.trainable, sizes.factored),
        copies=_weight_sets(config, index) * trainable,
        critic=(0, 0, 0)
        if critic is None
        else (weights, trainable, critic.optimizer.state_bytes(sizes.trainable, sizes.factored)),
        rewards=known.reward_bytes[index],
        cache=(keys + values) / 2 * max((_cache(row, stage, longest) for row in summary.rows), default=0),
        activations=values * activations + 3 * FLOAT32 * max((row.logits for row in summary.rows), default=0),
        largest_unit=sizes.largest_unit,
        planned=sizes.planned / (sizes.trainable + sizes.frozen),
        casts=2 * float32 if autocast else 0,
    )


def _models(
    config: RunConfig, summaries: Mapping[str, PolicySummary], stages: Sequence[StageConfig]
) -> list[WeightSizes]:
    """The models that these stages train; a chain is its parts."""
    names = policies_of(config, stages)
    return [summaries[name].weights for name in sorted(names) if not part_names(config.policies[name])]


def _weight_sets(config: RunConfig, index: int) -> int:
    """How many are kept as copies."""
    stage = config.stages[index]
    objective = build_objective(stage.algorithm, None, _REWARDS)
    has_reference = objective.needs_reference and _copies_reference(config, index)
    return has_reference + objective.keeps_old_policy + (stage.ema is not None)


def _copies_reference(config: RunConfig, index: int) -> bool:
    algorithm = config.stages[index].algorithm
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
