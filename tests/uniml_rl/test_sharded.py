"""Weights divided over two ranks by FSDP2: what each holds, what is sent, checkpoints for other numbers of ranks."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LAUNCHER, TESTS, ends, start_pair, start_ranks
from pydantic import ValidationError
from rank_work import RUN
from sharded_work import FROM_ONE, FROM_TWO_TO_FOUR, RESULTS, RUNS, TENSOR
from tiny_models_text import tiny_gpt2, tiny_llama_of_heads
from toy_runs import held_out, rows_of, stage, write_run
from transformers import AutoModelForCausalLM

from modalities.errors import UserError
from modalities.shards import blocks_of
from modalities.text import TextPolicyConfig
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.torch_engine import TorchEngineConfig
from uniml_rl.run import train_from_yaml

MIDDLE = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a curriculum with a critic, a reference, an average and an evaluation, whole and gone on with."""
    folder = tmp_path_factory.mktemp("sharded")
    policies = {
        "letters": {
            "type": "text",
            "model": str(tiny_llama_of_heads(folder / "model")),
            "sampling": {"max_new_tokens": 5},
        }
    }
    common: dict[str, Any] = {
        "prompts_per_iteration": 5,
        "micro_batch": 2,
        "optimizer": {"learning_rate": 0.001, "epsilon": 1e-6},
    }
    first = stage(
        folder,
        "first",
        algorithm={"name": "ppo", "minibatches": 1, "kl": {"coefficient": 0.1}},
        critic={},
        ema={"decay": 0.5},
        evaluation=held_out(folder, every=2),
        until={"iterations": 4},
        **common,
    )
    second = stage(folder, "second", algorithm={"name": "grpo", "kl": {"coefficient": 0.1}}, **common)
    engine = {"type": "torch", "device": "cpu", "shard": "fsdp"}
    checkpoint = {"every": 1, "keep": 9, "asynchronous": True}
    write_run(folder, first, second, policies=policies, engine=engine, checkpoint=checkpoint)
    train_from_yaml(folder / RUN, [], folder / "alone")
    for copy in (FROM_ONE, TENSOR):
        stopped_in_the_middle(folder / "alone", folder / copy)
    ended = ends(start_pair([str(TESTS / "sharded_work.py"), str(folder)]))
    assert [code for code, _, _ in ended] == [0, 0], "\n".join(errors[-3000:] for _, _, errors in ended)
    for copy in ("from-two", FROM_TWO_TO_FOUR):
        stopped_in_the_middle(folder / "fsdp", folder / copy)
    ended = ends(start_ranks(4, [str(TESTS / "sharded_work.py"), str(folder), FROM_TWO_TO_FOUR]))
    assert [code for code, _, _ in ended] == [0, 0, 0, 0], "\n".join(errors[-3000:] for _, _, errors in ended)
    train_from_yaml(folder / RUN, ["engine.rollout_weights=gathered"], folder / "from-two")
    stopped_in_the_middle(folder / TENSOR, folder / "from-tensor", iterations=MIDDLE + 2)
    train_from_yaml(folder / RUN, [], folder / "from-tensor")
    return folder


def stopped_in_the_middle(run: Path, copy: Path, iterations: int = MIDDLE) -> None:
    """The run's folder as it was after some iterations of a stage, but for the rows of the later ones."""
    shutil.copytree(run, copy)
    for path in CheckpointStore(copy / "checkpoints", 9).complete():
        if int(path.name.rpartition("-")[2]) > iterations:
            shutil.rmtree(path)
    shutil.rmtree(copy / "export")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RESULTS).read_text())  # type: ignore[no-any-return]


def exported(folder: Path, run: str) -> torch.Tensor:
    return weights_in(folder / run / "export" / "letters")


