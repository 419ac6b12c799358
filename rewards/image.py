"""Rewards of images that need no model: file size and colour."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import PIL.Image
import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor

from modalities.samples import Prompt
from rewards.base import Reward, RewardConfig

Channel = Annotated[float, Field(ge=0, le=1)]


class JpegSizeConfig(RewardConfig):
    """Size of the image as a JPEG file, the compressibility and incompressibility of DDPO (Black et al. 2023)."""

    type: Literal["jpeg_size"] = "jpeg_size"
    """Easy or hard to compress, in kB of 1000 bytes."""
    prefer: Literal["small", "large"] = "small"
    """`small` scores minus the size, `large` the size."""
    quality: int = Field(default=95, ge=1, le=95)
    """JPEG quality."""

    def build(self, device: str) -> JpegSize:
        """No model, so no device."""
        return JpegSize(self)


class JpegSize(Reward):
    """See `JpegSizeConfig`."""

    kinds = frozenset({"image"})

    def __init__(self, config: JpegSizeConfig) -> None:
        self._sign = -1.0 if config.prefer == "small" else 1.0
        self._quality = config.quality

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32, kB."""
        return self._sign * torch.tensor([self._bytes(sample.uint8()) / 1000 for sample in samples])

    def _bytes(self, pixels_CHW: Tensor) -> int:
        file = io.BytesIO()
        picture = PIL.Image.fromarray(rearrange(pixels_CHW, "c h w -> h w c").cpu().numpy())
        picture.save(file, format="JPEG", quality=self._quality)
        return file.getbuffer().nbytes


class MeanColourConfig(RewardConfig):
    """Minus the distance of the image's mean colour from a target, in [-1, 0]; differentiable.

    The root mean square over the three channels. With (1, 1, 1) as target it asks for bright images: a first reward to
    try a policy with, since it rises quickly or something is wrong.
    """

    type: Literal["mean_colour"] = "mean_colour"
    """Overall colour or brightness."""
    target: tuple[Channel, Channel, Channel]
    """Red, green and blue from 0 to 1."""

    def build(self, device: str) -> MeanColour:
        """Computed where the images are."""
        return MeanColour(self.target)


class MeanColour(Reward):
    """See `MeanColourConfig`."""

    kinds = frozenset({"image"})
    differentiable = True

    def __init__(self, target: tuple[float, float, float]) -> None:
        self._target_C = torch.tensor(target)

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32."""
        means_BC = torch.stack([sample.unit().mean(dim=(-2, -1)) for sample in samples])
        difference_BC = means_BC - self._target_C.to(means_BC.device)
        return -torch.linalg.vector_norm(difference_BC, dim=-1) / 3**0.5
