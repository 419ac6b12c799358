"""The committed assets: they load with plain libraries, stay small, and keep training and held-out concepts apart."""

import io
import json
import math
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer, CLIPModel

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "assets"
STYLES = {"noto": "Apache-2.0", "twemoji": "CC-BY-4.0", "fluent": "MIT"}
MEGABYTE = 1_000_000


def read_shard(style: str) -> list[tuple[Image.Image, dict]]:
    with tarfile.open(ASSETS / "emoji" / f"emoji-{style}.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    keys = sorted({name.split(".")[0] for name in files})
    return [(Image.open(io.BytesIO(files[f"{key}.webp"])), json.loads(files[f"{key}.json"])) for key in keys]


def prompts(name: str) -> list[str]:
    return (ASSETS / "prompts" / f"image_{name}.txt").read_text().splitlines()


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    folder = ASSETS / "models" / "emoji-flow"
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_assets_are_small():
    assert folder_size(ASSETS) <= 25 * MEGABYTE
    assert folder_size(ASSETS / "emoji") <= 5 * MEGABYTE


@pytest.mark.parametrize("style", STYLES)
def test_shards_hold_captioned_images_with_their_licence(style):
    records = read_shard(style)
    assert len(records) >= 700
    for image, meta in records:
        assert image.size == (32, 32) and image.mode == "RGB"
        assert meta["caption"] and meta["concept"] and meta["group"] and meta["author"] and meta["source"]
        assert (meta["style"], meta["licence"]) == (style, STYLES[style])
    assert len({meta["concept"] for _, meta in records}) == len(records)


def test_heldout_concepts_are_no_training_prompts():
    train, heldout = prompts("train"), prompts("heldout")
    assert len(heldout) >= 96
    assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
    assert not set(train) & set(heldout)
    assert set(train) | set(heldout) == {meta["caption"] for _, meta in read_shard("noto")}


def test_flow_pipeline_is_small_and_draws(pipeline):
    assert parameters(pipeline.transformer) <= 4.5e6
    assert parameters(pipeline.vae) <= 0.5e6
    images = pipeline(
        ["red heart", "pizza"],
        num_inference_steps=4,
        max_sequence_length=1,
        height=32,
        width=32,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
    ).images
    assert images.shape == (2, 32, 32, 3)
    assert np.isfinite(images).all() and images.std() > 0.05


def test_flow_draws_alike_for_any_number_of_zero_text_tokens(pipeline):
    """The pipeline's default of 256 zero vectors must give about the same image as one."""
    drawn = [
        pipeline(
            "red heart",
            num_inference_steps=4,
            max_sequence_length=length,
            height=32,
            width=32,
            generator=torch.Generator().manual_seed(0),
            output_type="np",
        ).images
        for length in (1, 256)
    ]
    assert np.abs(drawn[0] - drawn[1]).mean() < 0.05


def test_vae_reconstructs_and_normalises(pipeline):
    vae = pipeline.vae
    arrays = np.stack([np.asarray(image) for image, _ in read_shard("fluent")[::8]])
    images = torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
        decoded = vae.decode(latents).sample.clamp(-1, 1)
    error = (decoded - images).square().mean((1, 2, 3)) / 4
    assert (-10 * error.log10()).mean() > 30.0
    scaled = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    assert abs(scaled.mean().item()) < 0.15 and math.isclose(scaled.std().item(), 1.0, abs_tol=0.15)


@pytest.mark.parametrize(("which", "style"), [("scorer", "fluent"), ("judge", "twemoji")])
def test_scorers_know_an_unseen_drawing_style(which, style):
    folder = ASSETS / "models" / f"emoji-{which}"
    model = CLIPModel.from_pretrained(folder, local_files_only=True).eval()
    processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    assert parameters(model) <= 1.9e6
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).model_max_length == 16
    records = read_shard(style)[::4]
    inputs = processor(
        text=[meta["caption"] for _, meta in records],
        images=[image for image, _ in records],
        padding="max_length",
        return_tensors="pt",
    )
    with torch.no_grad():
        output = model(**inputs)
    cosine = output.image_embeds @ output.text_embeds.T
    matched = cosine.diag()
    others = (cosine.sum() - matched.sum()) / (cosine.numel() - len(records))
    assert matched.mean() - others > 0.15  # 0.21 measured for both


def test_shard_bytes_depend_on_the_files_alone(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "makers"))
    import emoji

    files = [("000000.json", b"{}"), ("000000.webp", b"image")]
    for name in ("a.tar", "b.tar"):
        emoji.write_shard(tmp_path / name, files)
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    sys.modules.pop("emoji")


def test_optimizer_orthogonalises(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "makers"))
    import common

    matrix = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(common.orthogonalise(matrix))
    assert singular.min() > 0.5 and singular.max() < 1.3
    sys.modules.pop("common")