def weights_in(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("run", RUNS)
def test_each_of_two_ranks_holds_half_of_weights_gradients_and_moments(run: str, results: dict[str, Any]) -> None:
    found = results[run]
    assert 0 < found["parameters"] <= 0.525 * found["whole"]
    assert 0 < found["gradients"] <= 0.525 * found["whole"]
    assert 0 < found["moments"] <= 2 * 0.525 * found["whole"]


def test_a_rank_of_tensor_parallelism_holds_the_planned_half_and_all_of_the_rest(
    folder: Path, results: dict[str, Any]
) -> None:
    """As the estimate of memory has it: norms, biases behind a sum over ranks and the critic's head are whole."""
    block = TextPolicyConfig(model=str(folder / "model"))
    sizes, found = block.inspect().weights, results[TENSOR]
    named = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
    whole = [key for key in named if "norm" in key or key.endswith(("o_proj.bias", "down_proj.bias"))]
    assert sizes.planned == sum(p.numel() for key, p in named.items() if key not in whole) < sizes.trainable
    assert found["parameters"] == found["gradients"] == found["whole"] - 4 * sizes.planned // 2
    assert found["moments"] == 2 * (found["parameters"] - 4)  # a bias of one number is not counted


@pytest.mark.parametrize("run", RUNS)
def test_a_rank_never_has_more_than_its_part_and_the_largest_layers(run: str, results: dict[str, Any]) -> None:
    """Every move to the device that a GPU would need makes memory here, too; whole before it is divided: 1.5 times."""
    found = results[run]
    assert found["made"] <= 0.525 * found["whole"] + found["largest"] < 1.1 * found["whole"]


def test_a_gathered_rollout_gathers_each_parameter_once_and_nothing_in_its_passes(results: dict[str, Any]) -> None:
    found = results["fsdp"]
    assert found["gathers inside"] == 0
    assert found["policy"] <= found["gathered in a rollout"] <= 1.1 * found["policy"]
    assert results["fsdp-sharded"]["gathers inside"] > 10


def test_in_half_precision_no_casts_of_divided_weights_pile_up(results: dict[str, Any]) -> None:
    """Autocast's cache and its backward passes would keep one of every weight, whole on each rank."""
    found = results["casts"]
    assert 0 < found["rollout"] <= 0.5 * found["all"]
    assert 0 < found["forward"] <= 0.5 * found["all"]


@pytest.mark.parametrize("run", [*RUNS, FROM_ONE, "from-two", FROM_TWO_TO_FOUR, TENSOR, "from-tensor"])
def test_runs_of_one_two_and_four_ranks_and_those_that_change_in_the_middle_end_alike(run: str, folder: Path) -> None:
    start, alone = weights_in(folder / "model"), exported(folder, "alone")
    assert (exported(folder, run) - alone).norm() <= 1e-3 * (alone - start).norm()
    rows, expected = rows_of(folder / run), rows_of(folder / "alone")
    assert [row["iteration"] for row in rows] == [row["iteration"] for row in expected]
    for name in ("eval/total/mean", "eval_ema/total/mean", "kl/reference", "reward/mean"):
        assert [row.get(name) for row in rows] == pytest.approx([row.get(name) for row in expected], abs=1e-4), name


def test_ranks_write_their_own_parts_and_anybody_reads_the_whole(folder: Path) -> None:
    path = folder / "fsdp" / "checkpoints" / f"iteration-{MIDDLE:06d}"
    sizes = [file.stat().st_size for file in (path / "tensors").iterdir()]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    paths = path, folder / "alone" / "checkpoints" / path.name
    written, alone = (load_checkpoint(each).weights["letters"] for each in paths)
    assert written.keys() == alone.keys() and any(key.startswith("ema/") for key in written)
    for key, value in written.items():
        torch.testing.assert_close(value, alone[key], rtol=1e-2, atol=1e-4)


def test_groups_of_ranks_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(LAUNCHER, ("0", "0", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="4 processes cannot be divided into groups of 3"):
        TorchEngineConfig(device="cpu", shard="hsdp", shard_ranks=3).build()


def test_blocks_are_those_that_the_library_does_not_split(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_gpt2(tmp_path / "model"))
    assert [type(block).__name__ for block in blocks_of(model)] == ["GPT2Block"] * 2
    plain = torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Identity()]))
    assert [type(block).__name__ for block in blocks_of(plain)] == ["Linear"]


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit"])
def test_optimizers_that_read_whole_weights_are_refused(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OptimizerSettings, "require", lambda self, device: None)
    settings = OptimizerSettings.model_validate({"type": optimizer})
    TorchEngineConfig(device="cpu", shard="ddp").require_optimizer(settings)
    for shard in ("fsdp", "hsdp"):
        with pytest.raises(UserError, match=f"type: {optimizer} reads each weight whole, and engine.shard: {shard}"):
            TorchEngineConfig(device="cpu", shard=shard).require_optimizer(settings)


@pytest.mark.parametrize("seconds", [0.001, 1e30, math.inf, math.nan])
def test_a_time_out_is_a_time_that_can_be_waited(seconds: float) -> None:
    with pytest.raises(ValidationError, match="timeout_seconds"):
        TorchEngineConfig(device="cpu", shard="ddp", timeout_seconds=seconds)
