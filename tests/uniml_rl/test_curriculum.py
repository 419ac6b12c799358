"""Stages: when they end, what they hand on, and that watching or interrupting a run does not change it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_policy import ToyPolicy
from toy_runs import (
    COUNT_A,
    COUNT_B,
    held_out,
    interrupt,
    load_run,
    prompts,
    rows_of,
    stage,
    weights_of,
    write_run,
)

from modalities.errors import UserError
from modalities.samples import Text
from rewards.combine import RewardResult, RewardSet
from uniml_rl import checkpoint
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.curriculum import Curriculum
from uniml_rl.data.prompts import DrawnPrompt
from uniml_rl.run import train_from_yaml
from uniml_rl.stage_rewards import StageRewards
from uniml_rl.trainer import IterationReport, Trainer
from uniml_rl.until import UntilSettings, why_ended

NAN = math.nan
SURPRISE = {"surprise": {"type": "toy_runs:SurpriseConfig"}}
PPO = {"algorithm": {"name": "ppo", "epochs": 2}, "critic": {}}


@pytest.mark.parametrize(
    ("until", "rewards", "reason"),
    [
        ({"iterations": 2}, [1.0], None),
        ({"iterations": 2}, [1.0, 1.0], "2 iterations"),
        ({"iterations": 0}, [], "0 iterations"),
        ({"reward": {"threshold": 0.5, "patience": 2}}, [0.5], None),
        ({"reward": {"threshold": 0.5, "patience": 2}}, [0.9, 0.4, 0.5], None),
        ({"reward": {"threshold": 0.5, "patience": 2}}, [0.4, 0.5, 0.6], "reward >= 0.5 in 2 iterations in a row"),
        ({"reward": {"threshold": 0.5, "patience": 2}}, [0.9, NAN, 0.9], None),
        ({"plateau": {"window": 2}}, [1.0, 1.0, 1.0], None),
        ({"plateau": {"window": 2}}, [1.0, 1.0, 1.0, 1.1], None),
        ({"plateau": {"window": 2, "minimum_gain": 0.1}}, [1.0, 1.0, 1.0, 1.1], "reward gained 0.05 over 2 iterations"),
        ({"plateau": {"window": 2}}, [1.0, 1.0, NAN, NAN, NAN], None),
        ({"plateau": {"window": 2}}, [NAN, 1.0, 1.0, NAN, 0.9, NAN, 1.0], "reward gained -0.05 over 2 iterations"),
        ({"iterations": 9, "reward": {"threshold": 2.0}}, [3.0], "reward >= 2 in 1 iterations in a row"),
    ],
)
def test_a_stage_ends_as_soon_as_a_condition_holds(until: dict, rewards: list[float], reason: str | None) -> None:
    found = why_ended(UntilSettings.model_validate(until), len(rewards), rewards)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_the_reference_of_a_stage_is_a_frozen_copy_of_what_the_stage_before_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Any, Any]] = []
    iterate = Trainer.iterate

    def recording(trainer: Trainer, iteration: int) -> IterationReport:
        assert isinstance(trainer.policy, ToyPolicy)
        with trainer.policy.using("reference"):
            reference = trainer.policy.table.weight.detach().clone()
        seen.append((trainer.stage_index, reference, trainer.policy.table.weight.detach().clone()))
        return iterate(trainer, iteration)

    monkeypatch.setattr(Trainer, "iterate", recording)
    config = write_run(tmp_path, stage(tmp_path, "first"), stage(tmp_path, "second", rewards=COUNT_B))
    train_from_yaml(config, [], tmp_path / "run")
    assert [index for index, _, _ in seen] == [0, 0, 1, 1]
    assert torch.equal(seen[0][1], torch.zeros(1, 8)) and torch.equal(seen[1][1], seen[0][1])
    assert torch.equal(seen[2][1], seen[2][2]) and seen[2][1].abs().max() > 0.05  # where the first stage ended
    assert torch.equal(seen[3][1], seen[2][1]) and not torch.equal(seen[3][1], seen[3][2])  # it stays there


def test_a_policy_that_waits_for_its_next_stage_survives_two_interruptions(tmp_path: Path) -> None:
    """`b` trains first and last; while `a` trains in between, two processes in a row never open it."""
    stages = [
        stage(tmp_path, name, policy=policy, until={"iterations": count})
        for name, policy, count in (("one", "b", 2), ("two", "a", 4), ("three", "b", 1))
    ]
    config = write_run(tmp_path, *stages, checkpoint={"every": 1})
    train_from_yaml(config, [], tmp_path / "whole")
    interrupt(config, tmp_path / "run", (1, 1), (1, 3))
    train_from_yaml(config, [], tmp_path / "run")
    for policy in ("a", "b"):
        assert torch.equal(weights_of(tmp_path / "run", policy), weights_of(tmp_path / "whole", policy))
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_evaluating_does_not_change_training_by_a_bit(tmp_path: Path) -> None:
    """Not even with rewards that remember what they have scored, and weights that are averaged."""
    runs = {}
    for name, more in (("plain", {}), ("watched", {"evaluation": held_out(tmp_path, every=1), "ema": {"decay": 0.9}})):
        keys: dict[str, Any] = {"rewards": COUNT_A | SURPRISE, "until": {"iterations": 4}}
        train_from_yaml(write_run(tmp_path, stage(tmp_path, **keys | more)), [], tmp_path / name)
        runs[name] = rows_of(tmp_path / name)
    assert torch.equal(weights_of(tmp_path / "watched"), weights_of(tmp_path / "plain"))
    assert len(runs["watched"]) == len(runs["plain"]) + 1 == 5  # and the evaluation before
    for watched, plain in zip(runs["watched"][1:], runs["plain"], strict=True):
        metrics = watched["metrics"]
        assert {"eval/a/mean", "eval_ema/surprise/mean", "eval/total/difference"} <= metrics.keys()
        assert {name: value for name, value in metrics.items() if not name.startswith("eval")} == plain["metrics"]
    first, last = runs["watched"][0]["metrics"], runs["watched"][-1]["metrics"]
    assert first.keys() == {"eval/a/mean", "eval/a/failures", "eval/surprise/mean", "eval/surprise/failures"} | {
        "eval/total/mean",
        "eval/total/failures",
        "stage/index",
    }
    assert last["eval/a/difference"] == pytest.approx(last["eval/a/mean"] - first["eval/a/mean"], abs=1e-6)


@pytest.mark.parametrize(
    "keys",
    [
        {"algorithm": {"name": "ppo", "epochs": 2}, "critic": {"source": "model"}},
        {"rewards": SURPRISE, "algorithm": {"name": "ddpo", "advantage": {"min_count": 4, "buffer_size": 8}}},
    ],
    ids=["critic", "memory"],
)
def test_a_critic_with_its_own_model_and_rewards_with_a_memory_are_restored(keys: dict, tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path, until={"iterations": 5}, **keys), checkpoint={"every": 2})
    train_from_yaml(config, [], tmp_path / "whole")
    interrupt(config, tmp_path / "run", (0, 1), (0, 3), (0, 4))
    train_from_yaml(config, [], tmp_path / "run")
    assert torch.equal(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole"))
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_a_critic_with_its_own_model_trains_that_and_leaves_the_policy_to_the_policys_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it warms up, the policy stands still and the trunk and the head move."""
    seen: list[tuple[Any, ...]] = []
    iterate = Trainer.iterate

    def recording(trainer: Trainer, iteration: int) -> IterationReport:
        report = iterate(trainer, iteration)
        critic = trainer.objective.critic  # type: ignore[attr-defined]
        assert critic.trunk is not trainer.policy
        modules = (trainer.policy.table, critic.trunk.table, critic.head.layers[3])  # type: ignore[attr-defined]
        seen.append(tuple(module.weight.detach().clone() for module in modules))
        return report

    monkeypatch.setattr(Trainer, "iterate", recording)
    algorithm = {"name": "ppo", "epochs": 3, "value": {"warm_up_iterations": 2}}
    keys = {"algorithm": algorithm, "critic": {"source": "model", "optimizer": {"learning_rate": 0.1}}}
    config = write_run(tmp_path, stage(tmp_path, until={"iterations": 3}, **keys))
    train_from_yaml(config, [], tmp_path / "run")
    for policy, trunk, head in seen[:2]:
        assert torch.equal(policy, torch.zeros(1, 8))
        assert trunk.any() and head.any()
    assert seen[2][0].any()


