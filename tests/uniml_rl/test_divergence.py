"""A run whose numbers are no longer finite ends with one message, and leaves nothing on the disk that is not finite."""

from pathlib import Path

import pytest
import torch
from toy_runs import held_out, stage, write_run

from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.engines.base import StepReport
from uniml_rl.engines.endings import DivergedError
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml


def kept(folder: Path) -> dict[str, bool]:
    """The checkpoints, and whether all of their weights are finite."""
    paths = CheckpointStore(folder / "checkpoints", 1).complete()
    weights = {path.name: load_checkpoint(path).weights["letters"] for path in paths}
    return {name: all(bool(tensors[key].isfinite().all()) for key in tensors) for name, tensors in weights.items()}


def poisoned(monkeypatch: pytest.MonkeyPatch, call: int, says_so: bool) -> None:
    """From the n-th optimizer step on the weights are not numbers, and the step's report tells it or not."""
    original, calls = TorchEngine.step, [0]

    def step(engine: TorchEngine, iteration: int) -> StepReport:
        report = original(engine, iteration)
        calls[0] += 1
        if calls[0] < call:
            return report
        for parameter in engine._parameters("letters"):
            parameter.data.fill_(torch.nan)
        return StepReport(report.gradient_norm, {"letters": torch.nan} if says_so else {"letters": 0.1}, False)

    monkeypatch.setattr(TorchEngine, "step", step)


@pytest.mark.parametrize("optimizer", [{"type": "adamw"}, {"type": "sgd", "gradient_clip": None}])
def test_a_rate_that_is_far_too_high_is_named(tmp_path: Path, optimizer: dict[str, object]) -> None:
    config = write_run(tmp_path, stage(tmp_path, optimizer={"learning_rate": 1e30, **optimizer}))
    with pytest.raises(DivergedError) as caught:
        train_from_yaml(config, [], tmp_path / "run")
    for part in (
        "in update (stage only, iteration 1): an optimizer step has moved the weights of 'letters'",
        "Lower stages.only.optimizer.learning_rate (1e+30)",
        "No checkpoint is from before that. Start again",
    ):
        assert part in str(caught.value)
    clips = "stages.only.optimizer.gradient_clip, which is null, to 1.0"
    assert (clips in str(caught.value)) == ("gradient_clip" in optimizer)
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize("says_so", [True, False])
def test_the_last_good_checkpoint_is_named_and_none_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says_so: bool
) -> None:
    """Of weights that no step has told of, the checkpoint itself finds that they are not finite."""
    config = write_run(tmp_path, stage(tmp_path, until={"iterations": 5}), checkpoint={"every": 1, "keep": 9})
    poisoned(monkeypatch, 3, says_so)
    with pytest.raises(
        DivergedError, match=r"stage only, iteration 3\).*The last good checkpoint is \S+-000002: `"
    ) as it:
        train_from_yaml(config, [], tmp_path / "run")
    assert says_so or (
        "checkpoint (stage only" in str(it.value) and "letters/current/table.weight: not finite" in str(it.value)
    )
    assert kept(tmp_path / "run") == {"iteration-000001": True, "iteration-000002": True}
    assert [path.name[:10] for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["iteration-"] * 2


def test_no_export_holds_what_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a stage the export comes before the checkpoint."""
    config = write_run(tmp_path, stage(tmp_path, until={"iterations": 3}), checkpoint={"every": 2})
    poisoned(monkeypatch, 3, says_so=False)
    with pytest.raises(DivergedError, match=r"current/table.weight: not finite\..*last good checkpoint is \S+-000002"):
        train_from_yaml(config, [], tmp_path / "run")
    assert kept(tmp_path / "run") == {"iteration-000002": True} and not (tmp_path / "run" / "export").exists()


def test_a_checkpoint_of_the_weights_that_fail_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every gradient from the second iteration on is no number, so nothing moves any more while checkpoints go on."""
    evaluated = stage(tmp_path, until={"iterations": 9}, evaluation=held_out(tmp_path))
    config = write_run(tmp_path, evaluated, checkpoint={"every": 1, "keep": 9}, engine={"max_skipped_steps": 3})
    backward, calls = TorchEngine.backward, [0]

    def failing(engine: TorchEngine, loss: torch.Tensor) -> None:
        calls[0] += 1
        backward(engine, loss * (torch.nan if calls[0] > 1 else 1))

    monkeypatch.setattr(TorchEngine, "backward", failing)
    with pytest.raises(DivergedError) as caught:
        train_from_yaml(config, [], tmp_path / "run")
    assert "3 optimizer steps in a row had a non-finite gradient" in str(caught.value)
    assert "No checkpoint is from before that: " in str(caught.value)
    assert "iteration-000003 and " in str(caught.value) and "has the weights that failed" in str(caught.value)


def test_a_start_that_is_not_finite_does_not_blame_the_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run(tmp_path, stage(tmp_path), engine={"max_skipped_steps": 1})
    backward = TorchEngine.backward
    monkeypatch.setattr(TorchEngine, "backward", lambda engine, loss: backward(engine, loss * torch.nan))
    with pytest.raises(DivergedError, match="has not changed a weight yet") as caught:
        train_from_yaml(config, [], tmp_path / "run")
    assert "learning_rate" not in str(caught.value)
