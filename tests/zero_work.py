"""What two ranks find out about ZeRO by itself; `rank_work.py` runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peak_memory import Peak, moves_make_memory, storages_of
from torch import Tensor, nn

from modalities.shards import local_part, whole
from modalities.weights import WeightSets
from uniml_rl.checkpoint import CheckpointStore, load_checkpoint
from uniml_rl.engines import zero_module
from uniml_rl.engines.deepspeed_engine import DeepSpeedEngine, DeepSpeedEngineConfig
from uniml_rl.engines.distributed import DistributedEngine
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.stored_tensors import shard_prefix
from uniml_rl.engines.torch_engine import TorchEngine, TorchEngineConfig


class Tower(nn.Module):
    """Blocks between two layers, and a layer that no pass runs; sizes that two ranks do not divide."""

    def __init__(self, seed: int, width: int = 5, blocks: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.last, self.unused = nn.Linear(4, width), nn.Linear(width, 3), nn.Linear(2, 1)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)])
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(rows))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(hidden)


def optimizers_of(
    modules: Mapping[str, nn.Module], **keys: Any
) -> dict[str, tuple[dict[str, nn.Module], OptimizerSettings]]:
    """One AdamW for each."""
    settings = OptimizerSettings.model_validate({"learning_rate": 0.01, "gradient_clip": None} | keys)
    return {name: ({name: module}, settings) for name, module in modules.items()}


MOST = 0.5 + 0.05
"""Share of what two ranks divide that one may hold."""


def check_zero(folder: Path) -> dict[str, bool]:
    """By what holds: shares of bytes, gathers of a rollout, and checkpoints that either engine goes on from."""
    found: dict[str, bool] = {}
    for stage in (1, 2, 3):
        engine = DeepSpeedEngineConfig(device="cpu", zero=stage).build()
        holds = _check_shares(engine) | _check_checkpoint(engine, folder / f"zero-{stage}")
        found |= {f"zero {stage}: {what}": each for what, each in holds.items()}
        found |= {f"zero {stage}: {what}": each for what, each in _check_offload(engine).items()}
    fsdp = TorchEngineConfig(device="cpu", shard="fsdp").build()
    assert isinstance(fsdp, DistributedEngine)
    found |= {f"fsdp: {what}": each for what, each in _check_checkpoint(fsdp, folder / "fsdp").items()}
    found |= _check_gathers()
    found |= _check_single_numbers(fsdp)
    return found | dict.fromkeys(engine.union_of_names([what for what, holds in found.items() if not holds]), False)


class Scaled(Tower):
    """A tower whose outputs a single number scales, as the logits of a CLIP are."""

    def __init__(self) -> None:
        super().__init__(0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, rows: Tensor) -> Tensor:
        return self.scale * super().forward(rows)


def _check_single_numbers(engine: DistributedEngine) -> dict[str, bool]:
    """Its gradient is summed and its share of the norm that clips counted once, beside one process with all rows."""
    rows, found = torch.linspace(-1, 1, 24).view(6, 4), []
    for each, own in ((TorchEngine("cpu"), rows), (engine, rows.chunk(2)[engine.rank])):
        module = Scaled()
        each.attach(optimizers_of({"one": module}, type="sgd", gradient_clip=0.5, learning_rate=0.1))
        norms = []
        for step in range(2):
            each.backward(module(own).square().sum())
            norms.append(each.step(step).gradient_norm["one"])
        found.append((torch.cat([whole(p).flatten() for p in module.parameters()]), torch.tensor(norms)))
    alike = [torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for theirs, ours in zip(*found, strict=True)]
    return {"fsdp: a single number learns": alike[0], "fsdp: a single number in the norm": alike[1]}


def _check_shares(engine: DeepSpeedEngine) -> dict[str, bool]:
    module = Tower(0, width=64, blocks=32)
    total = sum(parameter.numel() for parameter in module.parameters())
    largest = max(parameter.numel() for parameter in module.parameters())
    with _measured_division() as made:
        engine.attach(optimizers_of({"one": module}))
    engine.backward(module(torch.ones(2, 4)).sum())
    (part,) = engine._all_parts
    gradients = sum(gradient.numel() for flat in _gradients_between_passes(part) for gradient in flat)
    engine.step(0)
    moments = sum(t.numel() for s in part.optimizer.state.values() for t in s.values() if t.numel() > 1)
    held = sum(local_part(p).numel() for p in module.parameters()) + sum(
        p.numel() for p in module.parameters() if p.numel() and hasattr(p, "ds_tensor")
    )
    found = {"moments": 0 < moments <= MOST * 2 * total}
    if engine.zero > 1:
        found["gradients"] = 0 < gradients <= MOST * total
    if engine.zero > 2:
        found["weights"] = 0 < held <= MOST * total
        found["each parameter comes alone"] = 0 < made[0] <= 4 * (MOST * total + largest) < 4 * total
    return found


@contextmanager
def _measured_division() -> Iterator[list[int]]:
    """The most bytes that dividing a module takes at a time where every move to the device makes memory."""
    most, divide = list[int](), zero_module.divide

    def measured(*args: Any) -> None:
        with moves_make_memory(), Peak() as peak:
            divide(*args)
        most.append(peak.bytes)

    with mock.patch.object(zero_module, "divide", measured):
        yield most


def _gradients_between_passes(part: Any) -> list[list[Tensor]]:
    if part.stage == 3:
        return [[part.zero.grad_partitions_flat_buffer]]
    own = [p.grad for p in part.parameters if p.grad is not None]
    return [own, *(list(tensors) for tensors in part.zero.all_grad_tensors.values() if tensors)]


def _check_checkpoint(engine: DistributedEngine, folder: Path) -> dict[str, bool]:
    """Steps of both ranks, each of which keeps and writes its share of them, and both engines go on from them."""

    def step(engine: Any, module: nn.Module, number: int) -> None:
        rows = torch.arange(8.0).view(2, 4) / 8 + number
        engine.backward(module(rows[engine.rank :: engine.world_size]).square().sum())
        engine.step(number)

    module, alone = Tower(0, width=64, blocks=32), Tower(1, width=64, blocks=32)
    total = 4 * sum(parameter.numel() for parameter in alone.parameters())
    a_few = 4 * 4 * max(parameter.numel() for parameter in alone.parameters())
    engine.attach(optimizers_of({"one": module}, learning_rate=1e-4))
    for number in range(2):
        step(engine, module, number)
    with Peak() as saving:
        weights, state = engine.stored(WeightSets({"one": module}).state()), engine.state_dict()
    kept = sum(storage.nbytes() for storage in storages_of((dict(weights), state)))
    store = CheckpointStore(folder, 1)
    state = {"trainer": {"engine": state, "objective": {}}, "rewards": {}}
    path = store.save(0, {"one": weights}, state, {}, engine.process, engine.wait, engine.union_of_names)
    written = sum(file.stat().st_size for file in (path / "tensors").glob(f"{shard_prefix(engine.rank)}*"))
    loaded = load_checkpoint(path, engine.rank, engine.world_size)
    one = TorchEngine("cpu")
    WeightSets({"one": alone}).load_state(loaded.weights["one"])
    one.attach(optimizers_of({"one": alone}, learning_rate=1e-4))
    one.load_state_dict(loaded.state["trainer"]["engine"])
    loaded = load_checkpoint(path, engine.rank, engine.world_size)  # else both would count in one tensor
    with Peak() as loading:
        engine.load_state_dict(loaded.state["trainer"]["engine"])
    for number in range(2, 4):
        step(engine, module, number)
        step(one, alone, number)
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return {
        "kept for a checkpoint": kept <= MOST * 3 * total,
        "written": 0.4 * 3 * total <= written <= MOST * 3 * total,
        "held while saving": saving.bytes <= MOST * 3 * total + a_few,
        "held while loading": loading.bytes <= MOST * 2 * total + a_few,
        "saved on two ranks, continued on one": all(torch.allclose(whole(a), b, atol=1e-6) for a, b in pairs),
    }


def _check_offload(plain: DeepSpeedEngine) -> dict[str, bool]:
    """Steps in the CPU's memory, of two micro-batches each and one of them skipped, are those of the device."""

    def update(engine: DeepSpeedEngine) -> Tensor:
        module, before = Tower(0), Tower(0)
        engine.attach(optimizers_of({"one": module}, gradient_clip=0.3))
        for number in range(4):
            for rows in (torch.arange(16.0).view(4, 4) / 8 + number).split(2):
                loss = module(rows[engine.rank :: engine.world_size]).square().sum()
                engine.backward(loss * (torch.nan if number == 2 else 1.0))
            engine.step(number)
        pairs = zip(module.parameters(), before.parameters(), strict=True)
        return torch.cat([(whole(after) - first.detach()).flatten() for after, first in pairs])

    expected, found = update(plain), {}
    for offload in ("optimizer", "parameters")[: 2 if plain.zero == 3 else 1]:
        engine = DeepSpeedEngineConfig.model_validate({"device": "cpu", "zero": plain.zero, "offload": offload}).build()
        found[f"offload: {offload}"] = float((update(engine) - expected).norm()) <= 1e-6 * float(expected.norm()) > 0
    return found


