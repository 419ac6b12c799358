"""Optimizers against other implementations, what each of them reads, and what their states survive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from toy_runs import stage, write_run
from transformers.optimization import Adafactor as TransformersAdafactor

from modalities.errors import UserError
from uniml_rl.check import check_from_yaml
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.torch_engine import TorchEngine


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))


def train(module: nn.Module, step: Callable[[], Any], count: int, scale: float = 1.0) -> None:
    for number in range(count):
        inputs = torch.randn(8, 5, generator=torch.Generator().manual_seed(number)).to(next(module.parameters()).dtype)
        (module(inputs).square().sum() * scale).backward()
        step()


def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


class EightBit(torch.optim.AdamW):
    """What the stand-in has for bitsandbytes' AdamW8bit; it remembers what it was given."""

    given: dict[str, Any]

    def __init__(self, params: Any, **options: Any) -> None:
        type(self).given = options
        super().__init__(params, **options)


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = ModuleType("bitsandbytes")
    stand_in.optim = SimpleNamespace(AdamW8bit=EightBit)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_adafactor_is_transformers_own_also_where_gradients_are_small(scale: float) -> None:
    """Up to step 1 / rate², from where on torch's rate falls. The LayerNorm's and the biases are not factored."""
    own, other = model().double(), model().double()
    settings = OptimizerSettings(
        type="adafactor", learning_rate=0.05, decay_exponent=-0.7, clip_threshold=1.5, minimum_rms=0.2
    )
    reference = TransformersAdafactor(
        other.parameters(), lr=0.05, decay_rate=-0.7, clip_threshold=1.5, eps=(1e-30, 0.2),
        scale_parameter=True, relative_step=False,
    )  # fmt: skip
    start = [p.detach().clone() for p in own.parameters()]
    train(own, stepping(settings.build(list(own.parameters()))), 10, scale)
    train(other, stepping(reference), 10, scale)
    for before, mine, theirs in zip(start, own.parameters(), other.parameters(), strict=True):
        assert (mine - theirs).norm() <= 1e-6 * (theirs - before).norm()


def test_adafactor_decays_weights_by_the_rate_and_slows_down() -> None:
    weight = nn.Parameter(torch.full((4, 4), 2.0))
    settings = OptimizerSettings(type="adafactor", learning_rate=0.5, weight_decay=0.1)
    optimizer = settings.build([weight])
    expected = weight.detach().clone()
    for step in range(1, 9):
        weight.grad = torch.full((4, 4), 3.0)  # its second moment is 9 from the first step on: every update is 1
        optimizer.step()
        expected = expected * (1 - 0.5 * 0.1) - min(0.5, step**-0.5) * expected.square().mean().sqrt()
        assert torch.allclose(weight.detach(), expected, rtol=1e-5)


def test_eight_bit_adamw_gets_every_key(bitsandbytes: None) -> None:
    settings = OptimizerSettings(type="adamw_8bit", learning_rate=0.2, betas=(0.7, 0.8), epsilon=1e-4, weight_decay=0.3)
    own, other = model(), model()
    optimizer = settings.build(list(own.parameters()))
    assert isinstance(optimizer, EightBit)
    assert EightBit.given == {"lr": 0.2, "betas": (0.7, 0.8), "eps": 1e-4, "weight_decay": 0.3}
    train(own, stepping(optimizer), 3)
    plain = settings.model_copy(update={"type": "adamw"})
    train(other, stepping(plain.build(list(other.parameters()))), 3)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("place", ["optimizer", "critic"])
def test_check_refuses_eight_bits_without_the_package_and_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    eight = {"type": "adamw_8bit"}
    keys = {"critic": {"optimizer": eight}} if place == "critic" else {"optimizer": eight}
    config = write_run(tmp_path, stage(tmp_path, algorithm={"name": "ppo"}, **({"critic": {}} | keys)))
    where = rf"run\.yaml:\d+: stages\.only\.{'critic.' if place == 'critic' else ''}optimizer"
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=where + r".*pip install 'uniml-rl\[bitsandbytes\]'"):
        check_from_yaml(config)
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    with pytest.raises(UserError, match=where + ".*GPUs only"):
        check_from_yaml(config)


@pytest.mark.parametrize(
    ("type", "keys"),
    [
        ("adamw", {"clip_threshold": 2.0}),
        ("adamw_8bit", {"minimum_rms": 1.0}),
        ("adafactor", {"betas": (0.5, 0.9)}),
        ("adafactor", {"epsilon": 1e-3}),
        ("sgd", {"betas": (0.5, 0.9)}),
        ("sgd", {"epsilon": 1e-3}),
        ("sgd", {"decay_exponent": -0.5}),
    ],
)
def test_a_key_that_the_optimizer_does_not_read_is_refused(type: str, keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=rf"{next(iter(keys))}: {type} does not read it; remove it, or take a"):
        OptimizerSettings.model_validate({"type": type, **keys})
    assert OptimizerSettings.model_validate(OptimizerSettings(type=type).model_dump()) == OptimizerSettings(type=type)


@pytest.mark.parametrize("type", ["adamw", "adamw_8bit", "adafactor", "sgd"])
def test_a_state_that_was_saved_safely_continues_bit_for_bit(type: str, tmp_path: Path, bitsandbytes: None) -> None:
    settings = OptimizerSettings(type=type, learning_rate=0.01)
    whole, again = TorchEngine("cpu"), TorchEngine("cpu")
    first, second = model(), model(seed=1)
    for engine, module in ((whole, first), (again, second)):
        engine.attach({"policy": ({"x": module}, settings)})
    train(first, lambda: whole.step(0), 4)
    torch.save({"engine": whole.state_dict(), "model": first.state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second.load_state_dict(saved["model"])
    again.load_state_dict(saved["engine"])
    for engine, module in ((whole, first), (again, second)):
        train(module, lambda engine=engine: engine.step(0), 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
