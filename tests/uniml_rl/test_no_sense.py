"""Settings that are well formed and hardly meant: refused or warned of, with key, value and what to do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from toy_runs import COUNT_A, stage, write_run

from modalities.errors import UserError
from uniml_rl.build import RunConfig
from uniml_rl.check import check_from_yaml
from uniml_rl.config import load_yaml, validate

PPO: dict[str, Any] = {"algorithm": {"name": "ppo", "value": {"warm_up_iterations": 2}}, "critic": {}}
REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a critic that alone learns": (
        PPO, [], r"stages\.only\.algorithm\.value\.warm_up_iterations: 2: .* after 2 \(until\.iterations\)"
    ),
    "a number for true": ({}, ["checkpoint.asynchronous=1"], r"checkpoint\.asynchronous: 1: must be true or false"),
    "a word for true": ({}, ["checkpoint.asynchronous=yes"], r"checkpoint\.asynchronous: yes: must be true or false"),
    "a block of no keys": ({}, ["stages.only.until={}"], r"stages\.only\.until: \{\} changes nothing of what run"),
    "whole weights that are gathered": (
        {}, ["engine.shard=ddp", "engine.rollout_weights=gathered"],
        r"engine\.rollout_weights: gathered: with shard: ddp weights are whole",
    ),
    "time-outs of one process": (
        {}, ["engine.start_timeout_seconds=5"], r"engine\.start_timeout_seconds: 5: one process waits for no other"
    ),
    "groups of nothing": ({}, ["engine.shard_ranks=4"], r"engine\.shard_ranks: 4: shard: none does not read it"),
}  # fmt: skip


def check(config: Path, overrides: list[str], ranks: int | None = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_from_yaml(config, overrides, ranks)


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, overrides, message = REFUSED[case]
    write_run(tmp_path, stage(tmp_path, **keys))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        check(Path("run.yaml"), overrides)


@pytest.mark.parametrize(
    "keys, overrides",
    [
        (PPO | {"until": {"iterations": 3}}, []),
        (PPO | {"until": {"reward": {"threshold": 1}}}, []),  # nobody knows how long it takes
        ({}, ["checkpoint.asynchronous=true"]),
        ({}, ["stages.only.optimizer.schedule={}"]),  # a block that nobody has given yet
    ],
)
def test_what_makes_sense_passes(keys: dict[str, Any], overrides: list[str], tmp_path: Path) -> None:
    check(write_run(tmp_path, stage(tmp_path, **keys)), overrides)


def test_an_empty_block_that_is_new_is_one_of_defaults(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path, rewards=COUNT_A))
    loaded = validate(RunConfig, load_yaml(config, ["engine={}", "checkpoint={}"]))
    assert loaded == validate(RunConfig, load_yaml(config))


def test_a_warm_up_that_the_stage_does_not_outlive_is_warned_of(tmp_path: Path) -> None:
    schedule = {"learning_rate": 0.1, "schedule": {"warm_up_iterations": 2}}
    for key, block in (("optimizer", schedule), ("critic", {"optimizer": schedule})):
        keys = {key: block} | ({"algorithm": {"name": "ppo"}} if key == "critic" else {})
        place = key if key == "optimizer" else "critic.optimizer"
        config = write_run(tmp_path, stage(tmp_path, **keys))
        with pytest.warns(
            UserWarning, match=rf"stages\.only\.{place}\.schedule\.warm_up_iterations: 2: the stage ends"
        ):
            check_from_yaml(config)
        check(config, ["stages.only.until.iterations=3"])
