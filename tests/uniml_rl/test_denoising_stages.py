"""The denoising rows of the table from a YAML file through the real trainer: a Stable Diffusion 3 with an adapter."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from tiny_models_diffusion import tiny_stable_diffusion_3
from torch import Tensor

from modalities.denoising_settings import DenoisingSampling
from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.run import train_from_yaml
from uniml_rl.trainer import IterationReport, Trainer

PAGES = sorted((Path(__file__).parents[2] / "docs" / "algorithms").glob("*.md"))
CPS = {"sampler": {"type": "cps"}}
ODE = {"sampler": {"type": "ode"}}
MOVING = {"steps": 5, "window": {"moving": {"size": 2, "every": 1}}}
STAGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("flow_grpo_fast", {"steps": 4, "window": {"steps": [0, 1]}} | CPS, {}),
    ("dance_grpo", {"sampler": {"type": "dance_sde"}, "shared_initial_noise": True}, {}),
    ("flow_cps", {"sampler": {"type": "cps", "log_prob": "unnormalised"}}, {}),
    ("mix_grpo", MOVING, {}),
    ("grpo_guard", {}, {}),
    ("flow_dppo", CPS, {}),
    ("denoising_ppo", {}, {"critic": {"hidden_size": 8}}),
    ("denoising_ppo", {}, {"critic": {"source": "model"}}),
    ("diffusion_nft", ODE, {}),
    ("awm", ODE, {}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_stable_diffusion_3(tmp_path_factory.mktemp("models"))


def write(folder: Path, model: Path, algorithm: Any, sampling: dict[str, Any], **keys: Any) -> Path:
    (folder / "prompts.txt").write_text("a red cat\ndog\nblue")
    stage = {
        "name": "paint",
        "policy": "painter",
        "prompts": {"type": "file", "path": str(folder / "prompts.txt")},
        "prompts_per_iteration": 2,
        "group_size": 2,
        "rewards": {"red": {"type": "mean_colour", "target": [1.0, 0.0, 0.0]}},
        "algorithm": algorithm,
        "optimizer": {"learning_rate": 1e-3},
        "until": {"iterations": 2},
    }
    sampling = {"steps": 3, "height": 16, "width": 16} | sampling
    policy = {"type": "image", "model": str(model), "lora": {"rank": 2}, "max_sequence_length": 8, "sampling": sampling}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "row", "policies": {"painter": policy}, "stages": [stage | keys]}))
    return path


def adapter(run: Path) -> dict[str, Tensor]:
    """The exported adapter of a run."""
    return load_file(next((run / "export" / "painter").rglob("*adapter*.safetensors")))


@pytest.mark.parametrize(
    ("algorithm", "sampling", "keys"), STAGES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_denoising_row_trains_from_a_file(
    algorithm: str, sampling: dict[str, Any], keys: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    path = write(tmp_path, model, algorithm, sampling, **keys)
    train_from_yaml(path, folder=tmp_path / "run")
    rows = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert row["update/weight_ratio/painter"] > 0 and row["gradient/skipped_steps"] == 0
    assert any(value.any() for name, value in adapter(tmp_path / "run").items() if "lora_B" in name)


class StopError(Exception):
    """Ends a run."""


@pytest.mark.parametrize("algorithm", ["diffusion_nft", "awm"])
def test_the_old_policy_is_in_the_checkpoint(
    algorithm: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped and started again ends with the weights of one that was not, bit for bit."""
    path = write(tmp_path, model, {"name": algorithm, "forward": {"draws": 2}, "old": {"slope": 0.3}}, ODE)
    every = ["checkpoint.every=1"]
    train_from_yaml(path, every, tmp_path / "whole")
    iterate = Trainer.iterate

    def stopping(trainer: Trainer, iteration: int) -> IterationReport:
        if iteration == 1:
            raise StopError
        return iterate(trainer, iteration)

    with monkeypatch.context() as patch, pytest.raises(StopError):
        patch.setattr(Trainer, "iterate", stopping)
        train_from_yaml(path, every, tmp_path / "stopped")
    train_from_yaml(path, every, tmp_path / "stopped")
    ends = [adapter(tmp_path / name) for name in ("whole", "stopped")]
    assert all((ends[0][key] == ends[1][key]).all() for key in ends[0])


@pytest.mark.parametrize(
    ("algorithm", "sampling", "message"),
    [
        ("flow_grpo", {"sampler": {"type": "cps", "log_prob": "unnormalised"}}, "is in nats"),
        ("flow_cps", ODE, "draws no noise"),
        ("grpo_guard", {"log_prob_unit": "element_sum"}, "algorithm.surrogate.low"),
    ],
)
def test_a_sampler_that_contradicts_the_algorithm_is_refused_before_training(
    algorithm: str, sampling: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        check_from_yaml(write(tmp_path, model, algorithm, sampling))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sampling_of_a_page_is_valid(page: Path) -> None:
    for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        DenoisingSampling.model_validate(yaml.safe_load(text).get("sampling", {}))
