"""What a policy makes and a reward scores: prompts in; text, images, video and audio out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate


@dataclass(frozen=True)
class Prompt:
    """One prompt and the record it came from."""

    text: str
    index: int
    """Global index in the data source: the prompt's identity. Groups are made of it, never of the text."""
    negative: str | None = None
    """Negative prompt for classifier-free guidance; None takes the policy's own (usually the empty prompt)."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The other fields of its record (an answer to verify, a target text, a reference image ...)."""


def _check_pixels(pixels: Tensor, rank: int, what: str) -> None:
    if pixels.ndim != rank or pixels.shape[-3] != 3:
        raise ValueError(f"{what} has shape {tuple(pixels.shape)}; expected 3 channels in a tensor of rank {rank}.")
    if pixels.dtype == torch.uint8:
        return
    if not pixels.is_floating_point():
        raise ValueError(f"{what} has dtype {pixels.dtype}; allowed are uint8 (0..255) and float ([0, 1]).")
    low, high = pixels.detach().aminmax()
    if not (low >= 0 and high <= 1):  # also catches NaN
        raise ValueError(f"{what} is float and must lie in [0, 1], but spans [{low:.4g}, {high:.4g}].")


def _as_uint8(pixels: Tensor) -> Tensor:
    return pixels if pixels.dtype == torch.uint8 else (pixels.detach() * 255).round().to(torch.uint8)


def _as_unit(pixels: Tensor) -> Tensor:
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels.float()


def cover(pixels: Tensor, height: int, width: int) -> Tensor:
    """[N, 3, H, W] in [0, 1] -> [N, 3, height, width]: scaled (antialiased) to cover it, and cropped at the centre."""
    scale = max(height / pixels.shape[-2], width / pixels.shape[-1])
    size = [max(round(pixels.shape[-2] * scale), height), max(round(pixels.shape[-1] * scale), width)]
    if size != list(pixels.shape[-2:]):
        pixels = interpolate(pixels, size=size, mode="bilinear", antialias=True).clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return pixels[..., top : top + height, left : left + width]


@dataclass(frozen=True)
class Text:
    """A generated text."""

    text: str
    num_tokens: int
    """Tokens that the model itself chose, an end-of-sequence token included."""
    finished: bool
    """Whether the model ended it; False when it was cut at the length limit."""
    kind: str = "text"


@dataclass(frozen=True)
class Image:
    """A generated image. The dtype states the range: uint8 is 0..255, float is [0, 1] (checked)."""

    pixels: Tensor  # [3, H, W]
    kind: str = "image"

    def __post_init__(self) -> None:
        _check_pixels(self.pixels, 3, "Image.pixels")

    def uint8(self) -> Tensor:
        """[3, H, W] uint8, detached."""
        return _as_uint8(self.pixels)

    def unit(self) -> Tensor:
        """[3, H, W] float32 in [0, 1]; keeps the gradient."""
        return _as_unit(self.pixels)


@dataclass(frozen=True)
class Video:
    """A generated video clip. The dtype states the range as in `Image`."""

    frames: Tensor  # [F, 3, H, W]
    frames_per_second: float = 8.0
    kind: str = "video"

    def __post_init__(self) -> None:
        _check_pixels(self.frames, 4, "Video.frames")

    def uint8(self) -> Tensor:
        """[F, 3, H, W] uint8, detached."""
        return _as_uint8(self.frames)

    def unit(self) -> Tensor:
        """[F, 3, H, W] float32 in [0, 1]; keeps the gradient."""
        return _as_unit(self.frames)


@dataclass(frozen=True)
class Audio:
    """A generated sound."""

    waveform: Tensor  # [channels, samples], float in [-1, 1]
    sampling_rate: int
    kind: str = "audio"


Sample = Text | Image | Video | Audio
