"""Stages that learn from given samples, from pairs and from a reward's gradient, from a YAML file to the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image as Pillow
from tiny_models_diffusion import tiny_stable_diffusion
from tiny_models_text import tiny_gpt2

from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.run import train_from_yaml

LETTERS = "abcdefgh"
RED = {"red": {"type": "mean_colour", "target": [1.0, 0.0, 0.0]}}
COUNT_A = {"a": {"type": "regex", "pattern": "a", "timeout_seconds": None}}


def write(folder: Path, policies: dict[str, Any], *stages: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "direct", "policies": policies, "stages": list(stages)}))
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def metrics(run: Path, stage: str) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["metrics"] for row in rows if row["stage"] == stage and row["iteration"] > 0]


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Policies and data: the good answer to a letter is that letter again, the bad one is `m`."""
    good = [{"prompt": letter, "response": f"{letter} {letter}"} for letter in LETTERS]
    pairs = [{"prompt": letter, "chosen": f"{letter} {letter}", "rejected": "m m"} for letter in LETTERS]
    labelled = [{"prompt": row["prompt"], "response": row["response"], "label": True} for row in good]
    labelled += [{"prompt": letter, "response": "m m", "label": False} for letter in LETTERS]
    (tmp_path / "prompts.txt").write_text("\n".join(LETTERS))
    return {
        "model": str(tiny_gpt2(tmp_path / "gpt2")),
        "prompts": {"type": "file", "path": str(tmp_path / "prompts.txt")},
        "demonstrations": {"type": "demonstrations", "path": lines(tmp_path / "good.jsonl", good)},
        "preferences": {"type": "preferences", "path": lines(tmp_path / "pairs.jsonl", pairs)},
        "labelled": {"type": "labelled", "path": lines(tmp_path / "labelled.jsonl", labelled)},
        "undesirable": {"type": "labelled", "path": lines(tmp_path / "bad.jsonl", labelled[-4:])},
    }


def stage(name: str, algorithm: Any, **keys: Any) -> dict[str, Any]:
    return {
        "name": name,
        "policy": "writer",
        "prompts_per_iteration": 8,
        "algorithm": algorithm,
        "optimizer": {"learning_rate": 0.01},
        "micro_batch": 5,
        "until": {"iterations": 12},
    } | keys


def writer(texts: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"writer": {"type": "text", "model": texts["model"], "sampling": {"max_new_tokens": 3}} | keys}


def test_supervised_fine_tuning_learns_the_demonstrations(tmp_path: Path, texts: dict[str, Any]) -> None:
    sft = stage("imitate", "sft", records=texts["demonstrations"])
    train_from_yaml(write(tmp_path, writer(texts), sft), folder=tmp_path / "run")
    rows = metrics(tmp_path / "run", "imitate")
    assert rows[-1]["supervised/log_prob"] > rows[0]["supervised/log_prob"] / 4
    assert "reward/mean" not in rows[0]
    assert (tmp_path / "run" / "export" / "writer" / "model.safetensors").exists()


@pytest.mark.parametrize("algorithm", ["dpo", "ipo"])
def test_pairs_are_learnt(algorithm: str, tmp_path: Path, texts: dict[str, Any]) -> None:
    prefer = stage("prefer", algorithm, records=texts["preferences"])
    train_from_yaml(write(tmp_path, writer(texts, lora={"rank": 4}), prefer), folder=tmp_path / "run")
    rows = metrics(tmp_path / "run", "prefer")
    assert rows[0]["preference/margin"] == pytest.approx(0.0, abs=1e-4)
    assert rows[-1]["preference/accuracy"] == 1.0
    assert rows[-1]["loss/total"] < rows[0]["loss/total"]


def test_kto_learns_from_labels(tmp_path: Path, texts: dict[str, Any]) -> None:
    label = stage("label", "kto", records=texts["labelled"], prompts_per_iteration=16)
    train_from_yaml(write(tmp_path, writer(texts), label), folder=tmp_path / "run")
    rows = metrics(tmp_path / "run", "label")
    assert rows[0]["loss/total"] == pytest.approx(0.5, abs=1e-4) and rows[-1]["loss/total"] < 0.45


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", {"name": "kto", "desirable_above": "group_mean"}])
def test_preferences_from_the_policys_own_samples_raise_the_reward(
    algorithm: Any, tmp_path: Path, texts: dict[str, Any]
) -> None:
    keys = {"prompts": texts["prompts"], "group_size": 6, "rewards": COUNT_A, "until": {"iterations": 20}}
    train_from_yaml(write(tmp_path, writer(texts), stage("online", algorithm, **keys)), folder=tmp_path / "run")
    rewards_seen = [row["reward/mean"] for row in metrics(tmp_path / "run", "online")]
    assert sum(rewards_seen[-3:]) / 3 > sum(rewards_seen[:3]) / 3 + 0.1


