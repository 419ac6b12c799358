"""What the processes of test_ranks.py do: `python rank_work.py FOLDER`, once per rank, writes results.json.

The reward `Mortal` remembers its rank's samples, and kills or fails its process where the environment says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from contracts.catalog import POLICY, run_config
from contracts.harness import make_critic
from gguf import GGMLQuantizationType
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from toy_runs import Surprise, load_run, prompts, stage
from zero_work import check_zero

from modalities.errors import UserError
from modalities.randomness import seeded_generator
from modalities.samples import Image, Prompt, Sample, Text, Video
from modalities.shards import whole
from modalities.sources import convert_gguf
from rewards.base import Reward, RewardConfig
from rewards.combine import RewardResult
from uniml_rl.build import RunConfig, StageConfig, build_objective, build_policy
from uniml_rl.config import load_yaml
from uniml_rl.engines import buckets
from uniml_rl.engines.base import Engine
from uniml_rl.engines.deepspeed_engine import DeepSpeedEngine, DeepSpeedEngineConfig
from uniml_rl.engines.distributed import DistributedEngine
from uniml_rl.engines.groups import writing_group
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.ranks import ending_together, launched
from uniml_rl.engines.replicated import ReplicatedEngine
from uniml_rl.engines.settings import EngineSettings
from uniml_rl.engines.torch_engine import TorchEngine, TorchEngineConfig
from uniml_rl.engines.zero_state import whole_of
from uniml_rl.run import train
from uniml_rl.trainer import Trainer

RUN, WHOLE, RESULTS = "run.yaml", "whole", "results.json"
STEPS, TEXTS = 5, "one two three"


class MortalConfig(RewardConfig):
    """A reward with a memory, and a process that may end in it."""

    type: Literal["rank_work:MortalConfig"] = "rank_work:MortalConfig"
    """Import path of this class."""
    timeout_seconds: float | None = None
    """No thread is needed."""

    def build(self, device: str) -> Reward:
        return Mortal()


class Mortal(Surprise):
    """DIE_AT, DIE_SAVING_AT, FAIL_AT, FULL_AT, HANG_AT, STOP_AT and STOP_LAUNCHER_AT are `<rank> <call>`."""

    calls = 0

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        self.calls += 1
        here = f"{os.environ.get('RANK', 0)} {self.calls}"
        if os.environ.get("DIE_AT") == here:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("STOP_AT") == here:
            os.kill(os.getpid(), signal.SIGUSR1)
        if os.environ.get("STOP_LAUNCHER_AT") == here:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(2)  # the launcher passes it on
        if os.environ.get("FULL_AT") == here:
            torch.save = _save_to_full_disk
        if os.environ.get("DIE_SAVING_AT") == here:
            torch.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("HANG_AT") == here:
            time.sleep(600)
        if os.environ.get("FAIL_AT") == here:
            raise UserError("this rank cannot go on.")
        return super().score(samples, prompts)


def _save_to_full_disk(state: object, handle: object) -> None:
    with open("/dev/full", "wb") as full:
        full.write(b"state")


# -- one process and two ranks ---------------------------------------------------------------------------------------


class Scores:
    """Random scores by prompt, and NaN for those of `failing` prompts; `seen` are the samples."""

    def __init__(self, failing: Callable[[int], bool] = lambda prompt: False, useless: bool = False) -> None:
        self.failing, self.useless, self.seen = failing, useless, list[Tensor]()

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        self.seen += [_content(sample) for sample in samples]
        drawn: dict[int, int] = {}
        totals = []
        for prompt in prompts:
            place = drawn[prompt.index] = drawn.get(prompt.index, -1) + 1
            value = torch.rand(64, generator=seeded_generator(iteration, prompt.index))[place]
            if self.failing(prompt.index):
                value = torch.tensor(0.5 if self.useless else torch.nan)
            totals.append(value)
        total = torch.stack(totals)
        return RewardResult(total, total.isfinite(), {"r": total}, {"r": total}, {"r": 1.0}, {"r": Counter()})


def _content(sample: Sample) -> Tensor:
    if isinstance(sample, Text):
        return torch.tensor([ord(letter) for letter in sample.text], dtype=torch.float32)
    assert isinstance(sample, Image | Video)
    return (sample.pixels if isinstance(sample, Image) else sample.frames).flatten() / 255


DAPO = {"name": "dapo", "overlong": {"maximum": 4, "buffer": 2}, "dynamic_sampling": {"rounds": 1}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "toy grpo": ("toy", {"algorithm": {"name": "grpo"}}),
    "toy ppo": ("toy", {"algorithm": {"name": "ppo", "minibatches": 1}, "critic": {}}),
    "toy nothing valid on rank 1": ("toy", {"algorithm": {"name": "grpo"}}),
    "toy nothing useful on rank 1": ("toy", {"algorithm": DAPO}),
    "toy dpo, no pair on rank 1": ("toy", {"algorithm": {"name": "dpo"}}),
    "gpt2 grpo": ("gpt2", {"algorithm": {"name": "grpo"}}),
    "gpt2 ppo": ("gpt2", {"algorithm": {"name": "ppo", "minibatches": 1}, "critic": {}}),
    "llama-heads grpo": ("llama-heads", {"algorithm": {"name": "grpo"}}),
    "qwen3-heads ppo": ("qwen3-heads", {"algorithm": {"name": "ppo", "minibatches": 1}, "critic": {}}),
    "experts ppo": ("qwen3-experts", {"algorithm": {"name": "ppo", "minibatches": 1}, "critic": {}}),
    "gpt2-lora grpo": ("gpt2-lora", {"algorithm": {"name": "grpo"}}),
    "chain grpo": ("chain", {"algorithm": {"name": "grpo"}}),
    "sd3-guided-lora flow_grpo": ("sd3-guided-lora", {"algorithm": {"name": "flow_grpo", "minibatches": 1}}),
    "sd-epsilon ddpo": ("sd-epsilon", {"algorithm": {"name": "ddpo", "minibatches": 1}}),
}
"""An entry of the contracts' catalogue, and the keys of a stage."""
WAIT = 290.0
MODES: dict[str, EngineSettings] = {
    "ddp": TorchEngineConfig(device="cpu", shard="ddp"),
    "fsdp": TorchEngineConfig(device="cpu", shard="fsdp"),
    "fsdp sharded": TorchEngineConfig(device="cpu", shard="fsdp", rollout_weights="sharded"),
    "hsdp": TorchEngineConfig(device="cpu", shard="hsdp", shard_ranks=2),
    "zero 1": DeepSpeedEngineConfig(device="cpu", zero=1),
    "zero 2": DeepSpeedEngineConfig(device="cpu", zero=2),
    "zero 3": DeepSpeedEngineConfig(device="cpu", zero=3),
    "zero 3 sharded": DeepSpeedEngineConfig(device="cpu", zero=3, rollout_weights="sharded"),
    "tensor": TorchEngineConfig(device="cpu", shard="ddp", tensor_parallel=2),
    "fsdp tensor": TorchEngineConfig(device="cpu", shard="fsdp", tensor_parallel=2),
}
TABLE = [
    *(("ddp", case) for case in CASES),
    *(("fsdp", case) for case in ("toy nothing useful on rank 1", "toy dpo, no pair on rank 1")),
    *(("fsdp", case) for case in ("gpt2 ppo", "chain grpo", "sd-epsilon ddpo")),
    *(("fsdp sharded", case) for case in ("gpt2 ppo", "chain grpo")),
    ("zero 1", "toy nothing useful on rank 1"),
    ("zero 2", "toy ppo"),
    ("zero 3", "chain grpo"),
    *((mode, "experts ppo") for mode in ("fsdp", "zero 2", "zero 3")),
    ("zero 3 sharded", "gpt2-lora grpo"),
    *(("tensor", case) for case in ("llama-heads grpo", "qwen3-heads ppo")),
]
"""What the test suite compares with one process; `scripts/proofs/parity.py` compares all of it."""


