"""Which attention kernel is taken, that it is the one that computes, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from denoising_helpers import requests as image_requests
from tiny_models_diffusion import tiny_stable_diffusion, tiny_stable_diffusion_3, tiny_wan
from tiny_models_text import tiny_gpt2, tiny_llama
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from modalities import attention, text
from modalities.base import Cut, PolicyConfig, Request
from modalities.errors import UserError
from modalities.image import ImagePolicyConfig
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.text import TextPolicyConfig
from modalities.video import VideoPolicyConfig

Make = Callable[[Path], Path]
FP32, BF16 = torch.float32, torch.bfloat16
LORA = {"rank": 2}
SMALL = {"steps": 2, "height": 32, "width": 32}


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which packages are installed."""

    def say(*kernels: str) -> None:
        monkeypatch.setattr(attention, "installed", lambda kernel: kernel in kernels)

    return say


def block(make: Make, folder: Path, **keys: Any) -> PolicyConfig:
    if make in (tiny_gpt2, tiny_llama):
        return TextPolicyConfig(model=str(make(folder)), sampling={"max_new_tokens": 4}, **keys)
    kind = VideoPolicyConfig if make is tiny_wan else ImagePolicyConfig
    return kind(model=str(make(folder)), sampling=SMALL, **keys)


BOTH = ("flash_attention_2", "xformers")
HALF = {"dtype": "bfloat16", "lora": LORA}


@pytest.mark.parametrize(
    ("make", "keys", "packages", "device", "precision", "expected"),
    [
        (tiny_llama, {}, BOTH, "cuda", BF16, "flash_attention_2"),
        (tiny_llama, HALF, BOTH, "cuda", FP32, "flash_attention_2"),
        (tiny_llama, {}, BOTH, "cuda", FP32, "auto"),
        (tiny_llama, {}, BOTH, "cpu", BF16, "auto"),
        (tiny_llama, {}, ("xformers",), "cuda", BF16, "auto"),
        (tiny_llama, {"attention": "eager"}, BOTH, "cuda", BF16, "eager"),
        (tiny_wan, HALF, BOTH, "cuda", BF16, "flash_attention_2"),
        (tiny_wan, HALF, ("xformers",), "cuda", BF16, "xformers"),
        (tiny_wan, {}, BOTH, "cuda", FP32, "xformers"),
        (tiny_wan, {}, BOTH, "cuda", BF16, "sdpa"),
        (tiny_wan, {"attention": "flash_attention_2"}, BOTH, "cuda", BF16, "flash_attention_2"),
        (tiny_wan, HALF, BOTH, "cpu", BF16, "sdpa"),
        (tiny_wan, HALF, (), "cuda", BF16, "sdpa"),
        (tiny_wan, HALF | {"attention": "sdpa"}, BOTH, "cuda", BF16, "sdpa"),
        (tiny_stable_diffusion_3, HALF, BOTH, "cuda", BF16, "xformers"),
        (tiny_stable_diffusion, {}, BOTH, "cuda", FP32, "xformers"),
        (tiny_stable_diffusion, {}, ("flash_attention_2",), "cuda", FP32, "sdpa"),
    ],
)
def test_auto_takes_the_fastest_that_can_run(
    has: Callable[..., None],
    tmp_path: Path,
    make: Make,
    keys: dict[str, Any],
    packages: tuple[str, ...],
    device: str,
    precision: torch.dtype,
    expected: str,
) -> None:
    has(*packages)
    settled: Any = block(make, tmp_path, **keys).settled(device, precision)
    assert settled.attention == expected


@pytest.mark.parametrize(
    ("make", "kernel", "device", "precision", "message"),
    [
        (tiny_llama, "flash_attention_2", "cpu", BF16, "it runs on GPUs only"),
        (tiny_llama, "flash_attention_2", "cuda", FP32, "half precision only: set engine.precision"),
        (tiny_wan, "flash_attention_2", "cuda", FP32, "half precision only: set engine.precision"),
        (tiny_wan, "xformers", "cpu", FP32, "it runs on GPUs only"),
        (tiny_stable_diffusion_3, "flash_attention_2", "cuda", BF16, "with sdpa, xformers only"),
    ],
)
def test_what_cannot_run_is_refused(
    has: Callable[..., None],
    tmp_path: Path,
    make: Make,
    kernel: str,
    device: str,
    precision: torch.dtype,
    message: str,
) -> None:
    has(*BOTH)
    with pytest.raises(UserError, match=rf"^attention: {kernel}: .*{message}.*use auto"):
        block(make, tmp_path, attention=kernel).settled(device, precision)