def test_a_reward_model_learns_from_pairs_and_is_the_reward_of_the_next_stage(
    tmp_path: Path, texts: dict[str, Any]
) -> None:
    """The judge prefers answers without `m`; a policy that is paid by it says `m` less often."""
    policies = writer(texts) | {"judge": {"type": "text_reward_model", "model": texts["model"]}}
    # Prompts do not matter to it, so that one letter decides: the letter itself is good, `m` is bad.
    learn = stage("judge", "reward_model", records=texts["preferences"], policy="judge")
    learned = {"judge": {"type": "reward_model", "model": "policy:judge"}}
    paid = stage("paid", "grpo", prompts=texts["prompts"], group_size=6, rewards=learned, until={"iterations": 8})
    path = write(tmp_path, policies, learn, paid)
    check_from_yaml(path)
    train_from_yaml(path, folder=tmp_path / "run")
    assert metrics(tmp_path / "run", "judge")[-1]["preference/accuracy"] == 1.0
    scores = [row["reward/judge/raw_mean"] for row in metrics(tmp_path / "run", "paid")]
    assert scores[-1] > scores[0]
    train_from_yaml(path, folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("policy:jugde", "must be a reward model that an earlier stage trains.*did you mean 'judge'"),
        ("policy:writer", "is no reward model for text"),
    ],
)
def test_a_learned_reward_that_nothing_has_learned_is_refused(
    model: str, message: str, tmp_path: Path, texts: dict[str, Any]
) -> None:
    policies = writer(texts) | {"judge": {"type": "text_reward_model", "model": texts["model"]}}
    learn = stage("judge", "reward_model", records=texts["preferences"], policy="judge")
    imitate = stage("imitate", "sft", records=texts["demonstrations"])
    rewards = {"judge": {"type": "reward_model", "model": model}}
    paid = stage("paid", "grpo", prompts=texts["prompts"], group_size=6, rewards=rewards)
    with pytest.raises(UserError, match=message):
        check_from_yaml(write(tmp_path, policies, learn, imitate, paid))


def test_an_auxiliary_loss_keeps_what_was_learnt(tmp_path: Path, texts: dict[str, Any]) -> None:
    """Trained on another reward, the likelihood of the demonstrations falls less with the loss than without it."""
    rewards = {"m": {"type": "regex", "pattern": "m", "timeout_seconds": None}}
    found = {}
    for name, extra in (("without", {}), ("with", {"auxiliary": {"records_per_step": 8, "weight": 1.0}})):
        for block in extra.values():
            block["records"] = texts["demonstrations"]
        folder = tmp_path / name
        folder.mkdir()
        train_from_yaml(
            write(
                folder,
                writer(texts),
                stage("imitate", "sft", records=texts["demonstrations"]),
                stage("chase", "grpo", prompts=texts["prompts"], group_size=4, rewards=rewards, **extra),
                stage("look", "sft", records=texts["demonstrations"], until={"iterations": 1}),
            ),
            folder=folder / "run",
        )
        found[name] = metrics(folder / "run", "look")[0]["supervised/log_prob"]
        assert ("loss/auxiliary" in metrics(folder / "run", "chase")[0]) == bool(extra)
    assert found["with"] > found["without"] + 0.1


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Any]:
    """A tiny Stable Diffusion and pictures: the good ones are bright, the bad ones dark."""
    rows = []
    for number in range(4):
        for name, level in (("good", 250), ("bad", 5)):
            Pillow.new("RGB", (16, 16), (level, level, 10 * number)).save(tmp_path / f"{name}{number}.png")
        rows.append({"prompt": LETTERS[number], "chosen": f"good{number}.png", "rejected": f"bad{number}.png"})
    good = [{"prompt": row["prompt"], "image": row["chosen"]} for row in rows]
    (tmp_path / "prompts.txt").write_text("\n".join(LETTERS[:4]))
    return {
        "policies": {
            "writer": {
                "type": "image",
                "model": str(tiny_stable_diffusion(tmp_path / "sd")),
                "sampling": {"steps": 3, "height": 16, "width": 16},
            }
        },
        "prompts": {"type": "file", "path": str(tmp_path / "prompts.txt")},
        "demonstrations": {"type": "demonstrations", "kind": "image", "path": lines(tmp_path / "good.jsonl", good)},
        "preferences": {"type": "preferences", "kind": "image", "path": lines(tmp_path / "pairs.jsonl", rows)},
    }