def _check_gathers() -> dict[str, bool]:
    """A rollout of unequal numbers of passes gathers each parameter once, or in step with the other rank."""
    found = {}
    for way in ("gathered", "sharded"):
        engine = DeepSpeedEngineConfig(device="cpu", zero=3, rollout_weights=way).build()
        module = Tower(0)
        engine.attach(optimizers_of({"one": module}))
        rows = torch.ones(2, 4)
        with torch.no_grad(), _counted_gathers(module) as gathers:
            expected = Tower(0)(rows)
            with engine.sampling([module]):
                outputs = [module(rows) for _ in range(3 if engine.rank else 1)]
        found[f"{way} rollouts compute"] = all(torch.allclose(each, expected, atol=1e-6) for each in outputs)
        if way == "gathered":
            found["one gather of each parameter"] = gathers == dict.fromkeys(dict(module.named_parameters()), 1)
        else:
            found["as many gathers as the rank with most passes"] = set(gathers.values()) == {3}
        found[f"nothing whole after {way} rollouts"] = not any(p.numel() for p in module.parameters())
        engine.backward(module(rows).sum())
        found[f"training after {way} rollouts"] = not engine.step(0).skipped
    return found


@contextmanager
def _counted_gathers(module: nn.Module) -> Iterator[Counter[str]]:
    """How often each parameter is gathered."""
    gathers: Counter[str] = Counter()
    names = {id(parameter): name for name, parameter in module.named_parameters()}

    def counted(gather: Any) -> Any:
        def count(param_list: Any = None, **keys: Any) -> Any:
            gathers.update(names[id(p)] for p in param_list if p.ds_status.name == "NOT_AVAILABLE")
            return gather(param_list=param_list, **keys)

        return count

    parameters: list[Any] = list(module.parameters())
    kept = [parameter.all_gather for parameter in parameters]
    for parameter in parameters:
        parameter.all_gather = counted(parameter.all_gather)
    try:
        yield gathers
    finally:
        for parameter, gather in zip(parameters, kept, strict=True):
            parameter.all_gather = gather
