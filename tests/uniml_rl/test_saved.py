"""What can be done with a run afterwards, from its folder or a checkpoint: sample, evaluate, export."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as Picture
from tiny_models_audio import tiny_musicgen
from tiny_models_diffusion import tiny_stable_diffusion, tiny_wan
from tiny_models_text import tiny_gpt2
from toy_policy import ToyPolicy
from toy_runs import COUNT_A, COUNT_B, held_out, interrupt, rows_of, stage, weights_of, write_run

from modalities.base import Trajectory
from modalities.errors import UserError
from modalities.samples import Image
from uniml_rl.run import train_from_yaml
from uniml_rl.saved import evaluate_from, export_from, open_run, sample_from


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two policies, `a` and then `b`, each evaluated."""
    folder = tmp_path_factory.mktemp("saved")
    stages = [
        stage(folder, "one", policy="a", evaluation=held_out(folder)),
        stage(folder, "two", policy="b", rewards=COUNT_B, evaluation=held_out(folder, rewards=COUNT_A)),
    ]
    config = write_run(folder, *stages, checkpoint={"every": 1, "keep": 9})
    train_from_yaml(config, [], folder / "run")
    return folder / "run"


def checkpoint_of(run: Path, iteration: int) -> str:
    return str(run / "checkpoints" / f"iteration-{iteration:06d}")


def table_of(policy: Any) -> torch.Tensor:
    assert isinstance(policy, ToyPolicy)
    return policy.table.weight.detach()


def test_the_newest_weights_of_a_run_and_those_of_a_checkpoint(run: Path) -> None:
    assert torch.equal(table_of(open_run(run).build("b")), weights_of(run, "b"))
    earlier = open_run(checkpoint_of(run, 3))
    assert earlier.folder == run and earlier.last_stage().name == "two"
    assert not torch.equal(table_of(earlier.build("b")), weights_of(run, "b"))
    first = open_run(checkpoint_of(run, 1))
    assert first.last_stage().name == "one" and table_of(first.build("a")).any()
    assert open_run(run).policy_name(None) == "b" and open_run(run).policy_name("a") == "a"


def test_between_two_stages_the_one_that_trained_counts(run: Path) -> None:
    """The checkpoint at the end of stage one; nothing of stage two has happened yet."""
    between = open_run(checkpoint_of(run, 2))
    assert between.last_stage().name == "one" and between.policy_name(None) == "a"


def test_an_export_that_no_key_can_open_is_never_replaced_by_untrained_weights(run: Path) -> None:
    """The toy's block has no `model`: built anew it would be the untrained policy."""
    with pytest.raises(UserError, match="policy 'a' is not in the checkpoint, and ToyConfig has no key `model`"):
        open_run(run).build("a")


def test_samples_come_from_the_weights_that_were_asked_for(run: Path, tmp_path: Path) -> None:
    def texts(source: str | Path, **keys: Any) -> str:
        arguments = {"prompts": ["x", "y"], "number": 20, "seed": 3, "out": tmp_path} | keys
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        path = sample_from(str(source), **arguments)
        assert path not in before and path.stem.startswith(f"seed-{arguments['seed']}")
        assert all(path.read_bytes() == content for path, content in before.items()), "nothing is overwritten"
        return path.read_text()

    newest = texts(run)
    assert texts(run) == newest == texts(checkpoint_of(run, 4))
    assert texts(run, seed=4) != newest
    assert texts(checkpoint_of(run, 1)) != texts(checkpoint_of(run, 3))
    assert len(newest.splitlines()) == 2 + 2 * 20
    names = [f"sample-{prompt:03d}-{number}.txt" for prompt in range(2) for number in range(20)]
    alone = [(tmp_path / "seed-3" / name).read_text() for name in names]
    assert alone == [line.split("|")[2].strip().removesuffix(" (cut off)") for line in newest.splitlines()[2:]]
    assert sample_from(str(run), ["x"], 1, 0, None).is_relative_to(run / "samples")


