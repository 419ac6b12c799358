"""Attention kernels: which of them can run here, and which one `attention: auto` stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from modalities.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PACKAGES = {"flash_attention_2": "flash-attn", "xformers": "xformers"}
"""Kernels that need a package, the fastest first."""
_DISPATCHED = {"auto": "native", "sdpa": "native", "flash_attention_2": "flash", "xformers": "xformers"}
"""Their names in diffusers."""


def installed(kernel: str) -> bool:
    """Whether the package of a kernel is there, new enough for transformers and diffusers."""
    if kernel == "xformers":
        from diffusers.utils import is_xformers_available

        return bool(is_xformers_available())
    from transformers.utils import is_flash_attn_2_available

    return bool(is_flash_attn_2_available())


def choose_attention(asked: str, offered: Sequence[str], device: str, is_half: bool, otherwise: str = "sdpa") -> str:
    """The kernel that `asked` stands for: itself, or for `auto` the first of `offered` that can run, else `otherwise`.

    `is_half` says whether attention is computed in bfloat16 or float16. Raises UserError if what is asked for cannot
    run here.
    """
    if asked == "auto":
        able = [kernel for kernel in offered if not _obstacle(kernel, offered, device, is_half)]
        return able[0] if able else otherwise
    if obstacle := _obstacle(asked, offered, device, is_half):
        raise UserError(f"attention: {asked}: {obstacle}; or use auto.")
    return asked


def _obstacle(kernel: str, offered: Sequence[str], device: str, is_half: bool) -> str:
    if kernel not in _PACKAGES:
        return ""
    if kernel not in offered:
        return f"this model computes its attention with {', '.join(['sdpa', *offered])} only"
    if device == "cpu":
        return "it runs on GPUs only, and this run's device is the CPU"
    if not installed(kernel):
        package = _PACKAGES[kernel]
        return (
            f"the package {package} is not installed, or too old: "
            f"`pip install {'--no-build-isolation ' if package == 'flash-attn' else ''}'uniml-rl[{package}]'`"
        )
    if kernel == "flash_attention_2" and not is_half:
        return "it computes in half precision only: set engine.precision to bf16 or fp16"
    return ""


@contextmanager
def attention_that_runs(model: PreTrainedModel) -> Iterator[None]:
    """Within it a model that waits in host memory computes its attention without a kernel that runs on GPUs only."""
    kernel = model.config._attn_implementation
    if model.device.type != "cpu" or kernel not in _PACKAGES:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(kernel)


def set_denoiser_attention(denoiser: nn.Module, kernel: str) -> None:
    """Makes a diffusers model compute its attention with `kernel`, which can run here."""
    from diffusers.models.attention import AttentionModuleMixin

    dispatching = [module for module in denoiser.modules() if isinstance(module, AttentionModuleMixin)]
    for module in dispatching:  # each by itself: the model's own switch would change every other model too
        module.set_attention_backend(_DISPATCHED[kernel])
    if not dispatching and kernel == "xformers":
        denoiser.enable_xformers_memory_efficient_attention()  # type: ignore[operator]
