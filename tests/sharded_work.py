"""What the processes of test_sharded.py do: `python sharded_work.py FOLDER [RUN ...]`, once per rank.

With runs they are only trained, or gone on with; without, all are, and what was measured is written to sharded.json.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from contracts.harness import make_critic
from peak_memory import Peak, moves_make_memory
from rank_work import RUN, Scores
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toy_runs import load_run, prompts, stage

from modalities.base import Cut, Request
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.summary import sizes_of
from modalities.text import TextPolicyConfig
from uniml_rl.build import StageConfig, build_objective
from uniml_rl.config import load_yaml
from uniml_rl.engines.base import Engine
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.ranks import ending_together, launched
from uniml_rl.engines.sharded import ShardedEngine
from uniml_rl.engines.torch_engine import TorchEngineConfig
from uniml_rl.run import train
from uniml_rl.trainer import Trainer

RESULTS, FROM_ONE = "sharded.json", "from-one"
RUNS = {"fsdp": "gathered", "fsdp-sharded": "sharded"}
TENSOR, FROM_TWO_TO_FOUR = "tensor-from-one", "from-two-to-four"


def held(tensors: list[Tensor]) -> int:
    """Bytes of memory behind tensors, whatever part of it they show."""
    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


class Gathers(TorchDispatchMode):
    """Elements of every all-gather within the context."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.name():
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def measure(folder: Path, engine: Engine) -> dict[str, Any]:
    """Bytes that this rank holds of a policy and its critic, and what an iteration gathers in its rollout."""
    block = TextPolicyConfig.model_validate({"model": str(folder.parent / "model"), "sampling": {"max_new_tokens": 6}})
    policy = block.build("policy", "cpu", 0)
    keys = {"algorithm": {"name": "ppo", "minibatches": 1}, "critic": {}, "prompts_per_iteration": 3, "micro_batch": 2}
    config = StageConfig.model_validate(
        stage(folder, **keys) | {"prompts": prompts(folder, "one two three") | {"shuffle": False}}
    )
    critic = make_critic(policy)
    modules: dict[str, dict[str, nn.Module]] = {
        "policy": policy.trainable_modules(),
        "critic": critic.trainable_modules(),
    }
    whole = sum(p.nbytes for parts in modules.values() for m in parts.values() for p in m.parameters())
    largest = sizes_of([m for parts in modules.values() for m in parts.values()], 4).largest_unit
    peak = Peak()
    with moves_make_memory(), peak if isinstance(engine, ShardedEngine) else nullcontext():
        engine.attach({name: (parts, config.optimizer) for name, parts in modules.items()})
    parameters = [p for parts in modules.values() for m in parts.values() for p in m.parameters()]
    found: dict[str, Any] = {"whole": whole, "parameters": held(parameters), "made": peak.bytes, "largest": largest}
    assert config.prompts is not None
    objective = build_objective(config.algorithm, critic, None)
    objective.start(policy)
    trainer = Trainer(policy, config.prompts.build(0), Scores(), objective, engine, config, 0, 0)

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients[id(optimizer)] = held(own)

    gradients = dict[int, int]()
    hook = register_optimizer_step_pre_hook(look)
    rollout = policy.rollout

    def counting(*args: Any, **kwargs: Any) -> Any:
        found["gathers inside"] = -len(gathers.elements)
        result = rollout(*args, **kwargs)
        found["gathers inside"] += len(gathers.elements)
        return result

    policy.rollout = counting  # type: ignore[method-assign]
    with Gathers() as gathers:
        trainer._rollout(trainer.source, 0, 0, 3, _unlogged())
    found["gathered in a rollout"] = sum(gathers.elements) * 4
    policy.rollout = rollout  # type: ignore[method-assign]
    trainer.iterate(0)
    hook.remove()
    found["gradients"] = sum(gradients.values())
    moments = [v for o in engine._optimizers.values() for s in o.state.values() for v in s.values() if v.numel() > 1]
    found["moments"] = held(moments)
    found["policy"] = sum(p.numel() * 4 for m in policy.trainable_modules().values() for p in m.parameters())
    return found


def kept_casts(folder: Path) -> dict[str, int]:
    """Most bytes of weights in half precision that a rollout on sharded weights and a forward pass hold at once."""
    engine = TorchEngineConfig(device="cpu", shard="fsdp", rollout_weights="sharded", precision="bf16").build()
    block = TextPolicyConfig.model_validate({"model": str(folder.parent / "model"), "sampling": {"max_new_tokens": 6}})
    policy = block.build("policy", "cpu", 0)
    modules = policy.trainable_modules()
    layers = [part for module in modules.values() for part in module.modules() if isinstance(part, nn.Linear)]
    shapes = [layer.weight.shape for layer in layers]
    engine.attach({"policy": (modules, OptimizerSettings())})
    requests = [Request(Prompt("a", 0), 0, SampleKey(0, 0, 0, 0, 0))]
    with engine.autocast(), engine.sampling(modules.values()), Casts(shapes) as rollout:
        trajectory = policy.rollout(requests)
    cut = Cut(0, torch.arange(1), slice(0, trajectory.segments[0].num_steps))
    with engine.autocast(), Casts(shapes) as forward:
        loss = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").sum()
    engine.backward(loss)
    return {"all": 2 * sum(shape.numel() for shape in shapes), "rollout": rollout.bytes, "forward": forward.bytes}


class Casts(Peak):
    """Counts tensors in bfloat16 that are shaped as weights."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes

    def made_by(self, result: Any) -> list[Tensor]:
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        return [each for each in tensors if each.dtype == torch.bfloat16 and each.shape in self.shapes]


def _unlogged() -> Any:
    from uniml_rl.monitor.metrics import Metrics

    return Metrics()


def main(folder: Path, *only: str) -> None:
    torch.set_num_threads(1)
    launch = launched()
    own = folder / f"models-{launch.rank}"
    own.mkdir(exist_ok=True)
    with ending_together(launch):
        engines = {
            name: TorchEngineConfig.model_validate({"device": "cpu", "shard": "fsdp", "rollout_weights": rollouts})
            for name, rollouts in RUNS.items()
        }
        engines[TENSOR] = TorchEngineConfig(device="cpu", shard="ddp", tensor_parallel=2)
        results = {} if only else {name: measure(own, engine.build()) for name, engine in engines.items()}
        results |= {} if only else {"casts": kept_casts(own)}
        loaded = load_yaml(folder / RUN)
        for name in only or (*RUNS, FROM_ONE, TENSOR):
            engine = engines.get(name, engines["fsdp"])
            train(load_run(folder / RUN).model_copy(update={"engine": engine}), loaded, folder / name)
        if results and launch.rank == 0:
            (folder / RESULTS).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
