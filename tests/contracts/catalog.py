"""What the contract suite runs over. A new policy, algorithm or engine joins by one line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tiny_models_audio import tiny_musicgen
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import (
    tiny_gpt2,
    tiny_llama,
    tiny_llama_of_heads,
    tiny_qwen,
    tiny_qwen3_of_experts,
    tiny_qwen3_of_heads,
)

from modalities.errors import UserError
from uniml_rl.algorithms.algorithm import AlgorithmSettings
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import RunConfig
from uniml_rl.config import TypedBlock
from uniml_rl.engines.base import Engine
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.families import POLICIES as POLICY_TYPES

Blocks = dict[str, dict[str, Any]]
POLICY = "policy"
"""The name of the policy under test; the others of an entry are its parts."""


@dataclass(frozen=True)
class Entry:
    """A policy of the catalogue."""

    blocks: Callable[[Path], Blocks]
    """Policy blocks as in a YAML file; the models that they name are written into the folder."""
    kinds: frozenset[str]
    """Of its decisions."""
    has_model: bool = True
    """Whether its block names a model folder, so that an export can be named there."""
    critic: bool = True
    """Whether a critic can read its features."""


def one(type: str, make_model: Callable[[Path], Path] | None = None, kind: str = "tokens", **settings: Any) -> Entry:
    """A policy's block; `make_model` writes the tiny model folder that its `model` names."""

    def blocks(folder: Path) -> Blocks:
        model = {"model": str(make_model(folder / "model"))} if make_model else {}
        return {POLICY: {"type": type, **model, **settings}}

    return Entry(blocks, frozenset({kind}), has_model=make_model is not None)


def chain(first: str, second: str, **settings: Any) -> Entry:
    """A chain of two other entries."""

    def blocks(folder: Path) -> Blocks:
        parts = {name: POLICIES[entry].blocks(folder / name)[POLICY] for name, entry in (("a", first), ("b", second))}
        return {**parts, POLICY: {"type": "chain", "parts": ["a", "b"], **settings}}

    return Entry(blocks, POLICIES[first].kinds | POLICIES[second].kinds, critic=False)


image = partial(one, "image", kind="denoising")
video = partial(one, "video", kind="denoising")
v_prediction = partial(tiny_stable_diffusion, prediction_type="v_prediction")

LORA = {"rank": 2}
WORDS = {"max_new_tokens": 5}
GUIDED = {"steps": 3, "guidance_scale": 3.0, "negative_prompt": "bad"}
WINDOW = {"steps": 4, "window": {"steps": [0, 1]}}
CLIP = {"steps": 2, "frames": 5, "height": 16, "width": 16}

POLICIES: dict[str, Entry] = {}
POLICIES["toy"] = one("toy_policy:ToyConfig")
POLICIES["gpt2"] = one("text", tiny_gpt2, sampling=WORDS)
POLICIES["gpt2-lora"] = one("text", tiny_gpt2, lora=LORA, sampling=WORDS | {"temperature": 0.7})
POLICIES["llama"] = one("text", tiny_llama, sampling=WORDS, logits_chunk=4)
POLICIES["qwen-lora"] = one("text", tiny_qwen, lora=LORA, sampling=WORDS)
POLICIES["sd-epsilon"] = image(tiny_stable_diffusion, sampling=GUIDED | WINDOW)
POLICIES["sd-v-lora"] = image(v_prediction, lora=LORA, sampling=WINDOW)
POLICIES["sd3-guided-lora"] = image(tiny_stable_diffusion_3, lora=LORA, sampling=GUIDED, max_sequence_length=8)
POLICIES["wan"] = video(tiny_wan, sampling=CLIP, max_sequence_length=8)
POLICIES["musicgen"] = one("audio", tiny_musicgen, sampling={"frames": 3})
POLICIES["musicgen-guided-lora"] = one("audio", tiny_musicgen, lora=LORA, sampling={"frames": 3, "guidance_scale": 2.0})
POLICIES["chain"] = chain("qwen-lora", "wan")

DIVISIBLE = {
    "llama-heads": one("text", tiny_llama_of_heads, sampling=WORDS, logits_chunk=4),
    "qwen3-heads": one("text", tiny_qwen3_of_heads, sampling=WORDS),
}
"""Policies whose heads two processes can share. Alone they are those above, so the suite leaves them out."""

OF_EXPERTS = {
    "qwen3-experts": one("text", tiny_qwen3_of_experts, sampling=WORDS),
}
"""A rank's own samples choose what of it computes."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "ppo": {"name": "ppo"},
    "ddpo": {"name": "ddpo"},
    "flow_grpo": {"name": "flow_grpo"},
    "grpo_guard": {"name": "grpo_guard"},
    "flow_dppo": {"name": "flow_dppo"},
    "diffusion_nft": {"name": "diffusion_nft", "forward": {"draws": 2}},
    "awm": {"name": "awm", "loss": {"clip": 1.0}, "forward": {"draws": 2}},
    "reinforce": {"name": "reinforce"},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline"},
    "gspo": {"name": "gspo"},
    "cispo": {"name": "cispo"},
    "dapo": {"name": "dapo", "overlong": {"maximum": 4, "buffer": 2}, "dynamic_sampling": {"rounds": 1}},
}

ENGINES: dict[str, Callable[[str], Engine]] = {"torch": lambda precision: TorchEngine("cpu", precision)}


def fits(algorithm: AlgorithmSettings, entry: Entry) -> bool:
    """Whether the algorithm says that it is meant for the entry's decisions, and finds the features that it needs."""
    try:
        for kind in entry.kinds:
            algorithm.check(group_size=2, kind=kind)
    except UserError:
        return False
    return entry.critic or not algorithm.needs_critic


COMBINATIONS = [
    (policy, algorithm, engine)
    for policy, entry in POLICIES.items()
    for algorithm, block in ALGORITHMS.items()
    for engine in ENGINES
    if fits(resolve_algorithm(block), entry)
]


def run_config(entry: str, folder: Path) -> RunConfig:
    """The policies of an entry as a run has them, their models written into `folder`."""
    registry = TypedBlock(POLICY_TYPES, "policy")
    blocks = (POLICIES | DIVISIBLE | OF_EXPERTS)[entry].blocks(folder)
    policies = {name: registry.import_class(block["type"]).model_validate(block) for name, block in blocks.items()}
    return RunConfig.model_construct(policies=policies, seed=0)
