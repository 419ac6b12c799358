"""The table of algorithms by name. A new one that recombines parts is one more row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modalities.errors import UserError, did_you_mean
from uniml_rl.algorithms.settings import AlgorithmSettings

PRESETS: dict[str, dict[str, Any]] = {
    # Schulman et al. 2017, in the form used on language models (Ouyang et al. 2022): docs/algorithms/ppo.md
    "ppo": {
        "advantage": {"type": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
        "aggregation": {"mode": "token_mean"},
        "value": {"clip": 0.2},
        "epochs": 4,
    },
    # Shao et al. 2024: docs/algorithms/grpo.md
    "grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.04, "estimator": "k2", "placement": "loss"},
        "aggregation": {"mode": "sequence_mean_token_mean"},
    },
    # Black et al. 2023: docs/algorithms/ddpo.md
    "ddpo": {
        "advantage": {"type": "running_prompt", "buffer_size": 16, "min_count": 16, "epsilon": 1e-6, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Liu et al. 2025 (Flow-GRPO): docs/algorithms/flow_grpo.md
    "flow_grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.04, "estimator": "gaussian", "placement": "loss"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
}


def merge_preset(block: Any) -> Any:
    """The preset that `block["name"]` picks, with the block's other keys laid over it. A bare name is that preset.

    Blocks merge key by key; a block whose `type` changes replaces the preset's whole, and null removes a part.
    Resolved settings stay as they are. Raises UserError if the name is missing or unknown.
    """
    if isinstance(block, AlgorithmSettings):
        return block
    given = {"name": block} if isinstance(block, str) else block
    if not isinstance(given, Mapping):
        raise UserError("must be the name of an algorithm or a block with a name.")
    name = given.get("name")
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"name {name!r}: allowed are {', '.join(sorted(PRESETS))}{did_you_mean(str(name), PRESETS)}")
    return _merge(PRESETS[name], given)


def resolve_algorithm(block: Mapping[str, Any] | str | AlgorithmSettings) -> AlgorithmSettings:
    """The settings of an `algorithm` block: its preset, overridden by the block.

    Raises UserError as `merge_preset`, and pydantic's ValidationError for parts that are wrong or do not fit each
    other. (A file is read by `uniml_rl.config`, which says where in it the mistake is.)
    """
    return AlgorithmSettings.model_validate(merge_preset(block))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            keeps_type = value.get("type", old.get("type")) == old.get("type")
            value = _merge(old, value) if keeps_type else value
        merged[key] = value
    return merged
