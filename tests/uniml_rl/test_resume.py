"""A run that is killed anywhere and started again ends as one that was never killed, bit for bit."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from modalities.errors import UserError
from uniml_rl import checkpoint, curriculum
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.evaluation import Evaluation
from uniml_rl.monitor.writer import MetricsWriter
from uniml_rl.run import train_from_yaml
from uniml_rl.run_folder import locked

CONFIG = """
name: killed
seed: 5
policies:
  letters: {{type: "toy_policy:ToyConfig"}}
stages:
  - name: first
    policy: letters
    prompts: {{type: file, path: {prompts}}}
    prompts_per_iteration: 2
    group_size: 3
    rewards: {{a: {{type: regex, pattern: a, timeout_seconds: null}}}}
    algorithm: {{name: ddpo, surrogate: {{low: 0.2}}, minibatches: 2, epochs: 2}}
    optimizer: {{learning_rate: 0.1}}
    ema: {{decay: 0.5}}
    until: {{iterations: 4}}
    evaluation: {{prompts: {{type: file, path: {prompts}}}, count: 2, samples_per_prompt: 2, every: 2}}
  - name: second
    policy: letters
    prompts: {{type: file, path: {prompts}}}
    prompts_per_iteration: 3
    group_size: 2
    rewards: {{b: {{type: regex, pattern: b, timeout_seconds: null}}}}
    algorithm:
      name: ppo
      minibatches: 2
      kl: {{coefficient: 0.1, adaptive: {{target: 0.05, horizon: 100}}}}
    critic: {{}}
    optimizer: {{learning_rate: 0.1}}
    rehearsal: [{{stage: first, share: 0.3}}]
    until: {{iterations: 5}}