def test_a_curriculum_of_direct_stages_for_images(tmp_path: Path, images: dict[str, Any]) -> None:
    keys = {"prompts_per_iteration": 4, "until": {"iterations": 4}, "optimizer": {"learning_rate": 3e-3}}
    online = {
        "prompts": images["prompts"],
        "group_size": 2,
        "rewards": {"red": {"type": "mean_colour", "target": [1.0, 0.0, 0.0]}},
    }
    path = write(
        tmp_path,
        images["policies"],
        stage("imitate", "sft", records=images["demonstrations"], **keys),
        stage("prefer", "diffusion_dpo", records=images["preferences"], **keys),
        stage("online", "diffusion_dpo", **keys, **online),
        *(stage(name, name, **keys, **online) for name in ("draft", "alignprop", "refl")),
    )
    check_from_yaml(path)
    train_from_yaml(path, folder=tmp_path / "run")
    imitated = [row["supervised/log_prob"] for row in metrics(tmp_path / "run", "imitate")]
    assert imitated[-1] > imitated[0]
    assert metrics(tmp_path / "run", "prefer")[0]["preference/margin"] == pytest.approx(0, abs=1e-6)
    for name in ("draft", "alignprop", "refl"):
        rows = metrics(tmp_path / "run", name)
        assert all(row["gradient/norm/writer"] > 0 for row in rows)
        assert all(row["update/weight_ratio/writer"] > 0 for row in rows)


def test_the_gradient_of_a_reward_raises_it(tmp_path: Path, images: dict[str, Any]) -> None:
    online = {
        "prompts": images["prompts"],
        "group_size": 2,
        "rewards": {"red": {"type": "mean_colour", "target": [1.0, 0.0, 0.0]}},
    }
    keys = {"prompts_per_iteration": 4, "until": {"iterations": 8}, "optimizer": {"learning_rate": 3e-3}}
    path = write(tmp_path, images["policies"], stage("raise", "draft", **keys, **online))
    train_from_yaml(path, folder=tmp_path / "run")
    rewards = [row["reward/mean"] for row in metrics(tmp_path / "run", "raise")]
    assert rewards[-1] > rewards[0] + 0.02


def test_a_reward_without_a_gradient_is_found_before_the_training(tmp_path: Path, images: dict[str, Any]) -> None:
    online = {"prompts": images["prompts"], "group_size": 2}
    size = {"type": "jpeg_size", "weight": 0.0}
    check_from_yaml(write(tmp_path, images["policies"], stage("x", "draft", rewards=RED | {"size": size}, **online)))
    path = write(tmp_path, images["policies"], stage("x", "draft", rewards={"size": size | {"weight": 1.0}}, **online))
    with pytest.raises(UserError, match=r"stages\.x\.rewards: .*Without a gradient: size"):
        check_from_yaml(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algorithm": "dpo"}, "the scores of a reward model have none"),
        (
            {"algorithm": "sft", "records": "demonstrations"},
            "this policy makes scores. A reward model learns by algorithm: reward_model",
        ),
        (
            {"auxiliary": "demonstrations"},
            r"stages\.x\.auxiliary: .*trains denoising or tokens, but this policy makes scores",
        ),
        (
            {"evaluation": {"rewards": COUNT_A}},
            "'writer' is a reward model and samples nothing to evaluate",
        ),
    ],
)
def test_a_reward_model_is_trained_by_nothing_else(
    keys: dict[str, Any], message: str, tmp_path: Path, texts: dict[str, Any]
) -> None:
    block = stage("x", "reward_model", records=texts["preferences"]) | keys
    block["records"] = texts[keys.get("records", "preferences")]
    if "auxiliary" in block:
        block["auxiliary"] = {"records": texts[block["auxiliary"]], "records_per_step": 1, "weight": 1.0}
    if "evaluation" in block:
        block["evaluation"] = {"prompts": texts["prompts"], **block["evaluation"]}
    with pytest.raises(UserError, match=message):
        check_from_yaml(write(tmp_path, {"writer": {"type": "text_reward_model", "model": texts["model"]}}, block))


