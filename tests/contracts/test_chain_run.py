"""A chain in a whole run: its parts are also trained alone, the run is killed, and what it leaves can be opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models_diffusion import tiny_stable_diffusion_3

from modalities.base import Policy
from modalities.chain import ChainPolicy
from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.curriculum import Curriculum, OpenStage
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml
from uniml_rl.saved import open_run

CONFIG = """
name: chained
policies:
  letters: {{type: "toy_policy:ToyConfig"}}
  painter: {{type: image, model: {model}, lora: {{rank: 2}}, sampling: {{steps: 2}}, max_sequence_length: 8}}
  both: {{type: chain, parts: [letters, painter], sampling: {{branch: 2}}}}
stages:
  - &both
    name: first
    policy: both
    prompts: {{type: file, path: {prompts}}}
    prompts_per_iteration: 2
    group_size: 2
    rewards: {{bright: {{type: mean_colour, target: [1, 1, 1]}}}}
    algorithm: {{name: grpo}}
    optimizer: {{learning_rate: 0.05}}
    until: {{iterations: 2}}
    evaluation: {{prompts: {{type: file, path: {prompts}}}, count: 2, samples_per_prompt: 2}}
  - name: letters-alone
    policy: letters
    prompts: {{type: file, path: {prompts}}}
    prompts_per_iteration: 2
    group_size: 2
    rewards: {{a: {{type: regex, pattern: a, timeout_seconds: null}}}}
    algorithm: {{name: ddpo}}
    optimizer: {{learning_rate: 0.1}}
    until: {{iterations: 3}}
  - <<: *both
    name: last
    algorithm: {{name: ddpo}}
checkpoint: {{every: 1}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chained")
    model = tiny_stable_diffusion_3(folder / "model", with_t5=False)
    (folder / "prompts.txt").write_text("one\ntwo\nthree\n")
    (folder / "run.yaml").write_text(CONFIG.format(model=model, prompts=folder / "prompts.txt"))
    return folder / "run.yaml"


@dataclass
class Finished:
    """A run that nothing interrupted, and the policies that its stages trained."""

    folder: Path
    policies: list[Policy]


@pytest.fixture(scope="module")
def finished(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run = Finished(tmp_path_factory.mktemp("runs") / "whole", [])
    original = Curriculum._open

    def open_and_remember(self: Curriculum, index: int) -> OpenStage:
        stage = original(self, index)
        run.policies.append(stage.policy)
        return stage

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Curriculum, "_open", open_and_remember)
        train_from_yaml(config, [], run.folder)
    return run


def weights_of(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return open_run(folder).build(name).weight_state()


class KilledError(Exception):
    """Ends a run where it stands."""


@pytest.mark.parametrize("step", [2, 6, 10])  # in the first stage, in the part's own, in the last one
def test_a_killed_run_ends_with_the_same_weights(
    config: Path, finished: Finished, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = TorchEngine.step, [0]

    def counted(self: TorchEngine, iteration: int) -> object:
        calls[0] += 1
        if calls[0] == step:
            raise KilledError
        return original(self, iteration)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", counted)
        with pytest.raises(KilledError):
            train_from_yaml(config, [], tmp_path / "run")
    train_from_yaml(config, [], tmp_path / "run")
    expected, found = weights_of(finished.folder, "both"), weights_of(tmp_path / "run", "both")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_stages_of_a_part_train_the_chains_own_part(finished: Finished) -> None:
    first, alone, last = finished.policies
    assert isinstance(first, ChainPolicy)
    assert first is last
    assert first.parts[0] is alone


def test_what_a_run_leaves_can_be_opened(finished: Finished, config: Path) -> None:
    both, letters = weights_of(finished.folder, "both"), weights_of(finished.folder, "letters")
    assert torch.equal(both["current/letters_table.weight"], letters["current/table.weight"])
    assert letters["current/table.weight"].any()
    assert (finished.folder / "export" / "both" / "painter" / "model_index.json").exists()
    assert (finished.folder / "export" / "both" / "letters" / "table.pt").exists()
    check_from_yaml(config)


def test_a_part_that_does_not_exist_is_named(config: Path) -> None:
    with pytest.raises(UserError, match=r"leters: must be one of the policies .*; did you mean 'letters'"):
        check_from_yaml(config, ["policies.both.parts=[leters, painter]"])


def test_an_algorithm_with_a_critic_is_refused(config: Path) -> None:
    with pytest.raises(UserError, match=r"stages\.first: algorithm\.value, the critic: reads features"):
        train_from_yaml(config, ["stages.first.algorithm.name=ppo", "stages.first.critic={}"], config.parent / "ppo")
