"""Stable Diffusion 1.x/2.x folders: equal to diffusers' pipeline without noise, exported so that it loads them, and
wrong folders explained."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from denoising_helpers import exported_latents, image_policy, perturb, pipeline_latents, requests, segment_of
from tiny_models_diffusion import tiny_stable_diffusion

from modalities.errors import UserError
from modalities.image import ImagePolicyConfig

NEGATIVES: list[str | None] = ["bad", "", "cat"]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_without_noise_it_is_the_pipeline(tmp_path: Path, prediction_type: str, guidance_scale: float) -> None:
    folder = tiny_stable_diffusion(tmp_path, prediction_type)
    policy = image_policy(folder, {"steps": 7, "sampler": {"type": "ode"}, "guidance_scale": guidance_scale})
    rows = requests(3, negatives=NEGATIVES)
    latents = segment_of(policy.rollout(rows)).final_latents
    torch.testing.assert_close(latents, pipeline_latents(folder, policy, rows), rtol=1e-4, atol=1e-4)


def test_trailing_grid_is_the_pipelines_where_it_divides(tmp_path: Path) -> None:
    folder = tiny_stable_diffusion(tmp_path, timestep_spacing="trailing", set_alpha_to_one=True)
    policy = image_policy(folder, {"steps": 5, "sampler": {"type": "ddim", "eta": 0}})
    rows = requests(2, negatives=NEGATIVES)
    latents = segment_of(policy.rollout(rows)).final_latents
    torch.testing.assert_close(latents, pipeline_latents(folder, policy, rows), rtol=1e-4, atol=1e-4)


def test_pixels_are_the_pipelines(stable_diffusion_folder: Path) -> None:
    policy = image_policy(stable_diffusion_folder)
    trajectory = policy.rollout(requests(2))
    pipeline = policy.pipeline
    expected = pipeline.vae.decode(segment_of(trajectory).final_latents / pipeline.vae.config.scaling_factor).sample
    expected = pipeline.image_processor.postprocess(expected.detach(), output_type="pt")
    decoded = torch.stack([sample.unit() for sample in policy.decode(trajectory)])  # type: ignore[union-attr]
    torch.testing.assert_close(decoded, expected, rtol=0, atol=1 / 500)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_exported_folder_is_the_trained_model(stable_diffusion_folder: Path, tmp_path: Path, lora: dict | None) -> None:
    policy = image_policy(stable_diffusion_folder, {"sampler": {"type": "ode"}}, lora=lora)
    rows = requests(2, negatives=NEGATIVES)
    before = segment_of(policy.rollout(rows)).final_latents
    perturb(policy, 0.02)
    trained = segment_of(policy.rollout(rows)).final_latents
    assert not torch.allclose(trained, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(exported_latents(policy, tmp_path, rows), trained, rtol=1e-4, atol=1e-4)
    again = image_policy(tmp_path, {"sampler": {"type": "ode"}})
    torch.testing.assert_close(segment_of(again.rollout(rows)).final_latents, trained, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists() == (lora is not None)


def test_evaluation_brings_its_own_sampling(stable_diffusion_folder: Path) -> None:
    policy = image_policy(stable_diffusion_folder)
    own = policy.sampling.model_copy(update={"steps": 6, "height": 32})
    segment = segment_of(policy.rollout(requests(1), own))
    assert segment.num_steps == 6
    assert segment.final_latents.shape == (1, 4, 16, 8)
    assert segment_of(policy.rollout(requests(1))).num_steps == policy.sampling.steps


def copy_with_index(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target)
    index = json.loads((target / "model_index.json").read_text()) | changes
    (target / "model_index.json").write_text(json.dumps(index))
    return target


def test_wrong_folders_are_explained(stable_diffusion_folder: Path, tmp_path: Path) -> None:
    other = copy_with_index(stable_diffusion_folder, tmp_path / "other", _class_name="StableDiffusionXLPipeline")
    nameless = copy_with_index(stable_diffusion_folder, tmp_path / "nameless", _class_name=None)
    hollow = copy_with_index(stable_diffusion_folder, tmp_path / "hollow")
    shutil.rmtree(hollow / "unet")
    for folder, message in (
        (stable_diffusion_folder.parent / "stable-difusion", "stable-diffusion"),  # the nearest name
        (stable_diffusion_folder / "unet", "diffusers pipeline folder"),
        (other, "StableDiffusionXLPipeline.*supported are StableDiffusion3Pipeline, StableDiffusionPipeline"),
        (nameless, "supported are"),
        (hollow, "hollow"),
    ):
        config = ImagePolicyConfig(model=str(folder))
        for action in (config.inspect, lambda config=config: config.build("painter", "cpu", 0)):
            with pytest.raises(UserError, match=message) as caught:
                action()
            assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"sampler": {"type": "flow_sde"}}}, "ddim, ode"),
        ({"sampling": {"shift": 3.0}}, "shift"),
        ({"max_sequence_length": 32}, "max_sequence_length"),
        ({"sampling": {"height": 17}}, "sampling.height: 17"),
        ({"sampling": {"width": 33}}, "sampling.width: 33"),
        ({"lora": {"targets": ["to_qq"]}}, "to_qq"),
    ],
)
def test_settings_that_do_not_fit_are_explained_without_training(
    stable_diffusion_folder: Path, changes: dict, message: str
) -> None:
    config = ImagePolicyConfig.model_validate({"model": str(stable_diffusion_folder)} | changes)
    for action in (config.inspect, lambda: config.build("painter", "cpu", 0)):
        with pytest.raises(UserError, match=message):
            action()


def test_full_fine_tuning_is_float32() -> None:
    with pytest.raises(ValueError, match="lora"):
        ImagePolicyConfig(model="anywhere", dtype="bfloat16")