class Run:
    """A case on one engine: the samples, the gradient of the first optimizer step, the path of the weights."""

    def __init__(
        self, name: str, engine: Engine, run: RunConfig, folder: Path, texts: str = TEXTS, micro_batch: int = 2
    ) -> None:
        keys = CASES[name][1]
        optimizer = {"learning_rate": 1e-3, "gradient_clip": None, "epsilon": 1e-6}
        count = len(texts.split())
        config = StageConfig.model_validate(
            stage(folder, prompts_per_iteration=count, micro_batch=micro_batch, optimizer=optimizer, **keys)
            | {"prompts": prompts(folder, texts) | {"shuffle": False}}
        )
        policy = build_policy(run, POLICY, "cpu")
        critic = make_critic(policy) if config.critic is not None else None
        objective = build_objective(config.algorithm, critic, None)
        modules = {"policy": (policy.trainable_modules(), config.optimizer)}
        if critic is not None:
            modules["critic"] = (critic.trainable_modules(), config.optimizer)
        engine.attach(modules)
        objective.start(policy)
        # Of the three prompts of a rollout rank 0 has the first, rank 1 the others.
        failing = "rank 1" in name
        scores = Scores(lambda prompt: failing and prompt != 0, useless="useful" in name)
        assert config.prompts is not None
        trainer = Trainer(policy, config.prompts.build(0), scores, objective, engine, config, 0, 0)
        self.parameters = [p for part, _ in modules.values() for m in part.values() for p in m.parameters()]
        self.parameters = [p for p in self.parameters if p.requires_grad]
        start, self.gradient = self._weights(), torch.zeros(0)
        with self._watching(engine):
            self.metrics = [trainer.iterate(0).metrics]
            first = len(scores.seen)
            self.metrics += [trainer.iterate(iteration).metrics for iteration in range(1, STEPS)]
        self.update, self.samples, self.steps = self._weights() - start, scores.seen, trainer.optimizer_steps
        self.first_samples = scores.seen[:first]

    def _weights(self) -> Tensor:
        return torch.cat([whole(p).flatten() for p in self.parameters])

    @contextmanager
    def _watching(self, engine: Engine) -> Iterator[None]:
        """Keeps the gradient of the first step."""
        if isinstance(engine, DeepSpeedEngine):
            step, engine._step_reduced = engine._step_reduced, lambda iteration: step(self._keep_of(engine, iteration))
        hook = register_optimizer_step_pre_hook(lambda *_: self._keep_gradient())
        try:
            yield
        finally:
            hook.remove()
            vars(engine).pop("_step_reduced", None)

    def _keep_gradient(self) -> None:
        if not len(self.gradient):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
            self.gradient = torch.cat([whole(part).flatten().clone() for part in parts])

    def _keep_of(self, engine: DeepSpeedEngine, iteration: int) -> int:
        """DeepSpeed's mean over the ranks as the sum that it stands for."""
        if not len(self.gradient):
            parts = [part for part in engine._all_parts if part.parameters]
            flats = [
                [torch.cat([g.flatten() for g in part.gradients(i)]) for i in range(len(part.flats))] for part in parts
            ]
            pieces = [
                list(whole_of(part, flat, engine.sum_over_ranks)) for part, flat in zip(parts, flats, strict=True)
            ]
            self.gradient = engine.world_size * torch.cat([piece.flatten() for each in pieces for piece in each])
        return iteration


