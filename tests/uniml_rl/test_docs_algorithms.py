"""The table of algorithms in the docs is that of the presets, and every stage and run in the docs is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from uniml_rl.algorithms.presets import PRESETS, resolve_algorithm
from uniml_rl.build import RunConfig, StageConfig
from uniml_rl.selftest.claims import ROWS

DOCS = Path(__file__).parents[2] / "docs"
LEARNS_FROM = {
    "policy_gradient": "rewards of its own samples",
    "forward_process": "rewards of its own samples",
    "supervised": "given samples",
    "preference": "pairs, given or of its own samples",
    "kto": "labels, given or of its own samples",
    "reward_gradient": "a reward's gradient",
}
CLAIMS = {
    "kl_regularised_optimum": "ends at the KL-regularised optimum",
    "maximum_likelihood": "ends at the maximum likelihood",
    "least_preference_loss": "ends at the least loss of the pairs",
    "raises_expected_reward": "raises the expected reward",
}


def blocks(page: Path) -> list[dict[str, Any]]:
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]


def table() -> dict[str, list[str]]:
    """The cells after the name, by name."""
    rows = re.findall(r"^\| \[(\w+)\]\((\w+\.md)\) \| (.*) \|$", (DOCS / "algorithms" / "README.md").read_text(), re.M)
    assert all(link == f"{name}.md" for name, link, _ in rows)
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: cells.split(" | ") for name, _, cells in rows}


def test_the_table_has_a_row_for_each_preset() -> None:
    assert sorted(table()) == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_says_what_the_preset_learns_from_and_claims(name: str) -> None:
    paper, learns_from, claims = table()[name]
    settings = resolve_algorithm(name)
    assert paper
    assert learns_from == ("given pairs" if name == "reward_model" else LEARNS_FROM[settings.objective])
    assert ("given" in learns_from) == ("records" in settings.learns_from)
    measured = {row.claim.partition(":")[0] for row in ROWS if row.algorithm == name}
    assert claims == "; ".join(words for claim, words in CLAIMS.items() if claim in measured)


DIRECT = [name for name in PRESETS if "records" in resolve_algorithm(name).learns_from]


@pytest.mark.parametrize("page", sorted((DOCS / "algorithms").glob("*.md")), ids=lambda page: page.stem)
def test_the_stages_of_a_page_are_valid(page: Path) -> None:
    for stage in blocks(page):
        if "policy" in stage:
            StageConfig.model_validate(stage)


@pytest.mark.parametrize("name", DIRECT)
def test_a_page_has_a_stage_for_each_source_that_the_algorithm_learns_from(name: str) -> None:
    found = {
        key for block in blocks(DOCS / "algorithms" / f"{name}.md") for key in block if key in ("prompts", "records")
    }
    wanted = {"prompts" if source == "rollouts" else "records" for source in resolve_algorithm(name).learns_from}
    assert found == (wanted - {"prompts"} if name == "reward_model" else wanted)  # a reward model samples nothing


def test_the_curricula_are_valid() -> None:
    runs = [RunConfig.model_validate(block) for block in blocks(DOCS / "curricula.md")]
    used = {stage.algorithm.name for run in runs for stage in run.stages}
    assert used >= {"sft", "dpo", "reward_model", "grpo", "diffusion_dpo", "draft"}
    for run in runs:
        assert any(stage.auxiliary for stage in run.stages)
        rewards = [reward for stage in run.stages for reward in stage.rewards.values()]
        learned = [reward.policy for reward in rewards if reward.policy is not None]
        assert [run.policies[name].type.endswith("reward_model") for name in learned] == [True]