def test_evaluating_afterwards_repeats_the_last_evaluation_of_the_run(run: Path, capsys: pytest.CaptureFixture) -> None:
    last = rows_of(run)[-1]["metrics"]
    for source in (str(run), checkpoint_of(run, 4)):
        by_stage = evaluate_from(source)
        assert by_stage.keys() == {"two"}, "of the toy `a` no weights can be opened any more"
        found = by_stage["two"]
        assert found.keys() == {"total", "b", "a"}
        for name, mean in found.items():
            assert mean == last[f"eval/{name}/mean"]
    assert "not evaluated: policy 'a' is not in the checkpoint" in capsys.readouterr().out
    more = evaluate_from(str(run), ["stages.two.evaluation.samples_per_prompt=40"])["two"]
    assert more["b"] == pytest.approx(found["b"], abs=0.4)
    assert more["b"] not in (found["b"], 0, 1)


def test_evaluating_a_file_measures_what_has_not_been_trained(run: Path) -> None:
    found = evaluate_from(str(run.parent / "run.yaml"))
    for name, reward in (("one", "a"), ("two", "b")):
        first = next(row for row in rows_of(run) if (row["stage"], row["iteration"]) == (name, 0))
        assert found[name][reward] == first["metrics"][f"eval/{reward}/mean"]


def test_a_stage_without_an_evaluation_does_not_hinder_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stages = [stage(tmp_path, "one", evaluation=held_out(tmp_path)), stage(tmp_path, "two")]
    train_from_yaml(write_run(tmp_path, *stages), [], tmp_path / "run")
    last = next(row for row in reversed(rows_of(tmp_path / "run")) if row["stage"] == "one")["metrics"]
    capsys.readouterr()
    found = evaluate_from(str(tmp_path / "run"))
    assert found.keys() == {"one"} and found["one"]["a"] != last["eval/a/mean"], "stage two trained the policy on"
    assert "not evaluated: stage 'two' has no `evaluation` block" in capsys.readouterr().out


def test_exports_are_the_weights_that_were_asked_for(run: Path, tmp_path: Path) -> None:
    def exported(source: str | Path, name: str, policy: str | None) -> torch.Tensor:
        folder = export_from(str(source), tmp_path / "deep" / name, policy)
        table: torch.Tensor = torch.load(folder / "table.pt", weights_only=True)["weight"]
        return table

    assert torch.equal(exported(run, "newest", None), weights_of(run, "b"))
    assert torch.equal(exported(run, "first", "a"), weights_of(run, "a"))
    assert torch.equal(
        exported(checkpoint_of(run, 3), "old", "b"), table_of(open_run(checkpoint_of(run, 3)).build("b"))
    )
    with pytest.raises(UserError, match="newest exists; remove it or name another folder"):
        export_from(str(run), tmp_path / "deep" / "newest")


def test_a_run_that_has_only_begun_says_so(tmp_path: Path) -> None:
    config = write_run(tmp_path, stage(tmp_path))
    interrupt(config, tmp_path / "run", (0, 0))
    for attempt in (
        lambda: sample_from(str(tmp_path / "run"), ["x"], 1, 0, None),
        lambda: export_from(str(tmp_path / "run"), tmp_path / "out"),
    ):
        with pytest.raises(UserError, match="holds no weights of policy 'letters' yet"):
            attempt()
    with pytest.raises(UserError, match="stage 'only' has no `evaluation` block"):
        train_from_yaml(config, [], tmp_path / "run")
        evaluate_from(str(tmp_path / "run"))


