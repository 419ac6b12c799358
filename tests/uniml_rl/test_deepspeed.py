"""DeepSpeed's ZeRO beside PyTorch's own engine, in one process; `zero_work.py` looks at two."""

import copy
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import LIMIT, ends, start_pair
from torch import Tensor, nn
from torch.utils import cpp_extension
from toy_runs import COUNT_A, COUNT_B, held_out, load_run, rows_of, stage, weights_of, write_run
from zero_work import Scaled, Tower, optimizers_of

from modalities.errors import UserError
from modalities.lora import LoraSettings, attach_lora, is_untrained
from modalities.shards import whole
from modalities.weights import WeightSets
from uniml_rl.check import preflight
from uniml_rl.checkpoint import CheckpointStore
from uniml_rl.config import load_yaml
from uniml_rl.engines.base import Engine, StepReport
from uniml_rl.engines.deepspeed_engine import DeepSpeedEngine, DeepSpeedEngineConfig
from uniml_rl.engines.deepspeed_start import announce_compiling
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml

STAGES = (1, 2, 3)
OFFLOADED = ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters"))
ROWS = torch.linspace(-1, 1, 12).view(3, 4)


built: list[DeepSpeedEngine] = []


def deepspeed(zero: Any, **keys: Any) -> DeepSpeedEngine:
    built.append(DeepSpeedEngineConfig(device="cpu", zero=zero, **keys).build())
    return built[-1]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No process group either: later tests fork this process, and its threads would be missing there."""
    linear = nn.functional.linear
    yield
    while built:
        built.pop().close()
    assert not torch.distributed.is_initialized()
    assert nn.functional.linear is linear


def weights(modules: dict[str, nn.Module]) -> Tensor:
    return torch.cat([whole(p).flatten() for module in modules.values() for p in module.parameters()])


def train(engine: Engine, modules: dict[str, nn.Module], steps: int, first: int = 0) -> list[StepReport]:
    """Two modules of two optimizers under one loss, three micro-batches a step, the first of one module alone."""
    reports = []
    for step in range(first, first + steps):
        engine.backward(modules["one"](ROWS * (step + 1)).sum())
        for rows in (ROWS, ROWS + step):
            engine.backward((modules["one"](rows) * modules["two"](rows).tanh()).sum() / 2)
        reports.append(engine.step(step))
    return reports


def assert_alike(found: StepReport, expected: StepReport) -> None:
    assert (found.skipped, found.loss_scale) == (expected.skipped, expected.loss_scale)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5, nan_ok=True)
    assert found.update_weight_ratio == pytest.approx(expected.update_weight_ratio, rel=1e-4)


def towers() -> dict[str, nn.Module]:
    return {"one": Tower(0), "two": Tower(1)}


@pytest.mark.parametrize("zero, offload", [*((zero, "none") for zero in STAGES), *OFFLOADED])
def test_steps_norms_clipping_and_skipped_steps_are_torchs(zero: int, offload: str) -> None:
    paths = []
    for engine in (TorchEngine("cpu"), deepspeed(zero, offload=offload)):
        modules = towers()
        schedule = {"type": "linear", "decay_iterations": 4, "warm_up_iterations": 1}
        engine.attach(optimizers_of(modules, gradient_clip=0.3, schedule=schedule))
        reports = train(engine, modules, 3)
        engine.backward(modules["one"](ROWS).sum() * torch.nan)
        engine.backward(modules["two"](ROWS).sum())
        reports.append(engine.step(3))
        before = weights(modules)
        engine.backward(modules["two"](ROWS).sum())  # nothing of the first module, which keeps its moments
        reports += [engine.step(3), *train(engine, modules, 1)]
        assert not torch.equal(weights(modules), before)
        paths.append((weights(modules), reports, engine.learning_rates(2)))
    (expected, theirs, rates), (found, ours, own_rates) = paths
    assert [report.skipped for report in theirs] == [False, False, False, True, False, False]
    for one, other in zip(ours, theirs, strict=True):
        assert_alike(one, other)
    assert rates == own_rates
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [ROWS, ROWS.expand(2, 3, 4)])
def test_linear_layers_of_zero_3_round_as_torchs_do_in_half_precision(rows: Tensor) -> None:
    found = []
    for engine in (TorchEngine("cpu", "bf16"), deepspeed(3, precision="bf16")):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))
        settings = OptimizerSettings(type="sgd", learning_rate=1.0, weight_decay=0.0, gradient_clip=None)
        engine.attach({"policy": ({"m": module}, settings)})
        with engine.autocast():
            output = module(rows)
        engine.backward(output.float().square().sum())
        engine.step(0)
        found.append((output.detach().clone(), weights({"m": module})))
    (output, updated), (ours, own_updated) = found
    assert output.dtype == torch.bfloat16 and torch.equal(ours, output)
    torch.testing.assert_close(own_updated, updated, rtol=0, atol=1e-6)


def test_too_many_skipped_steps_end_the_run() -> None:
    engine, modules = deepspeed(2, max_skipped_steps=2), towers()
    engine.attach(optimizers_of(modules))
    engine.backward(modules["one"](ROWS).sum() * torch.inf)
    assert engine.step(0).skipped
    engine.backward(modules["one"](ROWS).sum() * torch.nan)
    with pytest.raises(FloatingPointError, match="2 optimizer steps in a row"):
        engine.step(0)


@pytest.mark.parametrize("zero, offload", [*((zero, "none") for zero in STAGES), (3, "parameters")])
def test_a_state_of_either_engine_goes_on_in_the_other(zero: int, offload: str) -> None:
    saved = {}
    for name, engine in (("torch", TorchEngine("cpu")), ("zero", deepspeed(zero, offload=offload))):
        modules = towers()
        engine.attach(optimizers_of(modules))
        train(engine, modules, 2)
        whole_weights = {key: {n: whole(p) for n, p in m.named_parameters()} for key, m in modules.items()}
        saved[name] = copy.deepcopy((whole_weights, engine.state_dict()))
        train(engine, modules, 2, first=2)
        saved[f"{name} end"] = weights(modules)
    zeros = [deepspeed(zero, offload=offload) for _ in range(2)]
    for name, engine in (("zero", TorchEngine("cpu")), ("torch", zeros[0]), ("zero", zeros[1])):
        modules = towers()
        for key, module in modules.items():
            module.load_state_dict(saved[name][0][key])
        engine.attach(optimizers_of(modules))
        engine.load_state_dict(copy.deepcopy(saved[name][1]))
        train(engine, modules, 2, first=2)
        torch.testing.assert_close(weights(modules), saved["torch end"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("zero", STAGES)
def test_modules_go_from_one_stage_of_a_run_to_the_next(zero: int) -> None:
    ends = []
    for engine in (TorchEngine("cpu"), deepspeed(zero)):
        modules = towers()
        sets = WeightSets(modules)
        for number in range(2):
            engine.attach(optimizers_of(modules))
            sets.keep("reference")
            train(engine, modules, 1 + number)
            sets.average("ema", 0.5)
            sets.average("ema", 0.5)
        with sets.using("reference"):
            ends.append((weights(modules), modules["one"](ROWS).detach()))
        with sets.using("ema"):
            ends[-1] += (weights(modules), modules["one"](ROWS).detach())
        state = {key: value.clone() for key, value in engine.whole(sets.state())}
        sets.drop("reference")
        sets.load_state(state)
        assert all(torch.equal(state[key], value) for key, value in engine.whole(sets.state()))
        ends[-1] += (weights(modules),)
    for found, expected in zip(*ends, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_an_adapter_over_a_half_precision_base_is_divided_with_it() -> None:
    ends = []
    for engine in (TorchEngine("cpu", "bf16"), deepspeed(3, precision="bf16")):
        module = Tower(0).bfloat16()
        attach_lora(module, LoraSettings(rank=2), ["first", "last"], seed=0)
        sets = WeightSets({"one": module})
        engine.attach({"policy": ({"one": module}, OptimizerSettings(learning_rate=0.05))})
        assert is_untrained(module)
        sets.keep("reference")
        assert [key for key, _ in engine.whole(sets.state())] == [
            *(f"current/{key}" for key in sets.parameters()),
            "reference/adapter_off",
        ]
        for step in range(3):
            with engine.autocast():
                loss = module(ROWS.bfloat16()).float().square().sum()
            engine.backward(loss)
            engine.step(step)
        assert not is_untrained(module)
        ends.append({key: whole(value) for key, value in sets.parameters().items()})
    assert ends[0].keys() == ends[1].keys()
    for key, value in ends[0].items():
        torch.testing.assert_close(ends[1][key], value, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("zero", STAGES)
def test_the_loss_scale_of_float16_is_the_projects_own(zero: int) -> None:
    modules, engine = towers(), deepspeed(zero, precision="fp16")
    engine.attach(optimizers_of(modules))
    scales = []
    for factor in (1.0, torch.inf, 1.0):
        with engine.autocast():
            loss = modules["one"](ROWS).float().sum() / 8
        engine.backward(loss * factor)
        report = engine.step(0)
        scales.append((report.loss_scale, report.skipped))
    assert scales == [(65536.0, False), (65536.0, True), (32768.0, False)]
    plain, exact = towers(), TorchEngine("cpu")
    exact.attach(optimizers_of(plain))
    exact.backward(plain["one"](ROWS).sum() / 8)
    first = exact.step(0).gradient_norm["one"]
    fresh = towers()
    engine.attach(optimizers_of(fresh))
    with engine.autocast():
        loss = fresh["one"](ROWS).float().sum() / 8
    engine.backward(loss)
    assert engine.step(0).gradient_norm["one"] == pytest.approx(first, rel=0.02)


def test_a_run_of_two_stages_is_that_of_torch_and_continues(tmp_path: Path) -> None:
    first = stage(tmp_path, "first", ema={"decay": 0.5}, evaluation=held_out(tmp_path), until={"iterations": 3})
    second = stage(
        tmp_path,
        "second",
        rewards=COUNT_B,
        algorithm={"name": "ppo", "minibatches": 2, "kl": {"coefficient": 0.1}},
        critic={},
        until={"iterations": 2},
    )
    for name, engine in (("torch", {"type": "torch"}), ("zero", {"type": "deepspeed", "zero": 3})):
        path = write_run(tmp_path, first, second, engine=engine, checkpoint={"every": 1})
        train_from_yaml(path, [], tmp_path / name)
    torch.testing.assert_close(weights_of(tmp_path / "zero"), weights_of(tmp_path / "torch"), rtol=0, atol=1e-5)
    for ours, theirs in zip(rows_of(tmp_path / "zero"), rows_of(tmp_path / "torch"), strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-5)
    end, rows = weights_of(tmp_path / "zero"), rows_of(tmp_path / "zero")
    newest = CheckpointStore(tmp_path / "zero" / "checkpoints", 2).latest()
    assert newest is not None
    shutil.rmtree(newest)  # goes on within the second stage
    train_from_yaml(path, [], tmp_path / "zero")
    assert torch.equal(weights_of(tmp_path / "zero"), end) and rows_of(tmp_path / "zero") == rows


def test_offloaded_sgd_is_torchs() -> None:
    found = []
    for engine in (TorchEngine("cpu"), deepspeed(2, offload="optimizer")):
        modules = towers()
        engine.attach(optimizers_of(modules, type="sgd"))
        train(engine, modules, 2)
        found.append(weights(modules))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_the_plan_leaves_out_what_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngineConfig, "resolve_device", lambda self: "cuda")
    away = {way: DeepSpeedEngineConfig(zero=way[0], offload=way[1]).splits(2).on_cpu for way in OFFLOADED}
    assert away == {
        (1, "optimizer"): {"optimizer"},
        (2, "optimizer"): {"optimizer", "gradients"},
        (3, "optimizer"): {"optimizer", "gradients"},
        (3, "parameters"): {"optimizer", "gradients", "parameters"},
    }


# -- the end ---------------------------------------------------------------------------------------------------------


MORTAL = {"surprise": {"type": "rank_work:MortalConfig"}}


def test_a_run_that_fails_leaves_nothing_behind_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = stage(tmp_path, rewards=MORTAL, until={"iterations": 3})
    path = write_run(tmp_path, only, engine={"type": "deepspeed", "zero": 3}, checkpoint={"every": 1})
    train_from_yaml(path, [], tmp_path / "whole")
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("FAIL_AT", "0 2")
    with pytest.raises(UserError, match="this rank cannot go on"):
        train_from_yaml(path, [], tmp_path / "failed")
    assert not torch.distributed.is_initialized()
    monkeypatch.delenv("FAIL_AT")
    train_from_yaml(path, [], tmp_path / "failed")
    assert torch.equal(weights_of(tmp_path / "failed"), weights_of(tmp_path / "whole"))


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("in the middle")


@pytest.mark.parametrize("zero", STAGES)
def test_an_engine_closes_in_the_middle_of_a_pass(zero: int) -> None:
    found = []
    for fails in (False, True):
        engine, modules = deepspeed(zero), towers()
        if fails:
            engine.attach(optimizers_of(modules))
            hook = modules["one"].layers[1].register_forward_hook(lambda module, given, out: _FailsBackward.apply(out))
            with pytest.raises(ValueError, match="in the middle"):
                engine.backward(modules["one"](ROWS).sum())
            hook.remove()
            modules["one"].layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                modules["one"](ROWS)
            engine.close()
            engine, modules = deepspeed(zero), towers()
        engine.attach(optimizers_of(modules))
        train(engine, modules, 2)
        found.append(weights(modules))
        engine.close()
    assert torch.equal(*found)


def test_a_rank_that_is_killed_ends_the_other(tmp_path: Path) -> None:
    only = stage(tmp_path, rewards=MORTAL, prompts_per_iteration=2, until={"iterations": 3})
    path = write_run(tmp_path, only, engine={"type": "deepspeed", "device": "cpu", "zero": 3})
    processes = start_pair(["-m", "uniml_rl", "train", str(path), "--folder", str(tmp_path / "run")], DIE_AT="1 2")
    processes[1].wait(LIMIT)
    began = time.monotonic()
    (code, _, said), (other_code, _, _) = ends(processes)
    assert (code, other_code) == (1, -signal.SIGKILL)
    assert time.monotonic() - began < 60
    assert "rank 0 of 2 lost another one while" in said and "Traceback" not in said


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", STAGES)
def test_a_single_number_is_refused(zero: int) -> None:
    with pytest.raises(UserError, match="deepspeed cannot train Scaled, in which scale is a single number"):
        deepspeed(zero).attach(optimizers_of({"one": Scaled()}))


def test_keys_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="with zero: 2 weights are whole"):
        DeepSpeedEngineConfig(zero=2, rollout_weights="sharded")
    with pytest.raises(ValueError, match="offload: parameters: zero: 1 keeps weights"):
        DeepSpeedEngineConfig(zero=1, offload="parameters")


def check(folder: Path, engine: dict[str, Any] | None = None, **keys: Any) -> None:
    path = write_run(folder, stage(folder, rewards=COUNT_A, **keys), engine={"type": "deepspeed"} | (engine or {}))
    preflight(load_run(path), load_yaml(path))


def test_optimizers_that_read_whole_tensors_are_refused_at_their_line(tmp_path: Path) -> None:
    check(tmp_path)
    with pytest.raises(UserError, match=r"run\.yaml:\d+: .*adafactor reads each weight as a tensor of its own"):
        check(tmp_path, optimizer={"type": "adafactor", "learning_rate": 0.1})


def test_a_missing_package_and_an_unknown_version_are_named_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.20.1")
    with pytest.raises(UserError, match=r"from 0\.19\.8 and below 0\.20, and deepspeed 0\.20\.1 is installed"):
        check(tmp_path)

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UserError, match=r"run\.yaml:\d+: .*pip install 'uniml-rl\[deepspeed\]'"):
        check(tmp_path)
    with pytest.raises(UserError, match="which is not installed"):
        deepspeed(1)


def test_a_build_is_announced_and_the_lock_of_a_killed_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "FileBaton", object, raising=False)  # which torch before 2.14 has
    with caplog.at_level(logging.WARNING):
        announce_compiling(["cpu_adam"])
    assert "DeepSpeed compiles its operator cpu_adam once" in caplog.text and "takes minutes" in caplog.text
    folder = tmp_path / "cpu_adam"
    (folder / "cpu_adam.so").touch()
    caplog.clear()
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)  # as torch's builder has it
    announce_compiling(["cpu_adam"])
    os.close(descriptor)
    assert caplog.text == ""
    with pytest.raises(UserError, match="was left behind by a build") as refusal:
        announce_compiling(["cpu_adam"])
    assert str(refusal.value).endswith(f": rm {folder / 'lock'}")
    monkeypatch.delattr(cpp_extension, "FileBaton")
    announce_compiling(["cpu_adam"])  # a lock that ends with its process leaves its file
