"""What a run leaves in its folder when it is refused, and whose folder it is."""

import shutil
from pathlib import Path

import pytest
import torch
from toy_runs import TOY, load_run, stage, weights_of, write_run

from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.config import load_yaml
from uniml_rl.run import train_from_yaml
from uniml_rl.run_folder import check_folder

REFUSALS = {
    "by the configuration": ("stages.only.group_size=1", "nothing could be learned"),
    "by its parts": ("stages.only.prompts.path=missing.txt", "missing.txt"),
    "by the engine": ("engine.device=cuda", "no CUDA device"),
}


@pytest.mark.parametrize("override, message", REFUSALS.values(), ids=REFUSALS)
def test_a_refused_run_leaves_nothing(tmp_path: Path, override: str, message: str) -> None:
    config, others = write_run(tmp_path, stage(tmp_path)), tmp_path / "others"
    others.mkdir()
    (others / "notes.txt").write_text("mine")
    for folder in (tmp_path / "runs" / "deep", others):
        with pytest.raises(UserError, match=message):
            train_from_yaml(config, [override], folder)
    assert not (tmp_path / "runs").exists()
    assert [path.name for path in others.iterdir()] == ["notes.txt"]


def test_a_run_that_has_begun_keeps_what_it_has(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path))
    train_from_yaml(config, [], tmp_path / "run")
    before = {path for path in (tmp_path / "run").rglob("*") if "tensorboard" not in path.parts}
    with pytest.raises(UserError, match="another configuration"):
        train_from_yaml(config, ["seed=5"], tmp_path / "run")
    assert {path for path in (tmp_path / "run").rglob("*") if "tensorboard" not in path.parts} == before


def test_check_refuses_a_folder_of_another_configuration_as_train_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_run(tmp_path, stage(tmp_path))
    config.write_text(f"folder: {folder}\n" + config.read_text())
    check_from_yaml(config)
    train_from_yaml(config)
    check_from_yaml(config)
    changed = ["stages.only.optimizer.learning_rate=0.25", "checkpoint.keep=7"]
    lines = [
        "command line: stages.only.optimizer.learning_rate: 0.1 -> 0.25",
        "command line: checkpoint.keep: 2 -> 7",
    ]
    for use in (check_from_yaml, train_from_yaml):
        with pytest.raises(UserError) as caught:
            use(config, changed)
        assert f"{folder} holds a run of another configuration" in str(caught.value)
        assert all(line in str(caught.value) for line in lines)


def test_a_run_goes_on_with_another_engine_of_the_same_precision_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {}
    for name, engine in (("whole", []), ("changed", ["engine={type: deepspeed, device: cpu, zero: 2}"])):
        config = write_run(tmp_path, stage(tmp_path, until={"iterations": 4}), checkpoint={"every": 1, "keep": 9})
        runs[name] = tmp_path / name
        train_from_yaml(config, [], runs[name])
        if engine:
            for count in (3, 4):
                shutil.rmtree(runs[name] / "checkpoints" / f"iteration-{count:06d}")
            capsys.readouterr()
            with pytest.raises(UserError, match=r"engine\.precision: fp32 -> bf16"):
                train_from_yaml(config, ["engine.precision=bf16"], runs[name])
            train_from_yaml(config, engine, runs[name])
            said = " ".join(capsys.readouterr().out.split())
            assert "continuing after 2 iterations" in said and "engine.type: torch -> deepspeed" in said
    torch.testing.assert_close(weights_of(runs["changed"]), weights_of(runs["whole"]), rtol=0, atol=1e-5)


def test_what_differs_is_named_with_its_line(tmp_path: Path) -> None:
    """A key that an earlier version did not have is no difference where it has its default."""
    config = write_run(tmp_path, stage(tmp_path, micro_batch=3))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config.read_text().replace("micro_batch: 3", "micro_batch: 5"))
    line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "micro_batch: 3" in text)
    with pytest.raises(UserError) as caught:
        check_folder(run, load_run(config), load_yaml(config))
    differences = [text.strip() for text in str(caught.value).splitlines()[1:-1]]
    assert differences == [f"{config}:{line}: stages.only.micro_batch: 5 -> 3"]


@pytest.mark.parametrize("block, fewest", [({"shard": "hsdp", "shard_ranks": 4}, 4), ({"shard": "fsdp"}, 2)])
def test_one_process_says_how_several_are_started_and_checked(
    tmp_path: Path, block: dict[str, object], fewest: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, stage(tmp_path, prompts_per_iteration=8), policies={"letters": TOY}, engine=block)
    start = f"torchrun --nproc-per-node {fewest} -m uniml_rl train"
    check_from_yaml(config)
    said = " ".join(capsys.readouterr().out.split())
    assert f"`--ranks {fewest}` checks for those" in said and start in said
    check_from_yaml(config, [], ranks=fewest)
    assert "torchrun" not in capsys.readouterr().out
    train_from_yaml(config, [], tmp_path / "run")
    assert start in " ".join(capsys.readouterr().out.split())


def test_check_divides_processes_into_the_groups_of_the_engine(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path), engine={"shard": "hsdp", "shard_ranks": 4})
    with pytest.raises(UserError, match=r"engine.shard_ranks: 4: 6 processes cannot be divided into groups of 4"):
        check_from_yaml(config, [], ranks=6)


def test_more_threads_than_the_machine_has_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    config = write_run(tmp_path, stage(tmp_path), engine={"threads": 5})
    with pytest.warns(UserWarning, match=r"engine.threads: 5, and this machine has 4 CPUs"):
        check_from_yaml(config)
    with pytest.raises(UserError, match=r"engine.threads: 5000: must be a whole number >= 1 and <= 1024"):
        check_from_yaml(config, ["engine.threads=5000"])