def compare(
    name: str, alone: Run | None, engine: DistributedEngine, run: RunConfig, folder: Path, texts: str = TEXTS
) -> dict[str, Any]:
    """One process beside several ranks, on rank 0; the others bring their samples."""
    engine.wait()
    together = Run(name, engine, run, folder, texts)
    engine.check_equal_start()  # and end
    samples, first = _of_all_ranks(together.samples), _of_all_ranks(together.first_samples)
    weights = _of_all_ranks([together.update])
    if alone is None:
        return {}
    alike = all(torch.equal(weights[0], other) for other in weights)
    return apart(together, samples, first, alone) | {"alike": alike}


def apart(run: Run, samples: list[Tensor], first: list[Tensor], alone: Run) -> dict[str, Any]:
    """What differs between a run, with all its samples and those of the first rollout, and one of one process."""
    return {
        "samples": _largest_distance(_sorted(samples), _sorted(alone.samples)),
        "different samples": len({tuple(sample.tolist()) for sample in samples}),
        "made": [len(first), len(samples)],
        "parted": [_parted(first, alone.first_samples), _parted(samples, alone.samples)],
        "gradient": float((run.gradient - alone.gradient).norm() / alone.gradient.norm()),
        "update": float((run.update - alone.update).norm() / alone.update.norm()),
        "steps": run.steps,
        "metrics": _unequal_metrics(run.metrics, alone.metrics),
    }


