"""The engine against plain torch: schedules, clipping, skipped steps, precision, state; and sums over ranks."""

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from toy_runs import on_ranks

from modalities.errors import UserError
from uniml_rl.engines.optimizers import OptimizerSettings, ScheduleSettings, learning_rate_at
from uniml_rl.engines.torch_engine import TorchEngine, TorchEngineConfig


def weights(*values: float) -> nn.Module:
    module = nn.Linear(len(values), 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([values]))
    return module


def sgd(**keys: object) -> OptimizerSettings:
    return OptimizerSettings.model_validate({"type": "sgd", "learning_rate": 1.0, "gradient_clip": None} | keys)


def torch_rates(scheduler_of: object, peak: float, count: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = scheduler_of(optimizer)  # type: ignore[operator]
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_schedules_are_torchs_own() -> None:
    warm_up, decay, peak, final = 3, 6, 0.5, 0.1
    schedulers = torch.optim.lr_scheduler

    def after_warm_up(then: object) -> object:
        return lambda optimizer: schedulers.SequentialLR(
            optimizer, [schedulers.LinearLR(optimizer, 1 / (warm_up + 1), 1.0, warm_up), then(optimizer)], [warm_up]
        )

    expected = {
        "linear": after_warm_up(lambda o: schedulers.LinearLR(o, 1.0, final, decay)),
        "cosine": after_warm_up(lambda o: schedulers.CosineAnnealingLR(o, decay, final * peak)),
    }
    for name, scheduler_of in expected.items():
        schedule = ScheduleSettings(type=name, warm_up_iterations=warm_up, decay_iterations=decay, final_share=final)
        found = [learning_rate_at(peak, schedule, iteration) for iteration in range(warm_up + decay + 1)]
        assert found == pytest.approx(torch_rates(scheduler_of, peak, len(found)))
        assert learning_rate_at(peak, schedule, 1000) == pytest.approx(final * peak)
    constant = ScheduleSettings(warm_up_iterations=warm_up)
    assert [learning_rate_at(peak, constant, i) for i in range(5)] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"type": "linear"}, "without decay_iterations"),
        ({"type": "cosine", "warm_up_iterations": 3}, "without decay_iterations"),
        ({"decay_iterations": 3}, "reads no decay_iterations"),
        ({"final_share": 0.5}, "reads no decay_iterations"),
    ],
)
def test_a_schedule_that_would_do_nothing_is_refused(schedule: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        OptimizerSettings.model_validate({"schedule": schedule})


@pytest.mark.parametrize("betas", [(0.9, 1.5), (1.0, 0.9), (-0.1, 0.9)])
def test_decay_rates_that_adamw_cannot_take_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(ValidationError, match="betas"):
        OptimizerSettings(betas=betas)


def test_a_device_that_is_not_there_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TorchEngineConfig().resolve_device() == "cpu"
    with pytest.raises(UserError, match=r"engine\.device: cuda: .* use auto or cpu"):
        TorchEngineConfig(device="cuda").resolve_device()


def test_sgd_refuses_the_keys_of_adamw_and_reads_its_own_dump() -> None:
    with pytest.raises(ValidationError, match="betas: sgd does not read it"):
        sgd(betas=(0.5, 0.9))
    with pytest.raises(ValidationError, match="epsilon: sgd does not read it"):
        sgd(epsilon=1e-3)
    assert OptimizerSettings.model_validate(sgd().model_dump()) == sgd()


def test_the_gradient_is_clipped_over_all_modules_of_an_optimizer() -> None:
    engine, modules = TorchEngine("cpu"), {"x": weights(1.0, 2.0), "y": weights(3.0)}
    engine.attach({"policy": (modules, sgd(gradient_clip=1.0))})
    start = torch.cat([m.weight.detach().flatten().clone() for m in modules.values()])
    gradient = torch.tensor([2.0, -3.0, 6.0])  # of norm 7
    for scale, moved in ((1.0, gradient / 7), (0.01, gradient * 0.01)):
        before = torch.cat([m.weight.detach().flatten().clone() for m in modules.values()])
        both = torch.cat([m.weight.flatten() for m in modules.values()])
        engine.backward((both * gradient).sum() * scale)
        report = engine.step(0)
        assert report.gradient_norm["policy"] == pytest.approx(7 * scale)
        after = torch.cat([m.weight.detach().flatten() for m in modules.values()])
        assert torch.allclose(before - after, moved, atol=1e-5)
        assert report.update_weight_ratio["policy"] == pytest.approx(float(moved.norm() / before.norm()), rel=1e-3)
    assert not torch.equal(start, after)


def test_gradients_of_micro_batches_add_up_and_are_cleared() -> None:
    engine, module = TorchEngine("cpu"), weights(0.0, 0.0)
    engine.attach({"policy": ({"x": module}, sgd())})
    for part in ([1.0, 0.0], [2.0, 3.0]):
        engine.backward((module.weight * torch.tensor([part])).sum())
    engine.step(0)
    assert torch.equal(module.weight.detach(), torch.tensor([[-3.0, -3.0]]))
    engine.step(0)
    assert torch.equal(module.weight.detach(), torch.tensor([[-3.0, -3.0]]))


def test_a_non_finite_gradient_anywhere_skips_every_optimizer_and_ends_the_run_after_n_in_a_row() -> None:
    engine = TorchEngine("cpu", max_skipped_steps=3)
    policy, critic = weights(1.0), weights(2.0)
    engine.attach({"policy": ({"x": policy}, OptimizerSettings()), "critic": ({"x": critic}, OptimizerSettings())})

    def step(factor: float) -> bool:
        engine.backward((policy.weight + critic.weight * factor).sum())
        return engine.step(0).skipped

    for good in (True, False):
        before = [policy.weight.detach().clone(), critic.weight.detach().clone()]
        assert step(math.nan) and step(math.inf)
        assert [policy.weight.detach(), critic.weight.detach()] == before
        if good:  # breaks the row
            assert not step(1.0)
            assert policy.weight.detach() != before[0] and critic.weight.detach() != before[1]
    with pytest.raises(FloatingPointError, match=r"3 optimizer steps in a row had a non-finite gradient"):
        step(math.nan)


def test_an_optimizer_without_parameters_is_an_error() -> None:
    module = weights(1.0).requires_grad_(False)
    with pytest.raises(ValueError, match=r"optimizer 'policy' has no trainable parameter in \['x'\]"):
        TorchEngine("cpu").attach({"policy": ({"x": module}, OptimizerSettings())})


def test_steps_are_those_of_torchs_adamw_at_the_scheduled_rate() -> None:
    settings = OptimizerSettings(
        learning_rate=0.1,
        weight_decay=0.2,
        betas=(0.7, 0.8),
        epsilon=1e-3,
        gradient_clip=None,
        schedule=ScheduleSettings(warm_up_iterations=2),
    )
    engine, module, plain = TorchEngine("cpu"), weights(1.0, -2.0), weights(1.0, -2.0)
    engine.attach({"policy": ({"x": module}, settings)})
    optimizer = torch.optim.AdamW(plain.parameters(), lr=9.0, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.2)
    for iteration in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 * min(1, (iteration + 1) / 3)
        for weight in (module.weight, plain.weight):
            weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.step(iteration)
        assert engine.learning_rates(iteration)["policy"] == pytest.approx(optimizer.param_groups[0]["lr"])
    assert torch.allclose(module.weight, plain.weight, atol=1e-7)


def test_a_restored_engine_steps_as_the_one_that_was_saved() -> None:
    def steps(engine: TorchEngine, module: nn.Module, count: int) -> None:
        for _ in range(count):
            engine.backward(module.weight.square().sum())
            engine.step(0)

    whole, again = (TorchEngine("cpu", max_skipped_steps=2) for _ in range(2))
    module, other = weights(1.0, 3.0), weights(0.0, 0.0)
    whole.attach({"policy": ({"x": module}, OptimizerSettings(learning_rate=0.1))})
    steps(whole, module, 3)
    whole.backward((module.weight * math.nan).sum())
    assert whole.step(0).skipped
    again.attach({"policy": ({"x": other}, OptimizerSettings(learning_rate=0.1))})
    again.load_state_dict(copy.deepcopy(whole.state_dict()))
    other.load_state_dict(module.state_dict())
    again.backward((other.weight * math.nan).sum())
    with pytest.raises(FloatingPointError, match="2 optimizer steps in a row"):
        again.step(0)
    for engine, each in ((whole, module), (again, other)):
        steps(engine, each, 2)
    assert torch.equal(module.weight, other.weight)
    with pytest.raises(ValueError, match=r"the checkpoint's optimizers are \['policy'\]"):
        fresh = TorchEngine("cpu")
        fresh.attach({"critic": ({"x": other}, OptimizerSettings())})
        fresh.load_state_dict(whole.state_dict())


def test_bf16_computes_in_bfloat16_over_float32_weights() -> None:
    engine, module = TorchEngine("cpu", "bf16"), weights(1.0, 3.0)
    engine.attach({"policy": ({"x": module}, sgd())})
    with engine.autocast():
        output = module(torch.ones(1, 2))
    engine.backward(output.float().sum())
    assert output.dtype == torch.bfloat16
    assert module.weight.dtype == module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("sizes", [(2, 3), (0, 4), (1, 0, 2)])
def test_a_gather_is_the_ranks_values_one_after_the_other(sizes: tuple[int, ...]) -> None:
    everything = {
        torch.float64: torch.arange(sum(sizes), dtype=torch.float64) / 3,
        torch.int64: torch.arange(sum(sizes)) * (1 << 40) + 1,
        torch.bool: torch.arange(sum(sizes)) % 2 == 0,
        torch.float32: torch.arange(sum(sizes) * 2).reshape(-1, 2) / 7,
    }
    for dtype, whole in everything.items():
        parts = whole.split(sizes)
        found = on_ranks(len(sizes), lambda engine, parts=parts: engine.gather_rows(parts[engine.rank]))
        assert all(torch.equal(values, whole) and values.dtype == dtype for values in found)