def test_an_auxiliary_loss_trains_a_denoising_model_too(tmp_path: Path, images: dict[str, Any]) -> None:
    """Beside a reward that says nothing, the likelihood of the given pictures rises."""
    online = {"prompts": images["prompts"], "group_size": 2, "rewards": RED | {"red": RED["red"] | {"weight": 1e-6}}}
    auxiliary = {"records": images["demonstrations"], "records_per_step": 4, "weight": 2.0}
    keys = {"prompts_per_iteration": 2, "until": {"iterations": 8}, "optimizer": {"learning_rate": 3e-3}}
    path = write(tmp_path, images["policies"], stage("only", "draft", auxiliary=auxiliary, **keys, **online))
    train_from_yaml(path, folder=tmp_path / "run")
    rows = metrics(tmp_path / "run", "only")
    losses = [row["loss/auxiliary"] for row in rows]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert [row["loss/total"] for row in rows] == pytest.approx([2 * loss for loss in losses], rel=1e-3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "records for a learner from rollouts": ({"algorithm": "grpo"}, "algorithm 'grpo' learns from prompts"),
    "prompts for a learner from records": (
        {"algorithm": "sft", "records": None, "prompts": {"type": "file", "path": "p.txt"}, "group_size": 2},
        "algorithm 'sft' learns from records",
    ),
    "neither": ({"algorithm": "sft", "records": None}, "either `prompts`"),
    "rewards of records": (
        {"algorithm": "sft", "rewards": {"a": {"type": "regex", "pattern": "a"}}},
        "rewards: is not",
    ),
    "groups of records": ({"algorithm": "sft", "group_size": 2}, "group_size: 2: is not read"),
    "no end": ({"algorithm": "sft", "until": {"reward": {"threshold": 1}}}, "records have no rewards to wait for"),
    "pairs of single samples": ({"algorithm": "dpo"}, "a record holds 1: .* Use records of `type: preferences`"),
    "nothing undesirable": ({"algorithm": "kto"}, "every sample is desirable"),
    "nothing to imitate": ({"algorithm": "sft", "records": "undesirable"}, "no sample has the label 1"),
    "a threshold that no label reaches": (
        {"algorithm": {"name": "kto", "desirable_above": 5}, "records": "undesirable"},
        "desirable_above: 5: records are labelled 1 and 0",
    ),
    "nothing to imitate beside": (
        {"algorithm": "dpo", "records": "preferences", "auxiliary": "undesirable"},
        r"auxiliary\.records: no sample has the label 1",
    ),
    "more steps than records": ({"algorithm": {"name": "sft", "minibatches": 9}}, "cannot share the 8 records of an"),
    "one field for both": (
        {"algorithm": "dpo", "records": {"type": "preferences", "path": "p.txt", "rejected_field": "chosen"}},
        "chosen_field and rejected_field are both 'chosen'",
    ),
    "a gradient into text": (
        {
            "algorithm": "draft",
            "records": None,
            "prompts": {"type": "file", "path": "p.txt"},
            "group_size": 1,
            "rewards": COUNT_A,
        },
        "sends the reward's gradient into the sample, and tokens have none",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_stage_that_cannot_learn_is_refused_with_the_reason(
    case: str, tmp_path: Path, texts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("a\nb")
    keys, message = WRONG[case]
    keys = {k: texts.get(v, v) if isinstance(v, str) else v for k, v in keys.items()}
    block = {k: v for k, v in (stage("x", "sft", records=texts["demonstrations"]) | keys).items() if v is not None}
    if "auxiliary" in block:
        block["auxiliary"] = {"records": block["auxiliary"], "records_per_step": 1, "weight": 1.0}
    with pytest.raises(UserError, match=message):
        check_from_yaml(write(tmp_path, writer(texts), block))


def test_a_run_with_records_and_an_auxiliary_loss_continues_bit_for_bit(
    tmp_path: Path, texts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
    from uniml_rl.trainer import Trainer

    auxiliary = {"records": texts["demonstrations"], "records_per_step": 3, "weight": 0.5}
    path = write(
        tmp_path,
        writer(texts),
        stage("imitate", "sft", records=texts["demonstrations"], prompts_per_iteration=3, until={"iterations": 3}),
        stage(
            "chase",
            "grpo",
            prompts=texts["prompts"],
            group_size=2,
            rewards=COUNT_A,
            auxiliary=auxiliary,
            until={"iterations": 3},
        ),
    )
    train_from_yaml(path, ["checkpoint.every=1"], tmp_path / "whole")
    original, calls = Trainer.iterate, []

    def dies(trainer: Trainer, iteration: int) -> Any:
        calls.append(iteration)
        if len(calls) in (3, 7):
            raise KeyboardInterrupt
        return original(trainer, iteration)

    monkeypatch.setattr(Trainer, "iterate", dies)
    for _ in range(3):
        try:
            train_from_yaml(path, ["checkpoint.every=1"], tmp_path / "broken")
        except KeyboardInterrupt:
            continue
    states = [
        load_checkpoint(CheckpointStore(tmp_path / name / "checkpoints", 1).latest()).weights["writer"]
        for name in ("whole", "broken")
    ]
    assert len(calls) == 8
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