def test_stages_without_an_iteration_only_evaluate(tmp_path: Path) -> None:
    none = {"until": {"iterations": 0}, "evaluation": held_out(tmp_path)}
    stages = [
        stage(tmp_path, "a", **none),
        stage(tmp_path, "b"),
        stage(tmp_path, "c", **none),
        stage(tmp_path, "d", **none),
    ]
    train_from_yaml(write_run(tmp_path, *stages, checkpoint={"keep": 1}), [], tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert [(row["stage"], row["iteration"], row["global_iteration"]) for row in rows] == [
        ("a", 0, 0),
        ("b", 1, 1),
        ("b", 2, 2),
        ("c", 0, 2),
        ("d", 0, 2),
    ]
    assert rows[0]["metrics"]["eval/a/mean"] != rows[3]["metrics"]["eval/a/mean"]
    position = load_checkpoint(CheckpointStore(tmp_path / "run" / "checkpoints", 1).latest()).state["position"]  # type: ignore[arg-type]
    assert (position["stage"], position["total_iterations"]) == (4, 2)


def test_a_checkpoint_that_takes_anothers_place_never_leaves_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before and after each rename, the newest checkpoint is the old one or the new one."""
    store = CheckpointStore(tmp_path, keep=1)
    store.save(7, {}, {"which": "old"}, {})
    rename = Path.rename
    for stop_at, expected in ((1, "old"), (2, "old"), (3, "new")):
        calls = [0]

        def counted(path: Path, target: Path, calls: list[int] = calls, stop_at: int = stop_at) -> Path:
            calls[0] += 1
            if calls[0] == stop_at:
                raise KeyboardInterrupt
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", counted)
            try:
                store.save(7, {}, {"which": "new"}, {})
            except KeyboardInterrupt:
                assert stop_at < 3
        latest = store.latest()
        assert latest is not None and load_checkpoint(latest).state["which"] == expected
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000007"]


def test_the_newest_checkpoints_are_kept_by_number(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    (tmp_path / "iteration-7-copied-by-hand").mkdir()
    for iteration in (5, 999_999, 1_000_000):
        store.save(iteration, {}, {}, {})
    assert [path.name for path in store.complete()] == ["iteration-999999", "iteration-1000000"]
    config = write_run(tmp_path, stage(tmp_path, until={"iterations": 7}), checkpoint={"every": 2, "keep": 3})
    train_from_yaml(config, [], tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["iteration-000004", "iteration-000006", "iteration-000007"]


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path, 1).save(1, {}, {}, {})
    (path / checkpoint.MANIFEST).write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is missing or damaged .* Remove the folder"):
        load_checkpoint(path)


def test_what_changed_around_a_run_is_said_when_it_continues(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = write_run(tmp_path, stage(tmp_path), checkpoint={"every": 1})
    interrupt(config, tmp_path / "run", (0, 1))
    manifest = next((tmp_path / "run" / "checkpoints").iterdir()) / checkpoint.MANIFEST
    capsys.readouterr()
    record = json.loads(manifest.read_text())
    record["environment"]["threads"] = 64
    manifest.write_text(json.dumps(record))
    train_from_yaml(config, [], tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "changed since the checkpoint, so bits may differ: threads: 64 -> 1" in said


# -- rehearsal --------


def test_a_rehearsed_prompt_is_scored_by_its_own_stages_rewards_at_their_full_weight() -> None:
    from uniml_rl.config import TypedBlock
    from uniml_rl.families import REWARDS

    def rewards(**blocks: Any) -> RewardSet:
        types = TypedBlock(REWARDS, "reward")
        configs = {name: types.import_class("regex").model_validate(block) for name, block in blocks.items()}
        return RewardSet.build(configs, "cpu")

    def block(pattern: str, **keys: Any) -> dict[str, Any]:
        return {"type": "regex", "pattern": pattern, "timeout_seconds": None} | keys

    own = rewards(a=block("a", weight=2.0), both=block("z", weight=3.0))
    earlier = rewards(b=block("b", fade_in_iterations=50), both=block("b", weight=0.5))
    scores = StageRewards([own, earlier], "none", run_seed=0, stage_index=1)
    drawn = [DrawnPrompt("p", index, source=index % 2) for index in range(4)]
    samples = [Text(text, len(text), True) for text in ("a", "b", "b", "a")]
    result = scores.score(samples, drawn, iteration=0)
    assert result.total.tolist() == [2.0, 1.5, 0.0, 0.0] and result.valid.all()
    assert result.raw["a"].isnan().tolist() == [False, True, False, True]
    assert result.weights == {"a": 2.0, "both": 3.0, "b": 1.0}
    assert all(sum(count.values()) == 0 for count in result.failures.values())
    none = scores.score(samples[::2], drawn[::2], iteration=0)  # an iteration without a rehearsed prompt
    assert none.total.tolist() == [2.0, 0.0] and none.raw["b"].isnan().all()


def test_shuffled_rewards_are_the_same_numbers_in_another_order_that_the_seed_decides(tmp_path: Path) -> None:
    config = load_run(write_run(tmp_path, stage(tmp_path))).stages[0]
    samples = [Text("a" if index % 3 == 0 else "b", 1, True) for index in range(20)]
    drawn = [DrawnPrompt("p", index, source=index % 2) for index in range(20)]
    for sets in (1, 2):
        made = [RewardSet.build(config.rewards, "cpu") for _ in range(sets)]
        true = StageRewards(made, "none", 3, 0).score(samples, drawn, 4)
        first, again, later = (StageRewards(made, "shuffle", 3, 0).score(samples, drawn, i) for i in (4, 4, 5))
        assert torch.equal(first.total, again.total) and not torch.equal(first.total, later.total)
        assert sorted(first.total.tolist()) == sorted(true.total.tolist())
        assert not torch.equal(first.total, true.total) and torch.equal(first.raw["a"], true.raw["a"])


def test_a_stage_rehearses_an_earlier_one_in_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    sources: list[int] = []
    score = StageRewards.score

    def recording(scores: StageRewards, samples: Any, drawn: Any, iteration: int) -> RewardResult:
        sources.extend(prompt.source for prompt in drawn)
        return score(scores, samples, drawn, iteration)

    monkeypatch.setattr(StageRewards, "score", recording)
    first = stage(tmp_path, "first", prompts=prompts(other, "six seven"), rewards=COUNT_B, until={"iterations": 1})
    second = stage(tmp_path, "second", prompts_per_iteration=4, rehearsal=[{"stage": "first", "share": 0.75}])
    train_from_yaml(write_run(tmp_path, first, second), [], tmp_path / "run")
    assert sources[:6] == [0] * 6
    assert [sources[start : start + 12].count(1) for start in (6, 18)] == [9, 9]
    for row in rows_of(tmp_path / "run"):
        names = {name for name in row["metrics"] if name.endswith("raw_mean")}
        assert names == {"reward/b/raw_mean"} | ({"reward/a/raw_mean"} if row["stage"] == "second" else set())


def test_the_average_follows_the_weights_at_its_decay_and_begins_with_each_stage(tmp_path: Path) -> None:
    """With decay 0 it is the current weights; near 1 it stays where the stage began."""
    means = {}
    for decay in (0.0, 0.999999):
        evaluation = held_out(tmp_path, every=1, samples_per_prompt=20)
        stages = [stage(tmp_path, name, evaluation=evaluation, ema={"decay": decay}) for name in ("one", "two")]
        train_from_yaml(write_run(tmp_path, *stages), [], tmp_path / f"{decay}")
        means[decay] = [
            [
                (row["metrics"]["eval/a/mean"], row["metrics"].get("eval_ema/a/mean"))
                for row in rows_of(tmp_path / f"{decay}")
                if row["stage"] == name
            ]
            for name in ("one", "two")
        ]
    for following, standing in zip(means[0.0], means[0.999999], strict=True):
        assert all(current == average for current, average in following[1:])
        assert {average for _, average in standing[1:]} == {standing[0][0]}
        assert len({current for current, _ in standing}) > 1
    assert means[0.999999][0][0] != means[0.999999][1][0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ema": {"decay": 0.9}}, "ema: only the evaluation uses the average"),
        ({"algorithm": {"name": "grpo", "minibatches": 7}}, "7 optimizer steps cannot share the 6 samples"),
        ({"rewards": {"total": COUNT_A["a"]}}, "'total' is the weighted sum's own name"),
        ({"rewards": {"x/y": COUNT_A["a"]}}, "names hold no '/'"),
    ],
)
def test_a_stage_that_could_not_do_what_it_says_is_refused(keys: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_run(write_run(tmp_path, stage(tmp_path, **keys)))


def test_names_that_would_take_each_others_place_are_refused(tmp_path: Path) -> None:
    evaluation = held_out(tmp_path, rewards=COUNT_A)
    with pytest.raises(UserError, match=r"evaluation\.rewards \['a'\]: a reward of the stage has the same name"):
        load_run(write_run(tmp_path, stage(tmp_path, evaluation=evaluation)))
    for name in ("critic", "a/b", "a.b"):
        with pytest.raises(UserError, match=f"policy '{name}': a name is also that of files"):
            load_run(write_run(tmp_path, stage(tmp_path, policy=name)))


def test_judges_that_keep_processes_are_closed_with_their_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[RewardSet] = []
    closed: list[RewardSet] = []
    build = RewardSet.build.__func__  # type: ignore[attr-defined]
    in_run = [False]

    def recording(cls: type[RewardSet], *arguments: Any) -> RewardSet:
        made: RewardSet = build(cls, *arguments)
        if in_run[0]:
            opened.append(made)
        return made

    def started(curriculum: Curriculum) -> None:
        in_run[0] = True
        run(curriculum)

    run = Curriculum.run
    monkeypatch.setattr(Curriculum, "run", started)
    monkeypatch.setattr(RewardSet, "build", classmethod(recording))
    monkeypatch.setattr(RewardSet, "close", lambda rewards: closed.append(rewards))
    evaluation = held_out(tmp_path, rewards=COUNT_B)
    train_from_yaml(write_run(tmp_path, stage(tmp_path, evaluation=evaluation)), [], tmp_path / "run")
    assert len(opened) == 2 and {id(each) for each in closed} == {id(each) for each in opened}