checkpoint: {{every: 2}}
"""
VOLATILE = ("time/", "throughput/", "memory/")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    (folder / "prompts.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    (folder / "run.yaml").write_text(CONFIG.format(prompts=folder / "prompts.txt"))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def uninterrupted(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    train_from_yaml(config, [], folder)
    return folder


def train_killed_at(
    config: Path, folder: Path, target: object, name: str, call: int, overrides: Sequence[str] = ()
) -> bool:
    """Trains in a child process that kills itself at the n-th call of `target.name`; whether it was killed."""
    child = os.fork()
    if child == 0:
        original, calls = getattr(target, name), [0]

        def counted(*args: object, **kwargs: object) -> object:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(target, name, counted)
        try:
            train_from_yaml(config, overrides, folder)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def rows(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("time")
        line["metrics"] = {k: v for k, v in line["metrics"].items() if not k.startswith(VOLATILE)}
    return lines


def assert_same_run(folder: Path, other: Path) -> None:
    newest = [checkpoint.CheckpointStore(run / "checkpoints", 1).latest() for run in (folder, other)]
    weights = [dict(checkpoint.load_checkpoint(path).weights["letters"]) for path in newest if path]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert rows(folder) == rows(other)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    steps = [event.step for event in events.Scalars("reward/mean")]
    assert steps == list(range(1, 10))


MOMENTS = [
    (TorchEngine, "backward", 3),  # before the first checkpoint, in the middle of an update
    (TorchEngine, "step", 10),
    (checkpoint, "store", 1),  # the first checkpoint, half written
    (checkpoint, "store", 2),
    (checkpoint, "sync_folder", 1),  # between write and rename
    (checkpoint, "sync_folder", 3),  # just after the rename
    (checkpoint, "sync_folder", 4),  # the end of a stage
    (TorchEngine, "attach", 2),  # opening the second stage
    (TorchEngine, "step", 22),  # in the second stage, with a critic and an adaptive KL
    (checkpoint, "sync_folder", 9),
]


@pytest.mark.parametrize(("target", "name", "call"), MOMENTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_killed_run_ends_like_an_uninterrupted_one(
    config: Path, uninterrupted: Path, tmp_path: Path, target: object, name: str, call: int
) -> None:
    folder = tmp_path / "run"
    assert train_killed_at(config, folder, target, name, call), "the moment was never reached"
    train_from_yaml(config, [], folder)
    assert_same_run(folder, uninterrupted)


@pytest.mark.parametrize(("target", "name", "call"), [(TorchEngine, "step", 10), (checkpoint, "sync_folder", 3)])
def test_so_does_one_whose_checkpoints_are_written_beside_the_next_iteration(
    config: Path, uninterrupted: Path, tmp_path: Path, target: object, name: str, call: int
) -> None:
    folder, beside = tmp_path / "run", ["checkpoint.asynchronous=true"]
    assert train_killed_at(config, folder, target, name, call, beside), "the moment was never reached"
    train_from_yaml(config, beside, folder)
    assert_same_run(folder, uninterrupted)


def test_what_is_written_beside_training_is_what_was_given_and_counts_when_it_is_settled(tmp_path: Path) -> None:
    store, weight = checkpoint.CheckpointStore(tmp_path, keep=2), torch.ones(2)
    path = store.save(1, {"policy": {"w": weight}}, {}, {}, beside=True)
    weight.zero_()
    assert store.latest() is None
    store.settle()
    assert store.latest() == path
    assert checkpoint.load_checkpoint(path).weights["policy"]["w"].tolist() == [1, 1]


def test_a_run_killed_again_and_again_still_arrives(config: Path, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    kills = 0
    while train_killed_at(config, folder, TorchEngine, "backward", 20):
        kills += 1
        assert kills < 30, "no progress between kills"
    assert kills >= 3
    assert_same_run(folder, uninterrupted)


def test_a_finished_run_is_left_alone(config: Path, uninterrupted: Path) -> None:
    before = rows(uninterrupted)
    train_from_yaml(config, [], uninterrupted)
    assert rows(uninterrupted) == before


def test_a_changed_config_is_refused_with_the_difference(config: Path, uninterrupted: Path) -> None:
    with pytest.raises(UserError, match=r"stages.second.until.iterations: 5 -> 6(?s:.*)--folder"):
        train_from_yaml(config, ["stages.second.until.iterations=6"], uninterrupted)


def test_a_folder_in_use_is_refused(config: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "run"), pytest.raises(UserError, match="in use by another process"):
        train_from_yaml(config, [], tmp_path / "run")


def test_a_configuration_that_fails_its_check_claims_no_folder(config: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        train_from_yaml(config, ["stages.first.prompts.path=nowhere.txt"], tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises(UserError, match=r"stages\.first\.evaluation\.sampling: .*temprature"):
        train_from_yaml(config, ["stages.first.evaluation.sampling={temprature: 1}"], tmp_path / "run")


@pytest.mark.parametrize("folder", ["file", "file/inside"])
def test_a_folder_that_cannot_be_is_refused(config: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("taken")
    with pytest.raises(UserError, match=f"folder '.*{folder}' cannot be written"):
        train_from_yaml(config, [], tmp_path / folder)


def test_a_damaged_checkpoint_is_named(uninterrupted: Path) -> None:
    path = checkpoint.CheckpointStore(uninterrupted / "checkpoints", 1).latest()
    assert path is not None
    weights = next((path / "tensors").iterdir())
    good = weights.read_bytes()
    try:
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(UserError, match=r"tensors/shard\S+ is missing or damaged"):
            checkpoint.load_checkpoint(path)
    finally:
        weights.write_bytes(good)


def full(*args: object) -> None:
    raise OSError(28, "No space left on device")


def save_to_full_disk(*args: object) -> None:
    with open("/dev/full", "wb") as handle:
        SAVE(torch.ones(9999), handle)


def save_to_full_disk_by_name(*args: object) -> None:
    SAVE(torch.ones(9999), "/dev/full")


SAVE = torch.save
FULL = {
    "a system call": (checkpoint, "sync_folder", full),
    "torch": (torch, "save", save_to_full_disk),
    "torch by name": (torch, "save", save_to_full_disk_by_name),
    "a rank's shard": (HuggingFaceStorageWriter, "write_data", full),
}


@pytest.mark.parametrize("who", FULL)
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    store = checkpoint.CheckpointStore(tmp_path, keep=1)
    good = store.save(1, {"policy": {"w": torch.ones(2)}}, {}, {})
    with monkeypatch.context() as patch:
        patch.setattr(*FULL[who])
        with pytest.raises(UserError, match=r"iteration-000002 could not be written(?s:.*)Free disk space"):
            store.save(2, {"policy": {"w": torch.ones(2)}}, {}, {})
    assert list(tmp_path.iterdir()) == [good]
    assert torch.equal(checkpoint.load_checkpoint(good).weights["policy"]["w"], torch.ones(2))


@pytest.mark.parametrize(
    ("target", "name"), [(Evaluation, "save"), (MetricsWriter, "write"), (curriculum, "export_policy")]
)
def test_a_disk_that_is_full_for_anything_else_ends_the_run_with_one_message(
    config: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: object, name: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(target, name, full)
        with pytest.raises(UserError, match=r"the disk of .*run is full \(No space left on device\)"):
            train_from_yaml(config, [], tmp_path / "run")
    train_from_yaml(config, [], tmp_path / "run")
    assert_same_run(tmp_path / "run", uninterrupted)
