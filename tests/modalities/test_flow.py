"""Stable Diffusion 3 folders: equal to diffusers' pipeline without noise, exported so that it loads them."""

import shutil
from pathlib import Path

import pytest
import torch
from denoising_helpers import exported_latents, image_policy, perturb, pipeline_latents, requests, segment_of
from safetensors.torch import load_file, save_file
from tiny_models_diffusion import tiny_stable_diffusion_3

from modalities.errors import UserError
from modalities.image import ImagePolicyConfig

NEGATIVES: list[str | None] = ["bad", "", "cat"]
WITHOUT_T5 = {"text_encoder_3": None, "tokenizer_3": None}


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("sampler", ["ode", "flow_sde"])
def test_without_noise_it_is_the_pipeline(stable_diffusion_3_folder: Path, guidance_scale: float, sampler: str) -> None:
    block = {"type": sampler} | ({} if sampler == "ode" else {"noise_level": 1e-7})
    policy = image_policy(stable_diffusion_3_folder, {"steps": 6, "sampler": block, "guidance_scale": guidance_scale})
    rows = requests(3, negatives=NEGATIVES)
    latents = segment_of(policy.rollout(rows)).final_latents
    torch.testing.assert_close(latents, pipeline_latents(stable_diffusion_3_folder, policy, rows), rtol=1e-4, atol=1e-4)


def test_resolution_dependent_shift_is_the_pipelines(tmp_path: Path) -> None:
    folder = tiny_stable_diffusion_3(tmp_path, use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64)
    for size in (8, 16):
        policy = image_policy(folder, {"sampler": {"type": "ode"}, "height": size, "width": 16})
        rows = requests(2, negatives=NEGATIVES)
        latents = segment_of(policy.rollout(rows)).final_latents
        torch.testing.assert_close(latents, pipeline_latents(folder, policy, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [None, 0, 7])
def test_without_a_t5_it_is_the_pipeline_without_a_t5(tmp_path: Path, length: int | None) -> None:
    folder = tiny_stable_diffusion_3(tmp_path, with_t5=False)
    policy = image_policy(folder, {"sampler": {"type": "ode"}}, max_sequence_length=length)
    rows = requests(2, negatives=NEGATIVES)
    options = {} if length is None else {"max_sequence_length": length}
    segment = segment_of(policy.rollout(rows))
    expected = pipeline_latents(folder, policy, rows, WITHOUT_T5, **options)
    torch.testing.assert_close(segment.final_latents, expected, rtol=1e-4, atol=1e-4)
    assert segment.conditions["prompt_embeds"].shape[1] == 12 + (256 if length is None else length)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_exported_folder_is_the_trained_model(
    stable_diffusion_3_folder: Path, tmp_path: Path, lora: dict | None
) -> None:
    policy = image_policy(stable_diffusion_3_folder, {"sampler": {"type": "ode"}}, lora=lora)
    rows = requests(2, negatives=NEGATIVES)
    before = segment_of(policy.rollout(rows)).final_latents
    perturb(policy)
    trained = segment_of(policy.rollout(rows)).final_latents
    assert not torch.allclose(trained, before, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(exported_latents(policy, tmp_path, rows), trained, rtol=1e-4, atol=1e-4)


def test_exported_adapter_alone_rebuilds_the_model(stable_diffusion_3_folder: Path, tmp_path: Path) -> None:
    policy = image_policy(stable_diffusion_3_folder, {"sampler": {"type": "ode"}}, lora={"rank": 2})
    perturb(policy)
    policy.export(tmp_path)
    from peft import PeftModel

    plain = image_policy(stable_diffusion_3_folder, {"sampler": {"type": "ode"}})
    PeftModel.from_pretrained(plain.denoiser, tmp_path / "adapter")  # puts the adapter into the module itself
    expected = segment_of(policy.rollout(requests(2))).final_latents
    torch.testing.assert_close(segment_of(plain.rollout(requests(2))).final_latents, expected, rtol=1e-4, atol=1e-4)


def test_the_last_blocks_text_queries_are_frozen_because_they_do_nothing(stable_diffusion_3_folder: Path) -> None:
    policy = image_policy(stable_diffusion_3_folder, {"sampler": {"type": "ode"}})
    frozen = {name for name, parameter in policy.denoiser.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"transformer_blocks.1.attn.add_q_proj.{leaf}" for leaf in ("weight", "bias")}
    before = segment_of(policy.rollout(requests(2))).final_latents
    with torch.no_grad():
        for name in frozen:
            policy.denoiser.get_parameter(name).mul_(-3)
    assert torch.equal(segment_of(policy.rollout(requests(2))).final_latents, before)


def test_explicit_shift_replaces_the_pipelines_grid(stable_diffusion_3_folder: Path) -> None:
    policy = image_policy(stable_diffusion_3_folder, {"shift": 1.0, "steps": 5})
    segment = segment_of(policy.rollout(requests(2)))
    torch.testing.assert_close(segment.times, torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2, 0.0]).expand(2, -1))


def test_a_size_beyond_the_position_table_is_explained(stable_diffusion_3_folder: Path) -> None:
    config = ImagePolicyConfig.model_validate({"model": str(stable_diffusion_3_folder), "sampling": {"height": 68}})
    for action in (config.inspect, lambda: config.build("painter", "cpu", 0)):
        with pytest.raises(UserError, match=r"sampling.height: 68 is more than this model's 64"):
            action()
    assert segment_of(image_policy(stable_diffusion_3_folder, {"height": 64}).rollout(requests(1))).num_rows == 1


def test_damaged_folders_are_explained(stable_diffusion_3_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(stable_diffusion_3_folder, tmp_path / "model")
    config = ImagePolicyConfig(model=str(tmp_path / "model"))
    transformer = tmp_path / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(transformer)
    del weights["proj_out.weight"]
    save_file(weights, transformer, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"transformer lacks the weights \['proj_out.weight'\]"):
        config.build("painter", "cpu", 0)
    with pytest.raises(UserError, match=r"no weights for 1 tensors of SD3Transformer2DModel, for example 'proj_"):
        config.inspect()
    shutil.copy(stable_diffusion_3_folder / "transformer" / transformer.name, transformer)
    (tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"\0" * 100)
    for action in (config.inspect, lambda: config.build("painter", "cpu", 0)):
        with pytest.raises(UserError, match="could not be loaded"):
            action()
