"""Tensor parallelism in one process: which models, heads and numbers of processes it takes. Ranks: test_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import LAUNCHER
from tiny_models_diffusion import tiny_stable_diffusion
from tiny_models_text import tiny_gpt2, tiny_llama, tiny_llama_of_heads, tiny_qwen3_of_heads
from toy_runs import TOY, held_out, load_run, stage, write_run
from transformers import MixtralConfig, MixtralForCausalLM

from modalities.errors import UserError
from modalities.tensor_parallel import require_plan
from uniml_rl.check import check_from_yaml, preflight
from uniml_rl.config import load_yaml
from uniml_rl.engines.base import Splits
from uniml_rl.engines.torch_engine import TorchEngine, TorchEngineConfig
from uniml_rl.memory import GIB, estimate

TEXT = {"type": "text", "sampling": {"max_new_tokens": 5}}
IMAGE = {"type": "image", "sampling": {"steps": 2}}
REFUSED: dict[str, tuple[Callable[[Path], Path] | None, dict[str, Any], str]] = {
    "GPT-2": (tiny_gpt2, TEXT, "no plan that divides the layers of GPT2LMHeadModel"),
    "an adapter": (tiny_llama_of_heads, TEXT | {"lora": {"rank": 2}}, "low-rank adapter cannot be divided"),
    "one head for both": (tiny_llama, TEXT, "2 processes cannot divide .* has num_key_value_heads = 1"),
    "a toy": (None, TOY, "only text policies have a plan"),
    "images": (tiny_stable_diffusion, IMAGE, "only text policies have a plan"),
}


def write(folder: Path, policy: dict[str, Any], model: Callable[[Path], Path] | None) -> Path:
    source = {"model": str(model(folder / "model"))} if model else {}
    only = stage(folder, evaluation=held_out(folder)) if policy["type"] == "text" else stage(folder)
    engine = {"type": "torch", "device": "cpu", "shard": "ddp", "tensor_parallel": 2}
    return write_run(folder, only, policies={"letters": policy | source}, engine=engine)


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_plan_is_refused_with_key_and_reason(case: str, tmp_path: Path) -> None:
    model, policy, reason = REFUSED[case]
    path = write(tmp_path, policy, model)
    with pytest.raises(UserError, match=rf"policies\.letters(?s:.*)engine\.tensor_parallel: 2: (?s:.*){reason}"):
        check_from_yaml(path, [], 2)


def test_experts_are_refused_by_the_name_of_their_style() -> None:
    config = MixtralConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    config.num_key_value_heads, config.num_local_experts = 2, 2
    with pytest.raises(UserError, match=r"plan of MixtralForCausalLM divides .*experts.* as 'packed_colwise'"):
        require_plan(MixtralForCausalLM(config), 2)


@pytest.mark.parametrize("model", [tiny_llama_of_heads, tiny_qwen3_of_heads])
def test_the_estimate_divides_what_the_plan_does(model: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path, TEXT, model)
    check_from_yaml(path, [], 2)
    config, alone = load_run(path), load_run(path).model_copy(update={"engine": TorchEngineConfig(device="cpu")})
    known = preflight(config, load_yaml(path))
    sizes = known.summaries["letters"].weights
    share = 1 - sizes.planned / sizes.trainable / 2
    assert 0.5 < share < 0.65
    together, whole = estimate(config, 0, known, 2), estimate(alone, 0, known)
    for item in ("weights", "gradients", "optimizer", "copies", "step"):
        assert together[item] == pytest.approx(share * whole[item])
    assert together["rollout"] == whole["rollout"] / 2
    assert together["opening"] == sizes.largest_unit / GIB
    fsdp = estimate(
        config.model_copy(update={"engine": TorchEngineConfig(shard="fsdp", tensor_parallel=2)}), 0, known, 8
    )
    assert fsdp["opening"] == pytest.approx(max(sizes.largest_unit / GIB, share * whole["weights"] * 3 / 4))


@pytest.mark.parametrize(
    "keys, processes, expected",
    [
        ({"shard": "ddp"}, 4, Splits(tensor=2)),
        ({"shard": "fsdp"}, 8, Splits(4, 4, 4, tensor=2)),
        ({"shard": "hsdp", "shard_ranks": 2}, 8, Splits(2, 2, 2, tensor=2)),
        ({"shard": "hsdp"}, 8, Splits(4, 4, 4, tensor=2)),
        ({"shard": "fsdp"}, 1, Splits()),
    ],
)
def test_processes_are_laid_out(keys: dict[str, Any], processes: int, expected: Splits) -> None:
    assert TorchEngineConfig(device="cpu", tensor_parallel=2, **keys).splits(processes) == expected


def test_numbers_of_processes_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TorchEngineConfig(device="cpu", shard="ddp", tensor_parallel=2)
    assert type(config.build()) is TorchEngine  # one process is the same as ever
    for name, value in zip(LAUNCHER, ("0", "0", "3", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"tensor_parallel: 3 processes cannot be divided into groups of 2"):
        config.build()
    with pytest.raises(ValueError, match="tensor_parallel: shard: none is one process"):
        TorchEngineConfig(tensor_parallel=2)
