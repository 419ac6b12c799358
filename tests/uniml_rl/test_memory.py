"""The estimate of memory against tensors that are counted one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.harness import kept_for_backward
from denoising_helpers import requests as image_requests
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import word_tokenizer
from toy_runs import TOY, held_out, load_run, stage, write_run
from transformers import LlamaConfig, LlamaForCausalLM

from modalities.base import Cut, Request
from modalities.image import ImagePolicyConfig
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.summary import PolicySummary, RowMemory, layer_activations
from modalities.text import TextPolicyConfig
from modalities.video import VideoPolicyConfig
from uniml_rl.memory import GIB, describe, estimate

PROMPT = 7


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def summary(trained: torch.nn.Module, frozen: torch.nn.Module, *rows: RowMemory) -> PolicySummary:
    counts = [sum(p.numel() for p in module.parameters()) for module in (trained, frozen)]
    return PolicySummary("m", "text", [("tokens", "token")], frozenset(), sum(counts), counts[0], 2, rows=list(rows))


def test_weights_gradients_moments_and_copies_are_the_bytes_of_real_ones(tmp_path: Path) -> None:
    trained = torch.nn.Linear(100, 70)
    frozen = torch.nn.Linear(50, 30).bfloat16().requires_grad_(False)
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    config = load_run(write_run(tmp_path, stage(tmp_path, evaluation=held_out(tmp_path), ema={"decay": 0.9})))
    sizes = {
        name: size * GIB for name, size in estimate(config, 0, {"letters": summary(trained, frozen)}, PROMPT).items()
    }
    own = bytes_of(trained.parameters())
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    assert sizes["weights"] == own + bytes_of(frozen.parameters())
    assert sizes["gradients"] == bytes_of(p.grad for p in trained.parameters())
    assert sizes["optimizer"] == bytes_of(moments)
    assert sizes["copies"] == 2 * own, "reference and moving average"
    assert sizes["critic"] == sizes["cache"] == sizes["activations"] == 0
    assert sizes["peak"] == sizes["weights"] + 5 * own + 2 * own


def test_what_a_stage_adds_and_what_earlier_stages_leave(tmp_path: Path) -> None:
    one, two = (
        summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5)),
        summary(torch.nn.Linear(30, 1), torch.nn.Linear(1, 1)),
    )
    critic = {"source": "model", "optimizer": {"type": "sgd", "learning_rate": 0.1}}
    sgd = {"type": "sgd", "learning_rate": 0.1}
    stages = [
        stage(tmp_path, "first", policy="a"),
        stage(tmp_path, "second", policy="b", algorithm={"name": "ppo"}, critic=critic, optimizer=sgd),
    ]
    config = load_run(write_run(tmp_path, *stages))
    first, second = (estimate(config, index, {"a": one, "b": two}, PROMPT) for index in range(2))
    no_kl = load_run(write_run(tmp_path, stages[0] | {"algorithm": {"name": "grpo", "kl": None}}))
    assert estimate(no_kl, 0, {"a": one}, PROMPT)["copies"] == 0 < first["copies"]
    assert second["optimizer"] == 0 < first["optimizer"]
    alone = {name: (item.trainable_parameters * 4 + (item.parameters - item.trainable_parameters) * 2) / GIB
             for name, item in (("a", one), ("b", two))}  # fmt: skip
    assert first["weights"] == alone["a"] and second["weights"] == pytest.approx(alone["a"] + alone["b"])
    assert second["critic"] == pytest.approx(alone["b"] + two.trainable_parameters * 4 / GIB), (
        "its weights and gradients"
    )


def test_an_adapters_reference_is_free_until_it_has_been_trained(tmp_path: Path) -> None:
    block = {"type": "text", "model": "nowhere", "lora": {"rank": 2}}
    stages = [stage(tmp_path, name, policy="writer") for name in ("one", "two")]
    config = load_run(write_run(tmp_path, *stages, policies={"writer": block}))
    known = {"writer": summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5))}
    first, second = (estimate(config, index, known, PROMPT)["copies"] for index in range(2))
    assert (first, second * GIB) == (0, 90 * 4)
    moving = {"name": "grpo", "kl": {"reference": {"type": "refreshed", "every": 2}}}
    config = load_run(write_run(tmp_path, stages[0] | {"algorithm": moving}, policies={"writer": block}))
    assert estimate(config, 0, known, PROMPT)["copies"] * GIB == 90 * 4


def test_the_cache_is_that_of_the_rows_at_once_and_bf16_halves_it(tmp_path: Path) -> None:
    row = RowMemory(tokens=13, cache=10, rows_at_once=5, activations=3, logits=11)
    known = {"letters": summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5).float(), row)}
    for rows, many in ((2, {"prompts_per_iteration": 1, "group_size": 2}), (5, {"prompts_per_iteration": 9})):
        for precision, size in (("fp32", 2), ("bf16", 2)):
            block = stage(tmp_path, micro_batch=4, **many)
            config = load_run(write_run(tmp_path, block, engine={"precision": precision}, policies={"letters": TOY}))
            sizes = estimate(config, 0, known, PROMPT)
            assert sizes["cache"] * GIB == pytest.approx(rows * (13 + 7) * 10 * size)
            assert sizes["activations"] * GIB == pytest.approx(4 * (13 + 7) * 3 * size + 3 * 4 * 11)
    assert describe({"weights": 2.0, "cache": 0, "step": 0.001}, ("weights", "cache", "step")) == (
        "weights 2.00 GiB, step 1.0 MiB"
    )


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_language_models_cache_and_activations_are_near_what_is_kept(tmp_path: Path, checkpointed: bool) -> None:
    llama = LlamaConfig(
        vocab_size=16, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=0, bos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(tmp_path)
    word_tokenizer(False).save_pretrained(tmp_path)
    settings = TextPolicyConfig(
        model=str(tmp_path),
        sampling={"max_new_tokens": 60, "eos_token_ids": [15]},
        gradient_checkpointing=checkpointed,
        logits_chunk=1,
    )
    (row,) = settings.inspect().rows
    policy = settings.build("writer", "cpu", 0)
    cache = policy.model.new_cache()
    policy.model(torch.zeros(3, 10, dtype=torch.long), mask=torch.ones(3, 10, dtype=torch.long), cache=cache)
    assert bytes_of([t for layer in cache.layers for t in (layer.keys, layer.values)]) == 3 * 10 * row.cache * 4
    trajectory = policy.rollout([Request(Prompt("a b", 0), 0, SampleKey(0, 0, 0, 0, n)) for n in range(4)])
    length = trajectory.segments[0].num_steps + 2
    cut = Cut(0, torch.arange(4), slice(0, trajectory.segments[0].num_steps))
    kept = kept_for_backward(lambda: policy.replay(trajectory, cut, frozenset({"features"})), policy.model.parameters())
    # One layer of the checkpointed ones is computed again at a time, in the backward pass.
    in_forward = row.activations - (layer_activations(64, 176) if checkpointed else 0)
    assert 0.6 < in_forward * length * 4 * 4 / kept < 1.7


@pytest.mark.parametrize("make", [tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan])
def test_a_denoising_steps_activations_are_near_what_is_kept(make: Callable[[Path], Path], tmp_path: Path) -> None:
    kind = VideoPolicyConfig if make is tiny_wan else ImagePolicyConfig
    settings = kind(model=str(make(tmp_path)), sampling={"steps": 2, "height": 32, "width": 32})
    (row,) = settings.inspect().rows
    policy = settings.build("painter", "cpu", 0)
    trajectory = policy.rollout(image_requests(2))
    first = int(trajectory.segments[0].trained_mask[0].nonzero()[0])
    cut = Cut(0, torch.arange(2), slice(first, first + 1))
    kept = kept_for_backward(
        lambda: policy.replay(trajectory, cut, frozenset({"log_prob"})), policy.denoiser.parameters()
    )
    assert 0.4 < row.activations * 2 * 4 / kept < 2.5
