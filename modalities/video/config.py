"""The `type: video` policy block: any supported text-to-video pipeline folder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from modalities.denoising import Families
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.video.wan import WanPolicy


class VideoSampling(DenoisingSampling):
    """How clips are drawn."""

    frames: int = Field(default=17, ge=1)
    """Frames of a clip; one more than a multiple of the model's temporal compression (4 for Wan)."""


class VideoPolicyConfig(DenoisingSettings):
    """A text-to-video diffusers pipeline of the Wan family (flow transformer)."""

    type: Literal["video"] = "video"
    """Selects this policy."""
    sampling: VideoSampling = VideoSampling()
    """How clips are drawn in training."""
    frames_per_second: float = Field(default=16.0, gt=0)
    """Stated by the clips that are decoded."""

    def families(self) -> Families:
        return {"WanPipeline": WanPolicy}
