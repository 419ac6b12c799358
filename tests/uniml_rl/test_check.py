"""`check` finds what would stop a run, wherever it is written, and trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models_text import tiny_gpt2
from toy_policy import ToyPolicy
from toy_runs import held_out, stage, write_run

from modalities.errors import UserError
from uniml_rl.build import UntilSettings
from uniml_rl.check import check_from_yaml, training_gib
from uniml_rl.trainer import Trainer


@pytest.fixture(autouse=True)
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(trainer: Trainer, iteration: int) -> None:
        raise AssertionError("check trained")

    monkeypatch.setattr(Trainer, "iterate", train)


def test_a_valid_configuration_is_described(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = write_run(tmp_path, stage(tmp_path, "one"), stage(tmp_path, "two", evaluation=held_out(tmp_path)))
    check_from_yaml(config)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "stage 1 two: grpo on letters, 2 prompts x 3 samples = 6 per iteration, rewards a; ends at 2 iterations" in said
    )
    assert "the configuration is valid" in said
    assert "100.00%" in said
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


WRONG = {
    "missing prompts": ({"prompts": {"type": "file", "path": "nowhere.txt"}}, r"nowhere\.txt"),
    "a field that no prompt has": ({"rewards": {"t": {"type": "exact_match", "field": "anwser"}}}, "'anwser'"),
    "a reward of another kind": ({"rewards": {"j": {"type": "jpeg_size"}}}, "scores image, but the policy makes text"),
    "a judge of another kind": ({"evaluation": {"rewards": {"j": {"type": "jpeg_size"}}}}, "makes text"),
    "missing held-out prompts": ({"evaluation": {"prompts": {"type": "file", "path": "none.txt"}}}, r"none\.txt"),
    "an algorithm of another kind": ({"algorithm": {"name": "flow_grpo"}}, "compares denoising steps"),
    "an average that nothing reads": ({"ema": {"decay": 0.9}}, "ema: only the evaluation uses"),
    "a decay without an end": (
        {"optimizer": {"schedule": {"type": "linear"}}},
        "type 'linear' without decay_iterations",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_in_a_later_stage_is_found_with_its_place(case: str, tmp_path: Path) -> None:
    keys, message = WRONG[case]
    keys = {key: held_out(tmp_path) | value if key == "evaluation" else value for key, value in keys.items()}
    config = write_run(tmp_path, stage(tmp_path, "fine"), stage(tmp_path, "wrong", **keys))
    with pytest.raises(UserError, match=message) as caught:
        check_from_yaml(config)
    assert "run.yaml:" in str(caught.value) and "stages.wrong" in str(caught.value)


def test_a_policy_with_nothing_to_train_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = ToyPolicy.__init__

    def frozen(policy: ToyPolicy, name: str) -> None:
        build(policy, name)
        policy.table.requires_grad_(False)

    monkeypatch.setattr(ToyPolicy, "__init__", frozen)
    with pytest.raises(UserError, match=r"policies\.letters: nothing in it is trainable"):
        check_from_yaml(write_run(tmp_path, stage(tmp_path)))


def test_overrides_are_checked_too(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path))
    check_from_yaml(config, ["stages.only.group_size=2"])
    with pytest.raises(UserError, match="group_size: 1 with algorithm 'grpo'"):
        check_from_yaml(config, ["stages.only.group_size=1"])


def test_the_estimate_is_the_bytes_of_a_real_optimizer_and_reference(tmp_path: Path) -> None:
    """Weights, gradients, AdamW's moments and a copy, counted one by one on a model with a frozen part."""
    model = torch.nn.Linear(100, 70)
    frozen = torch.nn.Linear(50, 30).bfloat16().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    held = [p for p in model.parameters()] * 2 + [p.grad for p in model.parameters()]
    held += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held += list(frozen.parameters())
    counts = [sum(p.numel() for p in module.parameters()) for module in (model, frozen)]
    expected = sum(tensor.numel() * tensor.element_size() for tensor in held) / 2**30
    assert training_gib(sum(counts), counts[0], bytes_per_parameter=2) == pytest.approx(expected)


def test_a_real_models_counts_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    policies = {"writer": {"type": "text", "model": str(tiny_gpt2(tmp_path / "model")), "lora": {"rank": 2}}}
    check_from_yaml(write_run(tmp_path, stage(tmp_path, policy="writer"), policies=policies))
    said = capsys.readouterr().out
    assert "writer" in said and "the configuration is valid" in said


@pytest.mark.parametrize(
    ("until", "words"),
    [
        ({"iterations": 1}, "1 iteration"),
        ({"iterations": 9, "reward": {"threshold": 0.5}}, "9 iterations or a reward of 0.5"),
        ({"reward": {"threshold": 2, "patience": 3}}, "a reward of 2, 3 times in a row"),
        ({"plateau": {"window": 4}}, "a plateau over twice 4 iterations"),
    ],
)
def test_the_end_of_a_stage_in_words(until: dict, words: str) -> None:
    assert UntilSettings.model_validate(until).in_words() == words
