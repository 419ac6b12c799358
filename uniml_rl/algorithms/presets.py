"""The table of algorithms by name. A new one that recombines parts is one more row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from modalities.errors import UserError, did_you_mean
from uniml_rl.algorithms.algorithm import AlgorithmSettings
from uniml_rl.algorithms.settings import AnyAlgorithm

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
    # Williams 1992, with rewards normalised over the batch: docs/algorithms/reinforce.md
    "reinforce": {
        "advantage": {"type": "batch", "scale": "batch_std", "epsilon": 1e-6},
        "surrogate": {"type": "reinforce"},
        "aggregation": {"mode": "sequence_mean_token_sum"},
    },
    # Ahmadian et al. 2024: docs/algorithms/rloo.md
    "rloo": {
        "advantage": {"type": "leave_one_out"},
        "surrogate": {"type": "reinforce"},
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
        "aggregation": {"mode": "sequence_mean_token_sum"},
    },
    # Hu et al. 2025: docs/algorithms/reinforce_plus_plus.md
    "reinforce_plus_plus": {
        "advantage": {"type": "returns", "gamma": 1.0, "baseline": "none"},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.01, "estimator": "k1", "placement": "reward"},
        "aggregation": {"mode": "token_mean"},
    },
    # The same paper's form for several samples per prompt: docs/algorithms/reinforce_plus_plus_baseline.md
    "reinforce_plus_plus_baseline": {
        "advantage": {"type": "returns", "gamma": 1.0, "baseline": "group"},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.01, "estimator": "k2", "placement": "loss"},
        "aggregation": {"mode": "token_mean"},
    },
    # Liu et al. 2025 (Understanding R1-Zero-like training): docs/algorithms/dr_grpo.md
    "dr_grpo": {
        "advantage": {"type": "group", "scale": "none"},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "sequence_mean_token_sum"},
    },
    # Yu et al. 2025: docs/algorithms/dapo.md
    "dapo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "surrogate": {"type": "ppo_clip", "low": 0.2, "high": 0.28},
        "aggregation": {"mode": "token_mean"},
        "dynamic_sampling": {"rounds": 10},
        "overlong": {"factor": 1.0},
    },
    # Zheng et al. 2025: docs/algorithms/gspo.md
    "gspo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "ratio": "sequence",
        "surrogate": {"type": "ppo_clip", "low": 3e-4, "high": 4e-4},
        "aggregation": {"mode": "sequence_mean_token_mean"},
        "minibatches": 4,
    },
    # MiniMax 2025 (M1): docs/algorithms/cispo.md
    "cispo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "surrogate": {"type": "cispo", "high": 5.0},
        "aggregation": {"mode": "token_mean"},
    },
    # 2026: docs/algorithms/drpo.md
    "drpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4},
        "surrogate": {"type": "drpo", "weight": "old_probability"},
        "aggregation": {"mode": "token_mean"},
    },
    # Ye et al. 2020: docs/algorithms/ppo_dual_clip.md
    "ppo_dual_clip": {
        "advantage": {"type": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True},
        "surrogate": {"type": "ppo_clip", "dual": 3.0},
        "kl": {"coefficient": 0.05, "estimator": "k1", "placement": "reward"},
        "aggregation": {"mode": "token_mean"},
        "value": {"clip": 0.2},
        "epochs": 4,
    },
    # Black et al. 2023: docs/algorithms/ddpo.md
    "ddpo": {
        "advantage": {"type": "running_prompt", "buffer_size": 16, "min_count": 16, "epsilon": 1e-6, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Supervised fine-tuning, of text (cross-entropy) and of denoising models (Ho et al. 2020): docs/algorithms/sft.md
    "sft": {"objective": "supervised"},
    # Rafailov et al. 2023: docs/algorithms/dpo.md
    "dpo": {
        "objective": "preference",
        "loss": {"type": "logistic", "beta": 0.1},
        "forward": {"shared_in_group": True},
    },
    # Wallace et al. 2023; its beta of 5000 is 2500 here: docs/algorithms/diffusion_dpo.md
    "diffusion_dpo": {
        "objective": "preference",
        "loss": {"type": "logistic", "beta": 2500.0},
        "forward": {"shared_in_group": True},
    },
    # Azar et al. 2023: docs/algorithms/ipo.md
    "ipo": {
        "objective": "preference",
        "loss": {"type": "square", "beta": 0.1},
        "forward": {"shared_in_group": True},
    },
    # Ethayarajh et al. 2024: docs/algorithms/kto.md
    "kto": {"objective": "kto"},
    # Bradley & Terry 1952, as a loss (Ouyang et al. 2022, eq. 1): docs/algorithms/reward_model.md
    "reward_model": {
        "objective": "preference",
        "loss": {"type": "logistic", "beta": 1.0},
        "reference_free": True,
        "scores_only": True,
    },
    # Xu et al. 2023: docs/algorithms/refl.md
    "refl": {"objective": "reward_gradient", "gradient": {"type": "early_clean"}},
    # Clark et al. 2023: docs/algorithms/draft.md
    "draft": {"objective": "reward_gradient", "gradient": {"type": "last_steps", "count": 1}},
    # Prabhudesai et al. 2023: docs/algorithms/alignprop.md
    "alignprop": {"objective": "reward_gradient", "gradient": {"type": "random_last_steps"}},
    # Liu et al. 2025 (Flow-GRPO): docs/algorithms/flow_grpo.md
    "flow_grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "kl": {"coefficient": 0.04, "estimator": "gaussian", "placement": "loss"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Flow-GRPO-Fast (Liu et al. 2025), with a window in the policy's sampling block: docs/algorithms/flow_grpo_fast.md
    "flow_grpo_fast": {
        "advantage": {"type": "group", "scale": "batch_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "ppo_clip", "low": 1e-5},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
        "needs_window": True,
    },
    # Xue et al. 2025 (DanceGRPO), with the sampler dance_sde: docs/algorithms/dance_grpo.md
    "dance_grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-8, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Wang and Yu 2025 (Flow-CPS), with the sampler cps: docs/algorithms/flow_cps.md
    "flow_cps": {
        "advantage": {"type": "group", "scale": "batch_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "ppo_clip", "low": 1e-5},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Li et al. 2025 (MixGRPO), with a window that moves in the policy's sampling block: docs/algorithms/mix_grpo.md
    "mix_grpo": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-8, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 4,
        "needs_window": True,
    },
    # Wang et al. 2025 (GRPO-Guard): docs/algorithms/grpo_guard.md
    "grpo_guard": {
        "advantage": {"type": "group", "scale": "group_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "grpo_guard"},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # Ping et al. 2026 (Flow-DPPO): docs/algorithms/flow_dppo.md
    "flow_dppo": {
        "advantage": {"type": "group", "scale": "batch_std", "epsilon": 1e-4, "clip": 5.0},
        "surrogate": {"type": "flow_dppo", "threshold": 1e-6},
        "aggregation": {"mode": "token_mean"},
        "minibatches": 2,
    },
    # PPO (Schulman et al. 2017) with a critic over denoising steps: docs/algorithms/denoising_ppo.md
    "denoising_ppo": {
        "advantage": {"type": "gae", "gamma": 1.0, "lambda": 0.95, "whiten": True, "clip": 5.0},
        "surrogate": {"type": "ppo_clip"},
        "aggregation": {"mode": "token_mean"},
        "value": {"clip": None},
        "minibatches": 4,
    },
    # Zheng et al. 2025 (DiffusionNFT): docs/algorithms/diffusion_nft.md
    "diffusion_nft": {
        "objective": "forward_process",
        "loss": {"type": "nft", "beta": 1.0, "advantage_limit": 5.0, "self_normalised": True},
        "advantage": {"type": "group", "scale": "batch_std", "epsilon": 1e-4},
        "forward": {"draws": 9, "times": "sampling_grid", "weighting": "clean"},
        "old": {"delay": 0, "slope": 0.001, "limit": 0.5},
        "kl": {"coefficient": 1e-4, "estimator": "prediction_mse", "placement": "loss"},
    },
    # Xue et al. 2025 (Advantage weighted matching): docs/algorithms/awm.md
    "awm": {
        "objective": "forward_process",
        "loss": {"type": "awm", "power": 0.25},
        "advantage": {"type": "group", "scale": "batch_std", "epsilon": 1e-4, "clip": 5.0},
        "forward": {"draws": 6, "times": "sampling_grid", "weighting": "level"},
        "old": {"delay": 0, "slope": 0.001, "limit": 0.3, "pull": 5.0},
        "kl": {"coefficient": 0.015, "estimator": "prediction_mse", "placement": "loss"},
    },
}


_ANY: TypeAdapter[AnyAlgorithm] = TypeAdapter(AnyAlgorithm)


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
    preset = {"objective": "policy_gradient", **PRESETS[name]}
    if given.get("objective", preset["objective"]) != preset["objective"]:
        raise UserError(
            f"objective {given['objective']!r}: it comes with the name, and that of {name!r} is "
            f"{preset['objective']!r}. Remove the key, or choose another algorithm."
        )
    return _merge(preset, given)


def resolve_algorithm(block: Mapping[str, Any] | str | AlgorithmSettings) -> AnyAlgorithm:
    """The settings of an `algorithm` block: its preset, overridden by the block.

    Raises UserError as `merge_preset`, and pydantic's ValidationError for parts that are wrong or do not fit each
    other. (A file is read by `uniml_rl.config`, which says where in it the mistake is.)
    """
    resolved: AnyAlgorithm = _ANY.validate_python(merge_preset(block))
    return resolved


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            keeps_type = value.get("type", old.get("type")) == old.get("type")
            value = _merge(old, value) if keeps_type else value
        merged[key] = value
    return merged