@pytest.mark.parametrize(
    ("make", "kernel", "command"),
    [
        (tiny_llama, "flash_attention_2", r"pip install --no-build-isolation 'uniml-rl\[flash-attn\]'"),
        (tiny_wan, "flash_attention_2", r"pip install --no-build-isolation 'uniml-rl\[flash-attn\]'"),
        (tiny_stable_diffusion, "xformers", r"pip install 'uniml-rl\[xformers\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_command(tmp_path: Path, make: Make, kernel: str, command: str) -> None:
    """None of them is among what the tests need."""
    with pytest.raises(UserError, match=command):
        block(make, tmp_path, attention=kernel).settled("cuda", BF16)


def test_a_language_model_is_loaded_with_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    load = text.load_model

    def loading(*arguments: Any, attn_implementation: str = "none", **options: Any) -> Any:
        given.append(attn_implementation)
        return load(*arguments, **options)

    monkeypatch.setattr(text, "load_model", loading)
    monkeypatch.setattr(attention, "installed", lambda kernel: True)
    config = block(tiny_gpt2, tmp_path)
    config.settled("cuda", BF16).build("writer", "cpu", 0)
    config.settled("cpu", BF16).build("writer", "cpu", 0)
    assert given == ["flash_attention_2", "none"]
    assert config.inspect().attention == "sdpa"


def stand_in(calls: list[str], name: str) -> Callable[..., Tensor]:
    """Attention over [B, S, H, D], as the packages have it, computed by torch."""

    def compute(q: Tensor, k: Tensor, v: Tensor, bias: None = None, *more: Any, **options: Any) -> Tensor:
        calls.append(name)
        assert bias is None and not options.get("causal", False)
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return compute


@pytest.mark.parametrize("kernel", BOTH)
def test_the_kernel_computes_every_attention_of_the_denoiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """On the CPU, with stand-ins for what the packages compute on GPUs. Another model of the process keeps its own."""
    from diffusers.models import attention_dispatch

    calls: list[str] = []
    ops = SimpleNamespace(memory_efficient_attention=stand_in(calls, "xformers"))
    monkeypatch.setattr(attention_dispatch, "xops", ops, raising=False)
    monkeypatch.setattr(attention_dispatch, "flash_attn_func", stand_in(calls, "flash_attention_2"))
    make = tiny_wan(tmp_path)
    settings = VideoPolicyConfig(model=str(make), sampling=SMALL | {"frames": 1}, max_sequence_length=8)
    plain = settings.build("painter", "cpu", 0)
    other = settings.model_copy(update={"attention": kernel}).build("painter", "cpu", 0)
    expected = plain.rollout(image_requests(2)).segments[0].final_latents
    assert not calls
    found = other.rollout(image_requests(2)).segments[0].final_latents
    layers = len(plain.denoiser.blocks)
    assert calls == [kernel] * (2 * layers * SMALL["steps"])
    assert torch.allclose(found, expected, atol=1e-5)
    plain.rollout(image_requests(2))
    assert len(calls) == 2 * layers * SMALL["steps"]


@pytest.mark.parametrize("make", [tiny_stable_diffusion, tiny_stable_diffusion_3])
def test_older_denoisers_are_told_of_xformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    told: list[str] = []
    for name in ("UNet2DConditionModel", "SD3Transformer2DModel"):
        model_class = getattr(sys.modules["diffusers"], name)
        monkeypatch.setattr(model_class, "enable_xformers_memory_efficient_attention", lambda self: told.append("x"))
    for kernel, times in (("sdpa", 0), ("xformers", 1)):
        block(make, tmp_path, attention=kernel).build("painter", "cpu", 0)
        assert len(told) == times


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels of GPUs")
@pytest.mark.parametrize(
    ("make", "kernel"),
    [(tiny_llama, "flash_attention_2"), (tiny_wan, "flash_attention_2"), (tiny_wan, "xformers"),
     (tiny_stable_diffusion, "xformers"), (tiny_stable_diffusion_3, "xformers")],
)  # fmt: skip
def test_on_a_gpu_the_kernel_scores_as_sdpa_does(tmp_path: Path, make: Make, kernel: str) -> None:
    results = []
    for name in ("sdpa", kernel):
        config = block(make, tmp_path / name, attention=name, **HALF).settled("cuda", BF16)
        policy = config.build("policy", "cuda", 0)
        asked = image_requests(2)
        if make is tiny_llama:
            asked = [Request(Prompt("a b", 0), 0, SampleKey(0, 0, 0, 0, sample)) for sample in range(2)]
        trajectory = results[0][1] if results else policy.rollout(asked)
        step = int(trajectory.segments[0].trained_mask[0].nonzero()[0])
        cut = Cut(0, torch.arange(2), slice(step, step + 1))
        replayed = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        replayed.sum().backward()
        results.append((replayed.detach().float(), trajectory))
    assert torch.allclose(results[0][0], results[1][0], atol=5e-2)
