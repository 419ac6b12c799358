"""A policy of sixty lines is a policy: it trains in every seed, and the guide shows the very file that is tested."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from contracts.harness import make_trainer, scored
from toy_policy import ToyConfig, ToyPolicy

from modalities.samples import Prompt, Sample, Text
from rewards.combine import RewardResult
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml

ROOT = Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "toy_policy.py"


class ShareOfA:
    """The share of letters that are an "a"; 1/8 by chance."""

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        texts = [sample.text for sample in samples if isinstance(sample, Text)]
        return scored(torch.tensor([text.count("a") / len(text) for text in texts]))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_toy_learns(seed: int, tmp_path: Path) -> None:
    policy = ToyConfig().build("toy", "cpu", seed)
    trainer = make_trainer(
        policy,
        {"name": "grpo"},
        TorchEngine("cpu"),
        tmp_path,
        ShareOfA(),
        seed,
        group_size=8,
        micro_batch=16,
        optimizer={"learning_rate": 0.1},
    )
    rewards = [trainer.iterate(iteration).reward_mean for iteration in range(25)]
    assert sum(rewards[:3]) / 3 < 0.3
    assert sum(rewards[-3:]) / 3 > 0.6


def test_the_toy_is_short() -> None:
    assert len(TOY.read_text().splitlines()) <= 60


def test_the_toy_exports_its_table(tmp_path: Path) -> None:
    policy = ToyPolicy("toy")
    torch.nn.init.normal_(policy.table.weight)
    policy.export(tmp_path)
    table = torch.load(tmp_path / "table.pt", weights_only=True)
    assert torch.equal(table["weight"], policy.table.weight)


GUIDE = (ROOT / "docs" / "writing_a_policy.md").read_text()


def test_the_guide_shows_the_file_that_is_tested() -> None:
    assert TOY.read_text() in re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_guides_configuration_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "letters.yaml").write_text(re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)[0])
    shorter = ["stages.more-a.until.iterations=2", "stages.more-a.rewards.a.timeout_seconds=null"]
    train_from_yaml("letters.yaml", shorter)
    assert (tmp_path / "runs" / "letters" / "export" / "letters" / "table.pt").exists()
