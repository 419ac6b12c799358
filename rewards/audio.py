"""Rewards of sound that need no model: loudness and brightness."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from modalities.samples import Audio, Prompt
from rewards.base import Reward, RewardConfig


class AudioReward(Reward):
    """A differentiable reward that looks at one sound at a time: they may differ in length."""

    kinds = frozenset({"audio"})
    differentiable = True

    @abstractmethod
    def score_audio(self, sample: Audio) -> Tensor:
        """[] float32."""

    def score(self, samples: Sequence[Any], prompts: Sequence[Prompt]) -> Tensor:
        """[B] float32."""
        return torch.stack([self.score_audio(sample) for sample in samples])


class RmsLevelConfig(RewardConfig):
    """Minus the distance of the sound's level from a target: -|RMS amplitude - target|; differentiable."""

    type: Literal["rms_level"] = "rms_level"
    """Loudness."""
    target: float = Field(default=0.1, ge=0, le=1)
    """Root-mean-square amplitude over all channels, 1 being full scale; 0.1 is -20 dBFS."""

    def build(self, device: str) -> RmsLevel:
        """Computed where the sounds are."""
        return RmsLevel(self.target)


class RmsLevel(AudioReward):
    """See `RmsLevelConfig`."""

    def __init__(self, target: float) -> None:
        self._target = target

    def score_audio(self, sample: Audio) -> Tensor:
        """In [-1, 0]; NaN for a sound without samples."""
        wave = sample.waveform.float()
        # A norm and not the root of a mean, whose derivative at silence is infinite.
        return -(torch.linalg.vector_norm(wave) / wave.numel() ** 0.5 - self._target).abs()


class SpectralCentroidConfig(RewardConfig):
    """Minus the distance of the spectral centroid from a target, relative to it: -|centroid / target - 1|.

    The centroid is the mean frequency weighted by the magnitudes of the whole sound's spectrum, channels averaged.
    Differentiable.
    """

    type: Literal["spectral_centroid"] = "spectral_centroid"
    """Dark or bright sound."""
    target_hz: float = Field(gt=0)
    """Centroid to reach, in Hz."""

    def build(self, device: str) -> SpectralCentroid:
        """Computed where the sounds are."""
        return SpectralCentroid(self.target_hz)


class SpectralCentroid(AudioReward):
    """See `SpectralCentroidConfig`."""

    def __init__(self, target_hz: float) -> None:
        self._target_hz = target_hz

    def score_audio(self, sample: Audio) -> Tensor:
        """At most 0; NaN for silence, which has no centroid."""
        wave_S = sample.waveform.float().mean(dim=0)
        magnitude_F = torch.fft.rfft(wave_S).abs()
        hertz_F = torch.fft.rfftfreq(len(wave_S), 1 / sample.sampling_rate, device=wave_S.device)
        centroid = (hertz_F * magnitude_F).sum() / magnitude_F.sum()
        return -(centroid / self._target_hz - 1).abs()
