"""CLIPScore against the processors and the plain models, for transformers and open_clip folders made on the spot."""

import json
from pathlib import Path

import open_clip
import pytest
import scipy.spatial.distance
import torch
from tiny_models_clip import as_image, picture, tiny_clip, tiny_open_clip
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from modalities.clip import Preprocessing, processor_preprocessing
from modalities.errors import UserError
from modalities.samples import Image, Prompt
from rewards.clip import ClipScoreConfig, ImageTextScorerConfig
from rewards.clip_models import load_clip, open_clip_preprocessing

SIZES = [(40, 40), (48, 33), (31, 64), (32, 32), (20, 90), (16, 16), (32, 35)]


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def open_clip_folder(tmp_path_factory) -> Path:
    return tiny_open_clip(tmp_path_factory.mktemp("open_clip"))


PROCESSORS = {
    "clip": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "square": {"size": {"height": 32, "width": 32}, "do_center_crop": False},
    "bilinear": {"size": {"shortest_edge": 35}, "crop_size": {"height": 32, "width": 30}, "resample": 2},
    "crop_pads": {"size": {"shortest_edge": 20}, "crop_size": {"height": 32, "width": 33}},
    "crop_only": {"do_resize": False, "crop_size": {"height": 24, "width": 23}},
    "raw": {"do_resize": False, "do_center_crop": False, "do_normalize": False},
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_preprocessing_is_the_transformers_processor(name, height, width):
    processor = CLIPImageProcessor(**PROCESSORS[name])
    ours = processor_preprocessing(processor, "here")
    image = picture(height, width)
    theirs = processor(images=image, return_tensors="pt")["pixel_values"][0]
    result = ours(as_image(image).unit())
    grey_levels = (result - theirs) * torch.tensor(ours.std).view(3, 1, 1) * 255
    assert result.shape == theirs.shape and result.dtype == torch.float32
    # They round to 8 bits after each pass of the resize; without a resize there is nothing to round.
    assert grey_levels.abs().max() < (1.1 if processor.do_resize else 1e-3)
    assert grey_levels.abs().mean() < 0.35


@pytest.mark.parametrize("mode", ["shortest", "squash"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_preprocessing_is_the_open_clip_transform(mode, height, width):
    settings = open_clip.transform.PreprocessCfg(size=32, resize_mode=mode, mean=(0.4, 0.5, 0.6), std=(0.3, 0.2, 0.1))
    ours = open_clip_preprocessing(vars(settings), "here")
    image = picture(height, width)
    theirs = open_clip.transform.image_transform_v2(settings, is_train=False)(image)
    grey_levels = (ours(as_image(image).unit()) - theirs) * torch.tensor(ours.std).view(3, 1, 1) * 255
    assert grey_levels.abs().max() < 1.1
    assert grey_levels.abs().mean() < 0.35


def test_preprocessing_keeps_the_gradient():
    preprocess = Preprocessing((4, 4), "bicubic", (3, 3), (0.5, 0.5, 0.5), (0.5, 0.25, 0.2))
    pixels = torch.rand(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25
    assert torch.autograd.gradcheck(preprocess, pixels.requires_grad_())


WORDS = ["red cat", "a blue dog", "red cat"]


def test_score_is_the_cosine_of_the_plain_transformers_model(transformers_folder):
    pictures = [picture(32, 32, seed) for seed in range(3)]
    reward = ClipScoreConfig(model=str(transformers_folder)).build("cpu")
    scores = reward.score([as_image(one) for one in pictures], [Prompt(text, 0) for text in WORDS])
    model = CLIPModel.from_pretrained(transformers_folder).eval()
    tokenizer = CLIPTokenizer.from_pretrained(transformers_folder)
    processor = CLIPImageProcessor.from_pretrained(transformers_folder)
    with torch.no_grad():
        output = model(
            **tokenizer(WORDS, padding=True, return_tensors="pt"), **processor(pictures, return_tensors="pt")
        )
    expected = [
        1 - scipy.spatial.distance.cosine(image, text)
        for image, text in zip(output.image_embeds.numpy(), output.text_embeds.numpy(), strict=True)
    ]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)
    assert scores.dtype == torch.float32 and len(set(scores.tolist())) == 3


def test_score_is_the_cosine_of_the_plain_open_clip_model(open_clip_folder):
    pictures = [picture(*size) for size in SIZES[:3]]
    reward = ClipScoreConfig(model=str(open_clip_folder), scale=100).build("cpu")
    scores = reward.score([as_image(one) for one in pictures], [Prompt(text, 0) for text in WORDS])
    source = f"local-dir:{open_clip_folder}"
    model, _, transform = open_clip.create_model_and_transforms(source)
    with torch.no_grad():
        images = model.eval().encode_image(torch.stack([transform(one) for one in pictures])).numpy()
        texts = model.encode_text(open_clip.get_tokenizer(source)(WORDS)).numpy()
    expected = [100 * (1 - scipy.spatial.distance.cosine(*pair)) for pair in zip(images, texts, strict=True)]
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float32), atol=0.3, rtol=0)
    assert max(expected) - min(expected) > 1


def test_open_clip_by_name_takes_weights_from_a_file(open_clip_folder, tmp_path, monkeypatch):
    settings = json.loads((open_clip_folder / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-clip.json").write_text(json.dumps(settings))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    weights = open_clip_folder / "open_clip_pytorch_model.bin"
    samples, prompts = [as_image(picture(32, 32))], [Prompt("red cat", 0)]
    by_name = ClipScoreConfig(model=f"open_clip:tiny-clip/{weights}").build("cpu").score(samples, prompts)
    same_normalisation = open_clip_folder.parent / "same_normalisation"
    same_normalisation.mkdir(exist_ok=True)
    (same_normalisation / weights.name).write_bytes(weights.read_bytes())
    (same_normalisation / "open_clip_config.json").write_text(json.dumps({"model_cfg": settings, "preprocess_cfg": {}}))
    by_folder = ClipScoreConfig(model=str(same_normalisation)).build("cpu").score(samples, prompts)
    assert torch.equal(by_name, by_folder)
    with pytest.raises(UserError, match="no model 'tiny-clop'; did you mean 'tiny-clip'"):
        ClipScoreConfig(model="open_clip:tiny-clop/x").build("cpu")
    with pytest.raises(UserError, match="names no weights"):
        ClipScoreConfig(model="open_clip:tiny-clip").build("cpu")
    with pytest.raises(UserError, match="cannot load 'tiny-clip' with weights 'laion'"):
        ClipScoreConfig(model="open_clip:tiny-clip/laion").build("cpu")


def test_images_of_unequal_sizes_score_as_they_do_alone_and_float_as_uint8(transformers_folder):
    reward = ClipScoreConfig(model=str(transformers_folder)).build("cpu")
    samples = [as_image(picture(*size)) for size in SIZES]
    prompts = [Prompt(text, 0) for text in (*WORDS, *WORDS, *WORDS[:1])]
    together = reward.score(samples, prompts)
    alone = torch.cat([reward.score([sample], [prompt]) for sample, prompt in zip(samples, prompts, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    as_float = reward.score([Image(sample.pixels.double() / 255) for sample in samples], prompts)
    torch.testing.assert_close(together, as_float, atol=1e-6, rtol=0)


def test_gradient_reaches_the_pixels_and_climbing_it_raises_the_score(transformers_folder):
    reward = ClipScoreConfig(model=str(transformers_folder)).build("cpu")
    pixels = as_image(picture(40, 36)).unit().requires_grad_()
    prompts = [Prompt("red cat", 0)]
    before = reward.score([Image(pixels)], prompts)
    gradient = torch.autograd.grad(before.sum(), pixels)[0]
    after = reward.score([Image((pixels + 0.05 * gradient.sign()).clamp(0, 1).detach())], prompts)
    assert after > before + 1e-3


def test_text_from_a_field_and_records_without_it(transformers_folder):
    reward = ClipScoreConfig(model=str(transformers_folder), field="caption").build("cpu")
    samples = [as_image(picture(32, 32))] * 2
    scores = reward.score(samples, [Prompt("x", 0, record={}), Prompt("x", 1, record={"caption": "red cat"})])
    plain = ClipScoreConfig(model=str(transformers_folder)).build("cpu").score(samples[:1], [Prompt("red cat", 0)])
    assert scores[0].isnan() and torch.equal(scores[1:], plain)
    assert reward.fields == {"caption"}


def test_a_text_longer_than_the_model_reads_is_cut(transformers_folder):
    reward = ClipScoreConfig(model=str(transformers_folder)).build("cpu")
    score = reward.score([as_image(picture(32, 32))], [Prompt("abcdefghij " * 9, 0)])
    assert score.isfinite().all()


def test_features_of_older_transformers_versions_are_tensors(transformers_folder, monkeypatch):
    model = load_clip(transformers_folder, "cpu")
    images = [as_image(picture(32, 32)).unit()]
    now = model.image_features(images), model.text_features(["cat"])
    new_style = CLIPModel.get_image_features, CLIPModel.get_text_features
    monkeypatch.setattr(CLIPModel, "get_image_features", lambda self, *a: new_style[0](self, *a).pooler_output)
    monkeypatch.setattr(CLIPModel, "get_text_features", lambda self, *a: new_style[1](self, *a).pooler_output)
    assert torch.equal(model.image_features(images), now[0]) and torch.equal(model.text_features(["cat"]), now[1])


def test_folders_that_are_no_clip_model_are_refused(transformers_folder, tmp_path):
    with pytest.raises(UserError, match="not a CLIP model"):
        load_clip(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="model_type 'bert'"):
        load_clip(tmp_path, "cpu")
    (tmp_path / "config.json").write_text((transformers_folder / "config.json").read_text())
    with pytest.raises(UserError, match="could not be loaded"):
        load_clip(tmp_path, "cpu")
    with pytest.raises(UserError, match="filter 0"):
        processor_preprocessing(CLIPImageProcessor(resample=0), "here")


def test_weights_that_are_missing_are_not_replaced_by_random_ones(transformers_folder, tmp_path):
    for file in transformers_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"holds no weights .*visual_projection"):
        load_clip(tmp_path, "cpu")


def test_the_bundled_scorer_is_clip_score_with_its_own_model(transformers_folder):
    block = ImageTextScorerConfig(model=str(transformers_folder))
    samples, prompts = [as_image(picture(32, 32))], [Prompt("red cat", 0)]
    plain = ClipScoreConfig(model=str(transformers_folder)).build("cpu").score(samples, prompts)
    assert torch.equal(block.build("cpu").score(samples, prompts), plain)
    assert ImageTextScorerConfig().model == "bundled:models/emoji-scorer" and block.type == "image_text_scorer"
