"""The estimate of memory against tensors that are counted one by one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.harness import kept_for_backward
from denoising_helpers import requests as image_requests
from tiny_models_audio import tiny_musicgen
from tiny_models_clip import tiny_clip
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import tiny_llama, word_tokenizer
from toy_runs import TOY, held_out, load_run, stage, write_run
from transformers import CLIPModel, LlamaConfig, LlamaForCausalLM

from modalities.audio import AudioPolicyConfig
from modalities.base import Cut, Request
from modalities.errors import UserError
from modalities.image import ImagePolicyConfig
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.summary import PolicySummary, RowMemory, layer_activations, sizes_of
from modalities.text import TextPolicyConfig
from modalities.video import VideoPolicyConfig
from uniml_rl.check import check_from_yaml, preflight
from uniml_rl.config import load_yaml
from uniml_rl.engines.base import Splits
from uniml_rl.engines.optimizers import OptimizerSettings
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.memory import GIB, Alone, Known, describe, divided, estimate
from uniml_rl.planner import available_memory, plan_rollouts

PROMPT = 7


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def summary(trained: torch.nn.Module, frozen: torch.nn.Module, *rows: RowMemory) -> PolicySummary:
    frozen.requires_grad_(False)
    weights = sizes_of([torch.nn.Sequential(trained, frozen)], 2)
    return PolicySummary("m", "text", [("tokens", "token")], frozenset(), weights, rows=list(rows))


def known(rewards: int = 0, **summaries: PolicySummary) -> Known:
    return Known(summaries, [PROMPT] * 2, [rewards] * 2)


def of_bytes(sizes: dict[str, float]) -> dict[str, float]:
    return {name: size * GIB for name, size in sizes.items()}


@pytest.mark.parametrize("type", ["adamw", "adafactor", "sgd"])
@pytest.mark.parametrize("name", ["llama", "llama-lora", "sd", "musicgen-lora"])
def test_weights_gradients_and_moments_are_the_bytes_of_real_ones(tmp_path: Path, name: str, type: str) -> None:
    """With another process beside it or not: `ddp` divides nothing."""
    kind, make, keys = {
        "llama": (TextPolicyConfig, tiny_llama, {}),
        "llama-lora": (TextPolicyConfig, tiny_llama, {"lora": {"rank": 2}, "dtype": "bfloat16"}),
        "sd": (ImagePolicyConfig, tiny_stable_diffusion, {}),
        "musicgen-lora": (AudioPolicyConfig, tiny_musicgen, {"lora": {"rank": 2}, "dtype": "bfloat16"}),
    }[name]
    block = kind(model=str(make(tmp_path / "model")), **keys)
    policy: Any = block.build("letters", "cpu", 0)
    optimizer = OptimizerSettings(type=type)
    engine = TorchEngine("cpu")
    engine.attach({"letters": (policy.trainable_modules(), optimizer)})
    parameters = [p for module in policy.trainable_modules().values() for p in module.parameters()]
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    gradients = bytes_of(p.grad for p in trained)
    engine.step(0)
    whole = policy.pipeline.components.values() if name == "sd" else [getattr(policy, "musicgen", policy.model)]
    everything = {p for module in whole if isinstance(module, torch.nn.Module) for p in module.parameters()}
    states = engine.state_dict()["optimizers"]["letters"]["state"].values()
    moments = [value for state in states for key, value in state.items() if key != "step"]
    config = load_run(write_run(tmp_path, stage(tmp_path, optimizer={"type": type}), engine={"shard": "ddp"}))
    found = known(letters=block.inspect())
    sizes = of_bytes(estimate(config, 0, found, ranks=2))
    assert sizes["weights"] == bytes_of(parameters)
    assert sizes["beside"] == bytes_of(everything - set(parameters))
    assert sizes["gradients"] == gradients
    assert sizes["optimizer"] == bytes_of(moments)
    assert sizes == of_bytes(estimate(config, 0, found))


def test_weight_sets_and_the_step_come_on_top(tmp_path: Path) -> None:
    config = load_run(write_run(tmp_path, stage(tmp_path, evaluation=held_out(tmp_path), ema={"decay": 0.9})))
    model = summary(torch.nn.Linear(100, 70), torch.nn.Linear(50, 30))
    sizes = of_bytes(estimate(config, 0, known(11, letters=model)))
    own = 4 * 7070
    assert sizes["copies"] == 2 * own, "reference and moving average"
    assert sizes["critic"] == sizes["rollout"] == sizes["update"] == 0
    assert sizes["peak"] == pytest.approx(own + 2 * 1530 + 5 * own + 2 * own + 11)


def test_an_objective_that_keeps_its_old_policy_has_a_copy_of_it(tmp_path: Path) -> None:
    rewards = {"size": {"type": "jpeg_size"}}
    block = stage(tmp_path, policy="painter", algorithm={"name": "diffusion_nft", "kl": None}, rewards=rewards)
    painter = {"type": "image", "model": "nowhere"}
    config = load_run(write_run(tmp_path, block, policies={"painter": painter}))
    model = summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5))
    assert of_bytes(estimate(config, 0, known(painter=model)))["copies"] == 4 * 90


def test_what_is_divided_over_ranks_and_what_is_gathered(tmp_path: Path) -> None:
    critic = {"source": "model", "optimizer": {"type": "sgd", "learning_rate": 0.1}}
    block = stage(tmp_path, algorithm={"name": "ppo"}, critic=critic, evaluation=held_out(tmp_path), ema={"decay": 0.9})
    row = RowMemory(tokens=13, cache=10, rows_at_once=5, activations=3)
    layers = torch.nn.Sequential(
        torch.nn.ModuleList([torch.nn.Linear(40, 40) for _ in range(5)]), torch.nn.Linear(8, 8)
    )
    model = summary(layers, torch.nn.Linear(50, 30), row)
    unit = 4 * (40 * 41 + 8 * 9) + 2 * 1530
    run = write_run(tmp_path, block, engine={"shard": "fsdp"})
    one, four, apart = (
        of_bytes(estimate(load_run(run), 0, known(11, letters=model), ranks, gathered))
        for ranks, gathered in ((1, True), (4, True), (4, False))
    )
    for name in ("weights", "gradients", "optimizer", "copies", "critic", "step"):
        assert four[name] == one[name] / 4 > 0, name
    assert four["rewards"] == one["rewards"] == 11 and four["beside"] == one["beside"]
    assert one["opening"] == 0 and four["opening"] == unit
    assert four["rollout"] == one["rollout"] + one["weights"] * 3 / 4
    assert apart["rollout"] == one["rollout"] + unit
    assert four["update"] == one["update"] + unit
    hybrid = load_run(write_run(tmp_path, block, engine={"shard": "hsdp", "shard_ranks": 2}))
    assert of_bytes(estimate(hybrid, 0, known(letters=model), 4))["weights"] == one["weights"] / 2
    alone = load_run(write_run(tmp_path, block))
    with pytest.raises(UserError, match="each of 2 would train by itself"):
        estimate(alone, 0, known(letters=model), 2)


def test_what_lies_in_the_machines_memory_takes_none_of_the_device() -> None:
    alone = Alone(100, 60, 7, 20, 40, 10, (50, 10, 30), 5, 3, 2, 9)
    halves = divided(alone, Splits(1, 2, 2, on_cpu=frozenset({"optimizer"})), gathered=True)
    assert halves["optimizer"] == 0 and halves["gradients"] == 10 and halves["weights"] == 100
    assert halves["critic"] == 50 + 5
    assert halves["rollout"] == 3 and halves["update"] == 2
    away = divided(alone, Splits(2, 2, 2, on_cpu=frozenset({"parameters", "optimizer"})), gathered=True)
    assert away["weights"] == away["copies"] == 0
    assert away["rollout"] == 3 + 60 and away["update"] == 2 + 9


def test_casts_of_weights_that_are_whole_are_held_and_of_gathered_ones_in_rollouts_alone() -> None:
    alone = Alone(100, 60, 7, 20, 40, 10, (50, 10, 30), 5, 3, 2, 9, casts=30)
    whole = divided(alone, Splits(1, 2, 2), gathered=True)
    assert (whole["rollout"], whole["update"]) == (3 + 30, 2 + 30)
    gathered = divided(alone, Splits(2, 2, 2), gathered=True)
    assert (gathered["rollout"], gathered["update"]) == (3 + 60 / 2 + 30, 2 + 9)
    sharded = divided(alone, Splits(2, 2, 2), gathered=False)
    assert (sharded["rollout"], sharded["update"]) == (3 + 9, 2 + 9)


def test_an_optimizer_that_steps_a_copy_of_the_weights_holds_its_part_of_it() -> None:
    alone = Alone(100, 60, 7, 20, 40, 10, (50, 10, 30), 5, 3, 2, 9)
    zero = divided(alone, Splits(1, 1, 2, steps_a_copy=True), gathered=True)
    assert zero["optimizer"] == (40 + 20) / 2 and zero["critic"] == 50 + 10 + (30 + 10) / 2
    assert zero["step"] == 2 * 20 / 2
    offloaded = divided(alone, Splits(1, 1, 2, frozenset({"optimizer"}), steps_a_copy=True), gathered=True)
    assert offloaded["step"] == offloaded["optimizer"] == 0 and offloaded["gradients"] == 20


@pytest.mark.parametrize(("available", "gathered"), [(100_000, True), (10_000, False)])
def test_rollouts_gather_weights_if_they_fit_and_say_why(tmp_path: Path, available: int, gathered: bool) -> None:
    model = known(letters=summary(torch.nn.Linear(30, 40), torch.nn.Linear(9, 9)))  # 5140 bytes of weights
    run = write_run(tmp_path, stage(tmp_path, algorithm={"name": "grpo", "kl": None}), engine={"shard": "fsdp"})
    plan = plan_rollouts(load_run(run), model, 2, available)
    assert plan is not None and plan.gathered == gathered
    words = "gathered, .* fit into 90% of" if gathered else "sharded, .* do not fit into 90% of"
    assert re.match(words, plan.in_words())
    assert plan_rollouts(load_run(run), model, 1, available) is None
    chosen = write_run(tmp_path, stage(tmp_path), engine={"shard": "fsdp", "rollout_weights": "sharded"})
    plan = plan_rollouts(load_run(chosen), model, 2, available)
    assert plan is not None and not plan.gathered and "as engine.rollout_weights says" in plan.in_words()


def test_the_memory_of_a_process_is_its_share_of_the_machines() -> None:
    whole = available_memory("cpu", 1)
    assert 2**28 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_memory("cpu", 4) == whole // 4


@pytest.mark.parametrize(("ranks", "words"), [(1, "memory about"), (2, "on each of 2 ranks")])
def test_check_plans_for_a_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture, ranks: int, words: str
) -> None:
    run = write_run(tmp_path, stage(tmp_path), engine={"shard": "fsdp"})
    check_from_yaml(run, ranks=ranks)
    said = " ".join(capsys.readouterr().out.split())
    assert words in said and ("rollout weights: gathered, whole weights" in said) == (ranks > 1)
    with pytest.raises(UserError, match="prompts_per_iteration: 2 cannot be shared by 3 processes"):
        check_from_yaml(run, ranks=3)


def test_the_models_that_score_are_counted(tmp_path: Path) -> None:
    clip = {"type": "clip_score", "model": str(tiny_clip(tmp_path / "clip"))}
    painter = {"type": "image", "model": str(tiny_stable_diffusion(tmp_path / "model")), "sampling": {"steps": 2}}
    block = stage(tmp_path, policy="painter", rewards={"clip": clip}, algorithm={"name": "ddpo"})
    block["evaluation"] = held_out(tmp_path, rewards={"judge": clip | {"scale": 2.0}})
    path = write_run(tmp_path, block, policies={"painter": painter})
    found = preflight(load_run(path), load_yaml(path))
    size = bytes_of(CLIPModel.from_pretrained(tmp_path / "clip").parameters())
    assert list(found.reward_bytes) == [2 * size]
    assert of_bytes(estimate(load_run(path), 0, found))["rewards"] == 2 * size


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
    first, second = (of_bytes(estimate(config, index, known(a=one, b=two))) for index in range(2))
    no_kl = load_run(write_run(tmp_path, stages[0] | {"algorithm": {"name": "grpo", "kl": None}}))
    assert estimate(no_kl, 0, known(a=one))["copies"] == 0 < first["copies"]
    assert second["optimizer"] == 0 < first["optimizer"]
    alone = {"a": 4 * 90 + 2 * 30, "b": 4 * 31 + 2 * 2}
    assert first["weights"] == alone["a"] and second["weights"] == pytest.approx(alone["a"] + alone["b"])
    assert second["critic"] == pytest.approx(alone["b"] + 4 * 31), "its weights and gradients"


def test_an_adapters_reference_is_free_until_it_has_been_trained(tmp_path: Path) -> None:
    block = {"type": "text", "model": "nowhere", "lora": {"rank": 2}}
    stages = [stage(tmp_path, name, policy="writer") for name in ("one", "two")]
    config = load_run(write_run(tmp_path, *stages, policies={"writer": block}))
    found = known(writer=summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5)))
    first, second = (estimate(config, index, found)["copies"] for index in range(2))
    assert (first, second * GIB) == (0, 90 * 4)
    moving = {"name": "grpo", "kl": {"reference": {"type": "refreshed", "every": 2}}}
    config = load_run(write_run(tmp_path, stages[0] | {"algorithm": moving}, policies={"writer": block}))
    assert estimate(config, 0, found)["copies"] * GIB == 90 * 4


def test_the_cache_is_that_of_the_rows_at_once_and_half_precision_keeps_less_but_casts(tmp_path: Path) -> None:
    row = RowMemory(tokens=13, cache=10, rows_at_once=5, activations=3, logits=11)
    whole, half = (
        replace(
            found := summary(torch.nn.Linear(9, 9), torch.nn.Linear(5, 5), row),
            weights=replace(found.weights, bytes_per_frozen=size),
        )
        for size in (4, 2)
    )
    for rows, many in ((2, {"prompts_per_iteration": 1, "group_size": 2}), (5, {"prompts_per_iteration": 9})):
        for precision, model, key, value, casts in (
            ("fp32", half, 2, 2, 0),
            ("fp32", whole, 4, 4, 0),
            ("bf16", half, 2, 2, 2 * 90),
            ("bf16", whole, 4, 2, 2 * 120),
            ("fp16", whole, 4, 2, 2 * 120),
        ):
            block = stage(tmp_path, micro_batch=4, **many)
            config = load_run(write_run(tmp_path, block, engine={"precision": precision}, policies={"letters": TOY}))
            sizes = of_bytes(estimate(config, 0, known(letters=model)))
            assert sizes["rollout"] == pytest.approx(rows * (13 + 7) * 10 * (key + value) / 2 + casts)
            assert sizes["update"] == pytest.approx(4 * (13 + 7) * 3 * value + 3 * 4 * 11 + casts)
    assert describe({"weights": 2.0, "rollout": 0, "step": 0.001}, ("weights", "rollout", "step")) == (
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
    cache = policy.model.new_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        policy.model(torch.zeros(3, 10, dtype=torch.long), mask=torch.ones(3, 10, dtype=torch.long), cache=cache)
    kept = bytes_of([t for layer in cache.layers for t in (layer.keys, layer.values)])
    assert kept == 3 * 10 * row.cache * (4 + 2) / 2
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