def _of_all_ranks(samples: list[Tensor]) -> list[Tensor]:
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, samples)
    return [sample for each in everyone for sample in each]


def _sorted(samples: list[Tensor]) -> list[Tensor]:
    """By what they are, because one process makes them in another order."""
    return sorted(samples, key=Tensor.tolist)


def _parted(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """How many samples of one have no equal in the other."""
    ours, theirs = (Counter(tuple(sample.tolist()) for sample in each) for each in (found, expected))
    return (ours - theirs).total()


def _largest_distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    if [len(sample) for sample in found] != [len(sample) for sample in expected]:
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if len(a))


def _unequal_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> list[str]:
    unequal = []
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in ours.keys() | theirs.keys():
            if not name.startswith(("time/", "throughput/", "memory/")):
                a, b = ours.get(name), theirs.get(name)
                if a is None or b is None or abs(a - b) > 1e-5 + 1e-3 * abs(b):
                    unequal.append(f"{name} of iteration {step}: {a} for {b}")
    return unequal


# -- the engine by itself --------------------------------------------------------------------------------------------


def check_engine(engine: ReplicatedEngine) -> dict[str, bool]:
    rank, found = engine.rank, {}
    rows = {0: torch.tensor([[1.5, 2.5]], dtype=torch.float64), 1: torch.zeros(0, 2, dtype=torch.float64)}[rank]
    gathered = engine.gather_rows(rows)
    found["rows of a rank without any"] = gathered.tolist() == [[1.5, 2.5]] and gathered.dtype == torch.float64
    found["flags"] = engine.gather_rows(torch.tensor([rank == 0, True])).tolist() == [True, True, False, True]
    big = torch.tensor((1 << 60) + rank)
    found["whole numbers"] = int(engine.sum_over_ranks(big)) == (1 << 61) + 1 and int(big) == (1 << 60) + rank
    found["names"] = engine.union_of_names([["b", "a"], []][rank]) == ["a", "b"]
    found |= _check_steps(engine)
    first = nn.Linear(2, 1, bias=False)
    nn.init.constant_(first.weight, 1.0)
    engine.attach({"p": ({"m": first}, OptimizerSettings())})
    engine.check_equal_start()
    with torch.no_grad():
        first.weight[0, 1] += rank * 1e-7
    found["unequal weights"] = "rank 1 would start with other weights of p.m" in _refusal(engine.check_equal_start)
    return found


def _refusal(work: Callable[[], None]) -> str:
    try:
        work()
    except (UserError, RuntimeError, FloatingPointError) as error:
        return str(error)
    return ""


