"""Every row of the table, on every kind of policy that it takes, from a YAML file through the real trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from tiny_models_diffusion import tiny_stable_diffusion_3
from tiny_models_text import tiny_gpt2

from modalities.errors import UserError
from uniml_rl.algorithms.presets import PRESETS, resolve_algorithm
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.run import train_from_yaml

UNITS = {"tokens": "token", "denoising": "element_mean", "scores": "token"}
WINDOW = {"steps": [0, 1]}
LETTERS = "abcd"


def takes(name: str, kind: str) -> bool:
    """Whether the preset trains decisions of this kind, of which only denoising ones have a window."""
    algorithm = resolve_algorithm(name)
    if getattr(algorithm, "needs_window", False) and kind != "denoising":
        return False
    try:
        algorithm.check(4, UNITS[kind], kind)  # type: ignore[arg-type]
    except UserError:
        return False
    return True


ROWS = [(name, kind) for name in PRESETS for kind in UNITS if takes(name, kind)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Policies, rewards and given samples, by kind."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "prompts.txt").write_text("\n".join(LETTERS))
    for number in range(4):
        Image.new("RGB", (16, 16), (60 * number, 30, 200)).save(folder / f"{number}.png")
    pictures = [
        {"prompt": LETTERS[n], "image": f"{n}.png", "chosen": f"{n}.png", "rejected": "0.png"} for n in (1, 2, 3)
    ]
    texts = [{"prompt": letter, "response": "a b", "chosen": "a b", "rejected": letter} for letter in LETTERS]
    for name, rows in (("denoising", pictures), ("tokens", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    sampling = {"steps": 3, "height": 16, "width": 16, "guidance_scale": 1.0}
    text = {"type": "text", "model": str(tiny_gpt2(folder / "gpt2")), "sampling": {"max_new_tokens": 4}}
    image = {"type": "image", "model": str(tiny_stable_diffusion_3(folder / "sd3")), "sampling": sampling}
    scores = {"type": "text_reward_model", "model": text["model"], "lora": {"rank": 2}}
    return {
        "scores": {"policy": scores, "records": {"type": "preferences", "path": str(folder / "tokens.jsonl")}},
        "tokens": {
            "policy": text | {"lora": {"rank": 2}},
            "rewards": {
                "a": {"type": "regex", "pattern": "a", "timeout_seconds": None},
                "short": {"type": "length", "unit": "words", "minimum": 0, "maximum": 2},
            },
            "records": {"path": str(folder / "tokens.jsonl")},
            "prompts": str(folder / "prompts.txt"),
        },
        "denoising": {
            "policy": image | {"lora": {"rank": 2}},
            "rewards": {"red": {"type": "mean_colour", "target": [1.0, 0.0, 0.0]}},
            "records": {"path": str(folder / "denoising.jsonl"), "kind": "image"},
            "prompts": str(folder / "prompts.txt"),
        },
    }


def stage_of(name: str, kind: str, world: dict[str, dict[str, Any]]) -> dict[str, Any]:
    algorithm, ours = resolve_algorithm(name), world[kind]
    block: dict[str, Any] = {
        "name": "only",
        "policy": "policy",
        "prompts_per_iteration": 3,
        "algorithm": name,
        "optimizer": {"learning_rate": 1e-2},
        "micro_batch": 4,
        "until": {"iterations": 2},
    }
    if "rollouts" in algorithm.learns_from and "rewards" in ours:
        block |= {"group_size": 4, "rewards": ours["rewards"], "prompts": {"type": "file", "path": ours["prompts"]}}
    else:
        block["records"] = {"type": "demonstrations", **ours["records"]}
    if algorithm.needs_critic:
        block["critic"] = {}
    return block


def test_every_preset_takes_some_kind_of_policy() -> None:
    assert {name for name, _ in ROWS} == set(PRESETS)


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_a_preset_trains_from_a_file(name: str, kind: str, world: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """Two iterations change the weights, every number is finite, and the same command says that it is finished."""
    path = tmp_path / "run.yaml"
    policy = world[kind]["policy"]
    if getattr(resolve_algorithm(name), "needs_window", False):
        policy = policy | {"sampling": policy["sampling"] | {"window": WINDOW}}
    config = {"name": "row", "policies": {"policy": policy}, "stages": [stage_of(name, kind, world)]}
    path.write_text(yaml.safe_dump(config))
    train_from_yaml(path, ["checkpoint.every=1", "checkpoint.keep=9"], tmp_path / "run")
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    assert not any(key.startswith("nonfinite/") for row in rows for key in row)
    assert any(row.get("update/weight_ratio/policy", 0.0) > 0 for row in rows)
    checkpoint = CheckpointStore(tmp_path / "run" / "checkpoints", 9).latest()
    assert checkpoint is not None
    weights = load_checkpoint(checkpoint).weights["policy"]
    trained = [key for key in weights if key.startswith("current/") and "lora_B" in key]
    assert trained and any(weights[key].abs().max() > 0 for key in trained)
    assert all(torch.isfinite(weights[key]).all() for key in weights)
