"""Where models are while a stage opens. `meta` stands in for a device; `peak_memory.py` for what one has to hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models_audio import tiny_musicgen
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import tiny_gpt2
from torch import nn
from toy_runs import stage, write_run
from transformers import PreTrainedModel

from modalities import opening, text
from modalities.audio import AudioPolicyConfig
from modalities.image import ImagePolicyConfig
from modalities.opening import put_trained, waiting_for_division
from modalities.reward_model import TextRewardModelConfig
from modalities.text import TextPolicyConfig
from modalities.video import VideoPolicyConfig
from uniml_rl.engines.torch_engine import TorchEngine
from uniml_rl.run import train_from_yaml

Make = Callable[[Path], Path]
LORA = {"lora": {"rank": 2}}


def modules_of(policy: Any) -> dict[int, nn.Module]:
    """Every module that a policy holds, by id."""
    held = [*vars(policy).values(), *getattr(getattr(policy, "pipeline", None), "components", {}).values()]
    return {id(part): part for each in held if isinstance(each, nn.Module) for part in each.modules()}


def devices(modules: Any) -> set[str]:
    return {
        tensor.device.type
        for part in modules
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
    }


@pytest.mark.parametrize("keys", [{}, LORA])
@pytest.mark.parametrize(
    ("kind", "make", "has_others"),
    [
        (TextPolicyConfig, tiny_gpt2, False),
        (AudioPolicyConfig, tiny_musicgen, True),
        (ImagePolicyConfig, tiny_stable_diffusion, True),
        (ImagePolicyConfig, tiny_stable_diffusion_3, True),
        (VideoPolicyConfig, tiny_wan, True),
        (TextRewardModelConfig, tiny_gpt2, False),
    ],
)
def test_what_will_be_divided_waits_and_all_else_goes_to_the_device(
    kind: Any, make: Make, has_others: bool, keys: dict[str, Any], tmp_path: Path
) -> None:
    config = kind.model_validate({"model": str(make(tmp_path))} | keys)
    with waiting_for_division():
        policy = config.build("painter", "meta", 0)
    trained = {id(part) for module in policy.trainable_modules().values() for part in module.modules()}
    everything = modules_of(policy)
    assert devices(everything[key] for key in trained & everything.keys()) == {"cpu"}
    assert devices(part for key, part in everything.items() if key not in trained) == (
        {"meta"} if has_others else set()
    )
    assert policy.device == torch.device("meta"), "on which inputs go"
    whole = config.build("painter", "cpu", 0)
    pairs = zip(policy.trainable_modules().values(), whole.trainable_modules().values(), strict=True)
    for waiting, other in pairs:
        expected = dict(other.named_parameters())
        assert expected.keys() == dict(waiting.named_parameters()).keys()
        assert all(torch.equal(value, expected[name]) for name, value in waiting.named_parameters()), "same draws"


def test_a_model_that_nothing_divides_goes_to_its_device() -> None:
    module = nn.BatchNorm1d(2)
    put_trained(module, "meta")
    assert devices([module]) == {"meta"}


@pytest.mark.parametrize("divides", [True, False])
def test_policy_and_critic_wait_if_the_engine_divides_them(
    divides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[bool] = []

    def put(module: nn.Module, device: torch.device) -> None:
        waited.append(opening._WAITS.get())
        put_trained(module, device)

    monkeypatch.setattr(text, "put_trained", put)
    monkeypatch.setattr(TorchEngine, "divides_weights", divides)
    policies = {
        "letters": {"type": "text", "model": str(tiny_gpt2(tmp_path / "model")), "sampling": {"max_new_tokens": 2}}
    }
    block = stage(tmp_path, algorithm={"name": "ppo"}, critic={"source": "model"}, until={"iterations": 1})
    train_from_yaml(write_run(tmp_path, block, policies=policies), [], tmp_path / "run")
    # A third is what the export writes of divided weights: whole, in host memory.
    assert waited == ([True, True, False] if divides else [False, False])


def test_a_waiting_model_is_looked_at_without_the_kernels_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head is tried out where it is, and flash-attn would end the run there."""
    policy = TextPolicyConfig(model=str(tiny_gpt2(tmp_path))).build("writer", "cpu", 0)
    model = policy.model
    used: list[str] = []
    model.causal_lm.register_forward_hook(lambda *_: used.append(model.causal_lm.config._attn_implementation))
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, kernel, *_, **__: kernel)
    for kernel, expected in (("flash_attention_2", "eager"), ("sdpa", "sdpa")):
        model.causal_lm.set_attn_implementation(kernel)
        model._check_head()
        assert used.pop() == expected and not used
        assert model.causal_lm.config._attn_implementation == kernel
