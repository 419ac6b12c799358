"""Rewards of sound and video: pure tones, and films whose frames are known."""

import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from modalities.samples import Audio, Image, Prompt, Video
from rewards.audio import RmsLevelConfig, SpectralCentroidConfig
from rewards.image import JpegSizeConfig, MeanColourConfig
from rewards.video import FrameSmoothnessConfig, PerFrameConfig

RATE = 8000
PROMPTS = [Prompt("p", 0), Prompt("p", 1)]


def tone(hertz: float, amplitude: float, seconds: float = 1.0, channels: int = 1) -> Audio:
    wave = amplitude * torch.sin(2 * math.pi * hertz * torch.arange(int(RATE * seconds), dtype=torch.float64) / RATE)
    return Audio(wave.expand(channels, -1), RATE)


def film(*grey: float) -> Video:
    return Video(torch.tensor(grey).view(-1, 1, 1, 1).expand(-1, 3, 4, 4))


def test_the_level_of_a_sine_is_its_amplitude_over_root_two():
    samples = [tone(100, 0.5, channels=2), tone(440, 0.2, seconds=0.5)]
    scores = RmsLevelConfig(target=0).build("cpu").score(samples, PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([-0.5, -0.2]) / math.sqrt(2), atol=1e-5, rtol=0)
    assert float(RmsLevelConfig(target=0.1).build("cpu").score([tone(100, 0.0)], PROMPTS[:1])) == pytest.approx(-0.1)


def test_the_centroid_of_tones_is_their_weighted_mean_frequency():
    both = Audio(tone(1000, 0.2).waveform + tone(3000, 0.6).waveform, RATE)
    expected_hertz = (0.2 * 1000 + 0.6 * 3000) / 0.8
    scores = SpectralCentroidConfig(target_hz=1000).build("cpu").score([tone(1000, 0.3), both], PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([0.0, -(expected_hertz / 1000 - 1)]), atol=2e-3, rtol=0)


def test_silence_has_no_centroid():
    assert SpectralCentroidConfig(target_hz=500).build("cpu").score([tone(100, 0.0)], PROMPTS[:1]).isnan().all()


@pytest.mark.parametrize("block", [RmsLevelConfig(target=0.05), SpectralCentroidConfig(target_hz=200)])
def test_sound_rewards_are_differentiable(block):
    wave = tone(440, 0.3, seconds=0.01).waveform.double().clone().requires_grad_()
    reward = block.build("cpu")
    gradient = torch.autograd.grad(reward.score([Audio(wave, RATE)], PROMPTS[:1]).sum(), wave)[0]
    step = 1e-3 * gradient / gradient.norm()
    higher, lower = (reward.score([Audio((wave + sign * step).detach(), RATE)], PROMPTS[:1]) for sign in (1, -1))
    torch.testing.assert_close((higher - lower) / 2e-3, gradient.norm().float()[None], rtol=0.02, atol=0)


def test_smoothness_is_minus_the_mean_change_between_frames():
    samples = [film(0.0, 0.5, 0.25), film(0.7, 0.7)]
    scores = FrameSmoothnessConfig().build("cpu").score(samples, PROMPTS)
    torch.testing.assert_close(scores, torch.tensor([-0.375, 0.0]))
    assert FrameSmoothnessConfig().build("cpu").score([film(0.3)], PROMPTS[:1]).isnan().all()


@pytest.mark.parametrize(("reduce", "combine"), [("mean", lambda values: sum(values) / len(values)), ("min", min)])
@pytest.mark.parametrize("every", [1, 2])
def test_per_frame_reduces_the_image_reward_over_every_nth_frame(reduce, combine, every):
    samples = [film(0.1, 0.9, 0.4), film(1.0, 0.2)]
    image_block = MeanColourConfig(target=(1, 1, 1))
    scores = PerFrameConfig(reward=image_block, every=every, reduce=reduce).build("cpu").score(samples, PROMPTS)
    image_reward = image_block.build("cpu")
    expected = [
        combine([float(image_reward.score([Image(frame)], PROMPTS[:1])) for frame in list(sample.frames)[::every]])
        for sample in samples
    ]
    torch.testing.assert_close(scores, torch.tensor(expected))


def test_per_frame_is_differentiable_where_its_image_reward_is():
    assert PerFrameConfig(reward=MeanColourConfig(target=(0, 0, 0))).build("cpu").differentiable
    assert not PerFrameConfig(reward=JpegSizeConfig()).build("cpu").differentiable


def test_per_frame_reads_its_image_reward_by_type_and_keeps_common_keys_outside():
    read = TypeAdapter(PerFrameConfig).validate_python
    assert isinstance(
        read({"type": "per_frame", "reward": {"type": "jpeg_size", "quality": 80}}).reward, JpegSizeConfig
    )
    with pytest.raises(ValidationError, match="micro_batch_size, weight belongs to per_frame"):
        read({"reward": {"type": "jpeg_size", "weight": 2, "micro_batch_size": 1}})
    with pytest.raises(ValidationError, match="jpeg_sise"):
        read({"reward": {"type": "jpeg_sise"}})
