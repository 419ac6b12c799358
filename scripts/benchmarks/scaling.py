"""One and two ranks on the same work: seconds per phase, bytes sent, and what all of it costs beside the bare model.

    python scripts/benchmarks/scaling.py --out docs/scaling_benchmark.md

A small Llama learns by GRPO from the same prompts in each mode. Every figure is a ratio within this one run: to the
same phase in one process, or of one process's update to the forward and backward passes of the bare model on the same
rows. On two cores, two ranks of one thread each can at best take half the time of one rank with one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
ONE_PROCESS = "one process"
PHASES = ("rollout", "replay", "update", "iteration")
PROMPTS, GROUP, TOKENS, MICRO_BATCH, WARM_UP = 8, 8, 32, 8, 1
SIZE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 6}


NO_EXCHANGES = ("::wait_tensor", "::_wrap_tensor_autograd")
"""What stands beside a functional collective and has its tensor, too."""


class Sent(TorchDispatchMode):
    """Bytes that this rank brings to collectives, each counted once however the backend routes it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not func.name().endswith(NO_EXCHANGES):
            takes_output = func.name().startswith(("c10d::_allgather_base", "c10d::_reduce_scatter"))
            brought = args[1] if takes_output else args[0] if args else None
            tensors = brought if isinstance(brought, list) else [brought]
            self.bytes += sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


def make_model(folder: Path) -> str:
    """A Llama of random weights with the tests' tokenizer."""
    from tiny_models_text import tiny_gpt2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_gpt2(folder / "tiny"))
    torch.manual_seed(0)
    _model().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = {"vocab_size": 512, "eos_token_id": 511, "pad_token_id": 511, "bos_token_id": 511}
    return LlamaForCausalLM(LlamaConfig(**tokens, **SIZE))


def make_trainer(mode: str, folder: Path) -> Any:
    """A trainer of the model in that mode, which is at its first iteration."""
    from rank_work import MODES, Scores
    from toy_runs import prompts, stage

    from modalities.text import TextPolicyConfig
    from uniml_rl.build import StageConfig, build_objective
    from uniml_rl.engines.torch_engine import TorchEngine
    from uniml_rl.trainer import Trainer

    engine = TorchEngine("cpu") if mode == ONE_PROCESS else MODES[mode].build()
    block = {"model": str(folder / "model"), "sampling": {"max_new_tokens": TOKENS, "eos_token_ids": [511]}}
    policy = TextPolicyConfig.model_validate(block).build("policy", "cpu", 0)
    keys = {"prompts_per_iteration": PROMPTS, "group_size": GROUP, "micro_batch": MICRO_BATCH}
    text = " ".join(["one", "two", "three", "four", "five", "six", "seven", "eight"])
    config = StageConfig.model_validate(
        stage(folder, optimizer={"learning_rate": 1e-4}, **keys)
        | {"prompts": prompts(folder, text) | {"shuffle": False}}
    )
    assert config.prompts is not None
    objective = build_objective(config.algorithm, None, None)
    engine.attach({"policy": (policy.trainable_modules(), config.optimizer)})
    objective.start(policy)
    return Trainer(policy, config.prompts.build(0), Scores(), objective, engine, config, 0, 0)


def run(mode: str, folder: Path, iterations: int) -> dict[str, float]:
    """Mean seconds of each phase, and bytes brought in one iteration."""
    trainer = make_trainer(mode, folder)
    timed = range(WARM_UP, WARM_UP + iterations)
    metrics = [trainer.iterate(iteration).metrics for iteration in range(timed.stop)]
    found = {phase: sum(metrics[each][f"time/{phase}"] for each in timed) / iterations for phase in PHASES}
    with Sent() as sent:  # by itself, since it slows every operation
        trainer.iterate(timed.stop)
    found["bytes"] = float(sent.bytes)
    if mode == ONE_PROCESS:
        found["bare"] = bare(folder)
    return found


def bare(folder: Path) -> float:
    """Seconds of the bare model's forward and backward passes on as many rows of as many tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    rows = torch.randint(0, 511, (PROMPTS * GROUP, TOKENS + 4), generator=torch.Generator().manual_seed(0))

    def once() -> float:
        started = time.perf_counter()
        for part in rows.split(MICRO_BATCH):
            model(part, labels=part).loss.backward()
        return time.perf_counter() - started

    once()
    return sum(once() for _ in range(3)) / 3


def work(folder: Path, modes: Sequence[str], look: Callable[[str], dict[str, float]]) -> None:
    """What each of the ranks does; rank 0 writes what it found in each mode."""
    from uniml_rl.engines.ranks import ending_together, launched

    torch.set_num_threads(1)
    launch = launched()
    with ending_together(launch):
        found = {mode: look(mode) for mode in modes}
    if launch.rank == 0:
        (folder / f"found-{launch.world_size}.json").write_text(json.dumps(found))


def measure(script: str, folder: Path, modes: Sequence[str], arguments: Sequence[str]) -> dict[str, dict[str, float]]:
    """What a script's workers find in one process, then on two ranks in every mode."""
    from pairs import ends, start_ranks

    found: dict[str, dict[str, float]] = {}
    for ranks, names in ((1, [ONE_PROCESS]), (2, modes)):
        ended = ends(start_ranks(ranks, [script, "--worker", str(folder), *arguments, "--modes", *names]))
        if any(code for code, _, _ in ended):
            sys.exit(ended[0][2][-3000:])
        found |= json.loads((folder / f"found-{ranks}.json").read_text())
    return found


def as_markdown(found: dict[str, dict[str, float]]) -> str:
    one = found[ONE_PROCESS]
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in _model().parameters())
    about = (
        f"Made by `python scripts/benchmarks/scaling.py`: Llama of {weights / 4e6:.1f} M parameters, {PROMPTS} "
        f"prompts x {GROUP} samples x {TOKENS} tokens per iteration, float32 on the CPU, one thread per rank, gloo. "
        "Seconds are ratios to the same phase of one process (0.5 would be perfect for two ranks); bytes are what a "
        "rank brings to collectives in an iteration, as a ratio to the bytes of the weights (of hsdp also to an "
        "all-reduce that is among one rank here)."
    )
    alone = (
        f"In one process, an iteration's update takes {one['update'] / one['bare']:.2f} times the bare model's forward "
        "and backward passes on the same rows, and the whole iteration, sampling included, "
        f"{one['iteration'] / one['bare']:.2f} times."
    )
    lines = [
        "# What ranks cost and save",
        "",
        *wrap(about, 120),
        "",
        *wrap(alone, 120),
        "",
        "| mode | rollout | replay | update | iteration | bytes / weights |",
        "|---|---|---|---|---|---|",
    ]
    for mode, each in found.items():
        ratios = " | ".join(f"{each[phase] / one[phase]:.2f}" if one[phase] else "-" for phase in PHASES)
        lines.append(f"| {mode} | {ratios} | {each['bytes'] / weights:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--modes", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.modes, lambda mode: run(mode, arguments.worker, arguments.iterations))
        return
    from rank_work import MODES

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        iterations = ["--iterations", str(arguments.iterations)]
        text = as_markdown(measure(__file__, Path(folder), arguments.modes or list(MODES), iterations))
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
