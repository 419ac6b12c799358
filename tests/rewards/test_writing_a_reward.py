"""The page on writing a reward: its example runs as it stands there."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from modalities.errors import UserError
from modalities.samples import Prompt, Text
from rewards.combine import RewardSet

PAGE = Path(__file__).parents[2] / "docs" / "writing_a_reward.md"


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    return found.group(1)


@pytest.fixture
def my_rewards(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(block("python"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards

    yield my_rewards
    del sys.modules["my_rewards"]


def test_the_example_scores_from_the_pages_own_yaml(my_rewards):
    keys = yaml.safe_load(block("yaml"))["rewards"]["keywords"]
    module_name, class_name = keys.pop("type").split(":")
    assert module_name == "my_rewards"
    rewards = RewardSet.build({"keywords": getattr(my_rewards, class_name)(**keys)}, "cpu")
    prompts = [Prompt("p", 0, record={"keywords": ["Sun", "sea"]}), Prompt("p", 1)]
    samples = [Text("the Sun and the Sea", 5, True), Text("anything", 1, True)]
    rewards.check("text", prompts)
    result = rewards.score(samples, prompts, 0)
    assert result.raw["keywords"][0] == 0.5 and result.total[0] == 1.0
    assert result.valid.tolist() == [True, False] and result.failures["keywords"] == {"non_finite": 1}
    with pytest.raises(UserError, match="scores text, but the policy makes image"):
        rewards.check("image")
