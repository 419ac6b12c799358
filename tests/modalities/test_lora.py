"""Adapters: attached, switched off, merged and saved; each against the plain module that they should equal."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tiny_models_text import tiny_gpt2, tiny_llama
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from modalities.errors import UserError
from modalities.lora import LoraSettings, adapter_switched, attach_lora, is_untrained, merged_state_dict, save_adapter

TARGETS = ("q_proj", "down_proj", "c_attn", "c_fc")
TOKENS = torch.tensor([[3, 7, 4, 9, 5]])


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*layers)


def language_model(make: Callable[[Path], Path], folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(make(folder / "model"), dtype=dtype)


def adapted(module: nn.Module, *targets: str, seed: int = 0, trained: bool = True) -> nn.Module:
    attach_lora(module, LoraSettings(rank=2, alpha=3.0), targets or TARGETS, seed)
    if trained:
        torch.manual_seed(1)
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_()
    return module


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_a_fresh_adapter_changes_nothing_and_alone_is_trainable(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = language_model(make, tmp_path)
    before = model(TOKENS).logits
    adapted(model, trained=False)
    torch.testing.assert_close(model(TOKENS).logits, before, rtol=0, atol=0)
    assert is_untrained(model)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if "lora_" in name} != set()


def test_the_adapter_is_float32_over_a_base_in_bfloat16(tmp_path: Path) -> None:
    model = adapted(language_model(tiny_llama, tmp_path, torch.bfloat16))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_its_start_depends_on_the_seed_alone(tmp_path: Path) -> None:
    plain = language_model(tiny_llama, tmp_path)

    def start(seed: int) -> Tensor:
        model = adapted(copy.deepcopy(plain), seed=seed, trained=False)
        return torch.cat([p.flatten() for name, p in model.named_parameters() if "lora_A" in name])

    torch.manual_seed(5)
    global_state = torch.get_rng_state()
    first = start(0)
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.manual_seed(6)
    assert torch.equal(start(0), first)
    assert not torch.equal(start(1), first)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_merged_weights_give_the_adapted_models_outputs(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = adapted(language_model(make, tmp_path))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not torch.allclose(merged(TOKENS).logits, model(TOKENS).logits, atol=1e-2)
    merged.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_convolutions_merge_too() -> None:
    plain, model = convolutional(), adapted(convolutional(), "0", "2")
    pixels = torch.rand(2, 3, 2, 2)
    assert not torch.allclose(plain(pixels), model(pixels), atol=1e-2)
    plain.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(plain(pixels), model(pixels), rtol=1e-5, atol=1e-5)


def test_merging_into_bfloat16_warns(tmp_path: Path) -> None:
    model = adapted(language_model(tiny_llama, tmp_path, torch.bfloat16))
    with pytest.warns(UserWarning, match="rounds away small updates"):
        state = merged_state_dict(model)
    assert {value.dtype for value in state.values()} == {torch.bfloat16}


def test_switched_off_it_is_the_base_again_even_when_merged(tmp_path: Path) -> None:
    model = language_model(tiny_gpt2, tmp_path)
    base = model(TOKENS).logits
    plain_state = {name: value.clone() for name, value in model.state_dict().items()}
    adapted(model)
    with adapter_switched([model], on=False):
        torch.testing.assert_close(model(TOKENS).logits, base, rtol=0, atol=0)
        merged = merged_state_dict(model)
        with adapter_switched([model], on=True):
            assert not torch.allclose(model(TOKENS).logits, base, atol=1e-2)
        torch.testing.assert_close(model(TOKENS).logits, base, rtol=0, atol=0)
    assert not torch.allclose(model(TOKENS).logits, base, atol=1e-2)
    assert merged.keys() == plain_state.keys()
    assert all(torch.equal(merged[name], value) for name, value in plain_state.items())


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_peft_itself_loads_the_saved_adapter(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = adapted(language_model(make, tmp_path))
    save_adapter(model, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_target_that_is_not_there_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    model = language_model(tiny_llama, tmp_path)
    with pytest.raises(UserError, match=r"lora\.targets: 'q_porj'.*did you mean 'q_proj'"):
        attach_lora(model, LoraSettings(targets=["v_proj", "q_porj"]), TARGETS, seed=0)
    with pytest.raises(UserError, match="none of the default targets"):
        attach_lora(model, LoraSettings(), ["c_attn"], seed=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
