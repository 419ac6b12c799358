"""Wan folders: the same policy over [C, F, H, W] latents. What every denoising policy does is in test_denoising."""

from pathlib import Path

import pytest
import torch
from denoising_helpers import exported_latents, perturb, pipeline_latents, requests, segment_of, video_policy

from modalities.errors import UserError
from modalities.samples import Video
from modalities.video import VideoPolicyConfig

NEGATIVES: list[str | None] = ["bad", ""]
OPTIONS = {"num_frames": 5, "max_sequence_length": 16}


def test_without_noise_it_is_the_pipeline_before_and_after_training(wan_folder: Path, tmp_path: Path) -> None:
    policy = video_policy(wan_folder, {"sampler": {"type": "ode"}}, lora={"rank": 2})
    rows = requests(2, negatives=NEGATIVES)
    before = segment_of(policy.rollout(rows)).final_latents
    torch.testing.assert_close(before, pipeline_latents(wan_folder, policy, rows, **OPTIONS), rtol=1e-4, atol=1e-4)
    perturb(policy, 0.2)
    trained = segment_of(policy.rollout(rows)).final_latents
    assert not torch.allclose(trained, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(exported_latents(policy, tmp_path, rows, **OPTIONS), trained, rtol=1e-4, atol=1e-4)


def test_clips_are_the_pipelines(wan_folder: Path) -> None:
    policy = video_policy(wan_folder, frames_per_second=12)
    trajectory = policy.rollout(requests(2))
    latents = segment_of(trajectory).final_latents
    assert latents.shape == (2, 16, 2, 4, 4)
    config, pipeline = policy.vae.config, policy.pipeline
    mean, std = (torch.tensor(v).view(1, 16, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        decoded = policy.vae.decode(latents * std + mean).sample
    expected = pipeline.video_processor.postprocess_video(decoded, output_type="pt")
    for clip, pixels in zip(policy.decode(trajectory), expected, strict=True):
        assert isinstance(clip, Video)
        assert clip.frames_per_second == 12
        torch.testing.assert_close(clip.unit(), pixels, rtol=0, atol=1 / 500)


@pytest.mark.parametrize(("key", "value"), [("frames", 6), ("height", 40), ("width", 24)])
def test_sizes_must_fit_the_latent_grid(wan_folder: Path, key: str, value: int) -> None:
    config = VideoPolicyConfig.model_validate({"model": str(wan_folder), "sampling": {key: value}})
    for action in (config.inspect, lambda: config.build("film", "cpu", 0)):
        with pytest.raises(UserError, match=f"sampling.{key}: {value}"):
            action()


def test_an_image_folder_is_no_video_policy(stable_diffusion_folder: Path) -> None:
    with pytest.raises(UserError, match=r"StableDiffusionPipeline.*supported are WanPipeline"):
        VideoPolicyConfig(model=str(stable_diffusion_folder)).inspect()
