"""float16: the loss scale against torch's own, steps that overflow, and training as in float32."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from contracts.catalog import POLICY, run_config
from contracts.harness import make_trainer
from tiny_models_text import tiny_llama
from torch import Tensor, nn
from toy_runs import interrupt, stage, write_run

from modalities.lora import LoraSettings
from modalities.text import TextPolicyConfig
from uniml_rl.build import build_policy
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.engines import loss_scale
from uniml_rl.engines.loss_scale import LossScale
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml

SGD = OptimizerSettings(type="sgd", learning_rate=1.0, gradient_clip=None)


def layer(size: int = 2) -> nn.Module:
    module = nn.Linear(size, 1, bias=False)
    nn.init.ones_(module.weight)
    return module


def attached(*modules: nn.Module, **options: int) -> TorchEngine:
    engine = TorchEngine("cpu", "fp16", **options)
    engine.attach({str(index): ({"x": module}, SGD) for index, module in enumerate(modules)})
    return engine


def output(engine: TorchEngine, module: nn.Module) -> Tensor:
    with engine.autocast():
        values: Tensor = module(torch.ones(1, 2))
    assert values.dtype == torch.float16
    return values.float().sum()


def test_the_scale_is_that_of_torchs_grad_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = torch.amp.GradScaler("cpu").state_dict()
    assert [fresh["scale"], fresh["growth_factor"], fresh["backoff_factor"], fresh["growth_interval"]] == [
        loss_scale._START, loss_scale._GROWTH, loss_scale._BACKOFF, loss_scale._GROWTH_INTERVAL
    ]  # fmt: skip
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 3)
    own, reference = LossScale(), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    chance = torch.Generator().manual_seed(0)
    for _ in range(200):
        overflow = bool(torch.rand((), generator=chance) < 0.2)
        reference.scale(weight.sum()).backward()
        weight.grad = weight.grad * (math.inf if overflow else 1.0)
        reference.step(optimizer)
        reference.update()
        optimizer.zero_grad()
        own.update(overflow)
        assert own.value == reference.get_scale()


def test_gradients_that_float16_would_lose_are_kept_and_norms_are_free_of_the_scale() -> None:
    module = layer()
    engine = attached(module)
    engine.backward(output(engine, module) * 1e-8)
    report = engine.step(0)
    assert report.gradient_norm["0"] == pytest.approx(1e-8 * math.sqrt(2), rel=1e-3)
    assert report.loss_scale == 2**16


def test_an_overflow_halves_the_scale_and_skips_every_optimizer_without_ending_the_run() -> None:
    large, other = layer(), layer()
    engine = attached(large, other, max_skipped_steps=1)
    scales, skipped = [], True
    while skipped:
        engine.backward(output(engine, large) * 1000 + output(engine, other))
        report = engine.step(0)
        skipped = report.skipped
        scales.append(report.loss_scale)
        assert torch.equal(other.weight, torch.ones(1, 2)) == skipped
        assert torch.equal(large.weight, torch.ones(1, 2)) == skipped
    assert scales == [2.0**power for power in range(16, 5, -1)], "2^5 x 1000 fits, 2^6 x 1000 x 2 does not"
    assert torch.equal(large.weight.detach(), torch.full((1, 2), -999.0))


def test_a_gradient_that_no_scale_makes_finite_ends_the_run() -> None:
    module = layer()
    engine = attached(module, max_skipped_steps=2)
    for _ in range(16 + 1):
        engine.backward(output(engine, module) * math.nan)
        assert engine.step(0).skipped
    with pytest.raises(FloatingPointError, match="2 optimizer steps in a row had a non-finite gradient"):
        engine.backward(output(engine, module) * math.nan)
        engine.step(0)


def test_a_base_in_float16_is_scaled_for_in_any_precision(tmp_path: Path) -> None:
    config = TextPolicyConfig(model=str(tiny_llama(tmp_path)), dtype="float16", lora=LoraSettings(rank=2))
    policy = config.build("writer", "cpu", 0)
    engine = TorchEngine("cpu", "fp32")
    engine.attach({"writer": (policy.trainable_modules(), SGD)})
    assert engine.step(0).loss_scale == 2**16


def test_training_in_float16_is_near_training_in_float32(tmp_path: Path) -> None:
    updates, norms = {}, {}
    plain = {"type": "sgd", "learning_rate": 1e-2}  # AdamW makes the sign of a rounding error a whole step
    for precision in ("fp32", "fp16"):
        (folder := tmp_path / precision).mkdir()
        policy = build_policy(run_config("gpt2", folder), POLICY, "cpu")
        trainer = make_trainer(policy, {"name": "grpo"}, TorchEngine("cpu", precision), folder, optimizer=plain)
        start = {key: value.detach().clone() for key, value in policy.weight_sets.parameters().items()}
        metrics = [trainer.iterate(iteration).metrics for iteration in range(3)]
        end = policy.weight_sets.parameters()
        updates[precision] = torch.cat([(end[key].detach() - value).flatten() for key, value in start.items()])
        norms[precision] = [row[f"gradient/norm/{POLICY}"] for row in metrics]
        assert [row.get("gradient/loss_scale") for row in metrics] == [2**16 if precision == "fp16" else None] * 3
    distance = (updates["fp16"] - updates["fp32"]).norm() / updates["fp32"].norm()
    assert 0 < distance < 0.02
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.005)


def test_a_resumed_run_has_the_scale_of_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_scale, "_GROWTH_INTERVAL", 2)
    stages = [stage(tmp_path, name, until={"iterations": 5}) for name in ("one", "two")]
    config = write_run(tmp_path, *stages, engine={"precision": "fp16"}, checkpoint={"every": 1})
    interrupt(config, tmp_path / "killed", (0, 3), (1, 1))
    scales, weights = [], []
    for folder in (tmp_path / "killed", tmp_path / "whole"):
        train_from_yaml(config, [], folder)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        scales.append([json.loads(line)["metrics"].get("gradient/loss_scale") for line in lines])
        newest = CheckpointStore(folder / "checkpoints", 1).latest()
        assert newest is not None
        weights.append(dict(load_checkpoint(newest).weights["letters"]))
    assert scales[0] == scales[1] == 2 * [2.0**power for power in (16, 16, 17, 17, 18)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