def test_mistakes_are_one_message(run: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"  # a run of another test may lie beside `tmp_path` itself
    nothing.mkdir()
    for call in (
        lambda source: sample_from(source, ["x"], 1, 0, tmp_path),
        lambda source: export_from(source, tmp_path / "out"),
        lambda source: evaluate_from(source),
    ):
        with pytest.raises(UserError, match=r"rum does not exist: expected .*; did you mean '.*/run'\?$"):
            call(str(run.parent / "rum"))
        with pytest.raises(UserError, match=r"has (no|none of) config\.yaml.*expected a run's folder[^;]*$"):
            call(str(nothing))  # not: did you mean the folder itself
    with pytest.raises(UserError, match="/proc/nothing/a cannot be written"):
        export_from(str(run), "/proc/nothing/a", "a")
    with pytest.raises(UserError, match=r"has no policy 'aa'; it has \['a', 'b'\]; did you mean 'a'\?"):
        sample_from(str(run), ["x"], 1, 0, tmp_path, (), "aa")
    with pytest.raises(UserError, match=r"temperature=0\.5: this policy has no sampling settings to change"):
        sample_from(str(run), ["x"], 1, 0, tmp_path, ["temperature=0.5"])


@pytest.mark.parametrize(
    ("prompt", "as_json"),
    [("", '""'), ("  ", '"  "'), (math.nan, "NaN"), (math.inf, "Infinity"), (None, "null"), (7, "7")],
)
def test_a_prompt_that_is_no_text_is_refused(run: Path, tmp_path: Path, prompt: Any, as_json: str) -> None:
    with pytest.raises(UserError, match="prompt 1 must be a text that is not blank"):
        sample_from(str(run), ["x", prompt], 1, 0, tmp_path)
    (tmp_path / "bad.jsonl").write_text(f'{{"prompt": "x"}}\n{{"prompt": {as_json}}}\n')
    block = stage(tmp_path, prompts={"type": "file", "path": str(tmp_path / "bad.jsonl")})
    with pytest.raises(UserError, match=r"bad\.jsonl:2: the prompt must be a text that is not blank"):
        train_from_yaml(write_run(tmp_path, block), [], tmp_path / "run")


def test_samples_never_go_where_a_file_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UserError, match="taken is a file"):
        sample_from(str(run), ["one"], 1, 0, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_plain_model_folder_is_sampled_and_has_no_policies(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = tiny_gpt2(tmp_path / "model")
    path = sample_from(str(model), ["a b"], 2, 0, tmp_path / "out", ["max_new_tokens=3"])
    assert len(path.read_text().splitlines()) == 4
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[2] == "a b"
    assert said[1].startswith("  ")
    assert said[-1] == f"2 samples: {path}, each by itself in {tmp_path / 'out' / 'seed-0'}"
    with pytest.raises(UserError, match=r"--policy x: .* is no run, so it has no policies"):
        sample_from(str(model), ["a b"], 2, 0, tmp_path / "out", (), "x")


@pytest.mark.parametrize(
    ("make", "overrides", "ending"),
    [
        (tiny_musicgen, ["frames=4"], ".wav"),
        (tiny_stable_diffusion, ["steps=2"], ".png"),
        (tiny_wan, ["steps=2", "height=32", "width=32", "frames=5"], ".png"),
    ],
)
def test_a_plain_folder_of_any_kind_is_sampled_each_sample_into_a_file_of_its_own(
    make: Any, overrides: list[str], ending: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "model")
    first, second = (sample_from(str(model), ["a b", "c"], 2, 0, tmp_path / "out", overrides) for _ in range(2))
    assert first.parent == second.parent and first.name != second.name
    for path in (first, second):
        files = sorted((path.parent / path.stem).iterdir())
        assert [file.name for file in files] == [f"sample-00{p}-{n}{ending}" for p in range(2) for n in range(2)]
        assert [file.read_bytes() for file in files] == [
            file.read_bytes() for file in sorted((first.parent / first.stem).iterdir())
        ]
    if make is tiny_stable_diffusion:
        assert Picture.open(files[0]).size == (16, 16)
    if make is tiny_wan:
        assert Picture.open(files[0]).n_frames == 5


def test_a_policy_whose_samples_branch_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are shown with the prompts that they descend from, also where there are more of them than requests."""
    run = tmp_path / "run"
    train_from_yaml(write_run(tmp_path, stage(tmp_path)), [], run)
    rollout = ToyPolicy.rollout

    def branching(policy: ToyPolicy, requests: Any, sampling: Any = None) -> Trajectory:
        first, second = (rollout(policy, twice) for twice in (requests, [r for r in requests for _ in range(2)]))
        second.segments[0].parent = torch.arange(len(requests)).repeat_interleave(2)
        return Trajectory([first.segments[0], second.segments[0]], list(requests))

    monkeypatch.setattr(ToyPolicy, "rollout", branching)
    text = sample_from(str(run), ["first", "second"], 1, 0, tmp_path).read_text()
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == ["first", "", "second", ""]


def test_a_picture_of_every_prompt_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train_from_yaml(write_run(tmp_path, stage(tmp_path)), [], run)
    monkeypatch.setattr(
        ToyPolicy, "decode", lambda policy, trajectory: [Image(torch.zeros(3, 8, 8)) for _ in trajectory.requests]
    )
    heights = {}
    for count in (10, 20):
        path = sample_from(str(run), [f"prompt {index}" for index in range(count)], 1, 0, tmp_path / str(count))
        heights[count] = Picture.open(path).height
    assert heights[20] > 1.8 * heights[10]