def _check_steps(engine: ReplicatedEngine) -> dict[str, bool]:
    """Sums in several buckets, parameters that one rank or none has used, gradients that are not finite on one rank."""
    found = {}
    rank, module = engine.rank, nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(4)])
    settings = OptimizerSettings(type="sgd", learning_rate=1.0, weight_decay=0.5, gradient_clip=None)
    engine.attach({"p": ({"m": module}, settings)})
    elements, buckets._BUCKET_ELEMENTS = buckets._BUCKET_ELEMENTS, 5
    factors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]
    for _ in range(2):  # micro-batches
        engine.backward((module[0] * factors[rank]).sum() + (module[3] * factors[rank]).sum())
    if rank == 1:
        engine.backward(module[1].sum())
    report = engine.step(0)
    summed = 1 - (2 * (factors[0] + factors[1]) + 0.5)
    found["sums"] = all(torch.equal(module[i].detach(), summed) for i in (0, 3))
    found["used on one rank"] = module[1].detach().tolist() == [-0.5] * 3
    found["used on none"] = module[2].detach().tolist() == [1.0] * 3
    norm = (2 * (factors[0] + factors[1]).square().sum() * 4 + 3).sqrt()
    found["norm"] = abs(report.gradient_norm["p"] - float(norm)) < 1e-4
    buckets._BUCKET_ELEMENTS = elements
    before = module[0].detach().clone()
    engine.backward((module[0] * (torch.nan if rank == 1 else 1.0)).sum())
    found["not finite on one rank"] = engine.step(0).skipped and torch.equal(module[0].detach(), before)
    engine.max_skipped_steps = 2
    engine.backward((module[0] * (torch.inf if rank == 0 else 1.0)).sum())
    found["again and again"] = "2 optimizer steps in a row" in _refusal(lambda: engine.step(0) and None)
    clipped = OptimizerSettings(type="sgd", learning_rate=1.0, gradient_clip=1.0)
    whole = nn.ParameterList([nn.Parameter(torch.zeros(2))])
    engine.attach({"p": ({"m": whole}, clipped)})
    engine.backward((whole[0] * torch.tensor([3.0, 0.0] if rank == 0 else [0.0, 4.0])).sum())
    engine.step(0)
    found["clipping by the norm of the sum"] = torch.allclose(whole[0].detach(), torch.tensor([-0.6, -0.8]))
    return found


def waits() -> list[float]:
    """Seconds after which an exchange of each process group that this one is in would end."""
    MODES["hsdp"].build()
    writing_group()
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends: list[Any] = [group._get_backend(torch.device("cpu")) for group in groups]
    return sorted(backend.options._timeout.total_seconds() for backend in backends)


def main(folder: Path, table: Sequence[tuple[str, str]]) -> None:
    sys.path.append(str(Path(__file__).parent / "modalities"))
    from test_sources import gguf_llama

    torch.set_num_threads(1)
    # In a process group of torch's, transformers saves models on rank 0 alone.
    own = folder / f"models-{os.environ['RANK']}"
    own.mkdir()
    gguf_llama(own / "tiny.gguf", GGMLQuantizationType.Q4_1)
    configs = {entry: run_config(entry, own / entry) for entry, _ in CASES.values()}
    with ending_together(launched()):
        engine = TorchEngineConfig(device="cpu", shard="ddp", timeout_seconds=WAIT).build()
        assert isinstance(engine, ReplicatedEngine)
        results: dict[str, Any] = {"engine": check_engine(engine), "zero": check_zero(folder)}
        convert_gguf(own / "tiny.gguf", own / "converted")
        assert (own / "converted" / "model.safetensors").is_file()
        engines = {mode: MODES[mode].build() for mode in dict.fromkeys(mode for mode, _ in table)}
        for name in dict.fromkeys(name for _, name in table):
            config = configs[CASES[name][0]]
            alone = Run(name, TorchEngine("cpu"), config, own) if engine.rank == 0 else None
            for mode in (mode for mode, each in table if each == name):
                results[f"{mode}: {name}"] = compare(name, alone, engines[mode], config, own)
        results["waits"] = waits()
        loaded = load_yaml(folder / RUN)
        train(load_run(folder / RUN), loaded, folder / WHOLE)
        if engine.rank == 0:
            (folder / RESULTS).write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), TABLE)
