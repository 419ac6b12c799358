"""The schema of a run: what contradicts itself is one message at the line of the key that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_runs import COUNT_A, COUNT_B, TOY, held_out, load_run, stage, weights_of, write_run

from modalities.errors import UserError
from uniml_rl.run import train_from_yaml

CHAIN = {"type": "chain", "parts": ["letters", "leters"]}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "an unknown policy": ({"policy": "leters"}, {}, "policy", "leters: must be one of the policies .*'letters'"),
    "a name twice": ({"name": "fine"}, {}, "name", "fine: another stage has this name"),
    "an unknown rehearsal": (
        {"rehearsal": [{"stage": "fin", "share": 0.5}]}, {}, "rehearsal.0.stage",
        "fin: must be an earlier stage of policy 'letters' that has prompts; did you mean 'fine'",
    ),
    "a rehearsal of what has no prompts": (
        {"rehearsal": [{"stage": "given", "share": 0.5}]}, {}, "rehearsal.0.stage",
        "given: must be an earlier stage of policy 'letters' that has prompts",
    ),
    "too much rehearsal": (
        {"rehearsal": [{"stage": "fine", "share": 0.5}, {"stage": "fine", "share": 0.5}]}, {}, "rehearsal",
        "the shares add up to 1 or more",
    ),
    "sampling of a policy that has none": (
        {"evaluation": {"sampling": {"steps": 3}}}, {}, "evaluation.sampling", "this policy has no sampling settings"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_contradiction_is_said_at_the_key_of_its_own_stage(case: str, tmp_path: Path) -> None:
    keys, _, key, message = WRONG[case]
    keys = {name: held_out(tmp_path) | value if name == "evaluation" else value for name, value in keys.items()}
    wrong = stage(tmp_path, "wrong") | keys
    given = stage(tmp_path, "given", algorithm="sft", records={"type": "demonstrations", "path": "a.jsonl"})
    given = {key: value for key, value in given.items() if key not in ("prompts", "group_size", "rewards")}
    path = write_run(tmp_path, stage(tmp_path, "fine"), given, wrong, policies={"letters": TOY})
    with pytest.raises(UserError, match=message) as caught:
        load_run(path)
    where = _line(path, ["stages", 2, *(int(part) if part.isdecimal() else part for part in key.split("."))])
    assert str(caught.value).startswith(f"{path}:{where}: stages.{wrong['name']}.{key}: ")


@pytest.mark.parametrize(
    ("name", "block", "key", "message"),
    [
        ("both", CHAIN, "parts.1", "leters: must be one of the policies .*did you mean 'letters'"),
        ("idle", TOY, "", "no stage trains this policy"),
    ],
)
def test_a_policy_that_does_not_fit_is_said_at_its_own_line(
    name: str, block: dict[str, Any], key: str, message: str, tmp_path: Path
) -> None:
    path = write_run(tmp_path, stage(tmp_path), policies={"letters": TOY, name: block})
    with pytest.raises(UserError, match=message) as caught:
        load_run(path)
    place = ["policies", name, *(int(part) if part.isdecimal() else part for part in key.split(".") if part)]
    assert str(caught.value).startswith(f"{path}:{_line(path, place)}: {'.'.join(map(str, place))}: ")


def _line(path: Path, keys: list[str | int]) -> int:
    """The line of a key path, by yaml's own nodes: of the key, or of the item of a list."""
    node, line = yaml.compose(path.read_text()), 0
    for key in keys:
        if isinstance(node, yaml.SequenceNode):
            node = node.value[int(key)]
            line = node.start_mark.line
        else:
            entry = next(pair for pair in node.value if pair[0].value == str(key))
            line, node = entry[0].start_mark.line, entry[1]
    return line + 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rewards": {"a": COUNT_A["a"] | {"weight": 0.0}}}, "rewards: a: every weight is 0"),
        ({"algorithm": "draft", "reward_control": "shuffle"}, "reward_control: shuffle permutes numbers"),
        ({"algorithm": {"name": "dpo", "beta": 0.2}}, r"algorithm\.beta: unknown key; .*did you mean 'loss\.beta'"),
    ],
)
def test_a_key_that_nothing_would_read_is_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_run(write_run(tmp_path, stage(tmp_path, **keys)))


def test_an_unknown_key_is_told_the_keys_of_its_own_algorithm(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allowed here: name, epochs, minibatches, objective, gradient"):
        load_run(write_run(tmp_path, stage(tmp_path, algorithm={"name": "draft", "kl": None})))


def test_rewards_are_compared_each_by_itself_only_where_there_are_several(tmp_path: Path) -> None:
    algorithm = {"name": "grpo", "advantage": {"normalisation": "per_reward", "whiten": True}}
    measured = COUNT_B["b"] | {"weight": 0.0}
    for rewards, keys, message in (
        (COUNT_A, {}, "only a has a weight"),
        (COUNT_A | {"b": measured}, {}, "only a has a weight"),
        (COUNT_A | COUNT_B, {"reward_control": "shuffle"}, "per_reward does not read"),
    ):
        path = write_run(tmp_path, stage(tmp_path, algorithm=algorithm, rewards=rewards, **keys))
        with pytest.raises(UserError, match=message):
            load_run(path)
    path = write_run(tmp_path, stage(tmp_path, algorithm=algorithm, rewards=COUNT_A | COUNT_B))
    train_from_yaml(path, [], tmp_path / "run")
    assert weights_of(tmp_path / "run").abs().max() > 0
