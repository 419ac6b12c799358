"""Image rewards without a model, against files on disk and closed forms."""

import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from modalities.samples import Image, Prompt
from rewards.image import JpegSizeConfig, MeanColourConfig


def noise(height: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def prompts(count: int) -> list[Prompt]:
    return [Prompt("p", index) for index in range(count)]


@pytest.mark.parametrize("quality", [95, 50])
def test_jpeg_size_is_that_of_a_file_in_kilobytes(tmp_path, quality):
    images = [noise(16, 16), noise(40, 24), torch.zeros(3, 16, 16, dtype=torch.uint8)]
    sizes = []
    for number, pixels in enumerate(images):
        rows = pixels.permute(1, 2, 0).tolist()
        picture = PIL.Image.new("RGB", (pixels.shape[2], pixels.shape[1]))
        picture.putdata([tuple(pixel) for row in rows for pixel in row])
        picture.save(tmp_path / f"{number}.jpg", quality=quality)
        sizes.append((tmp_path / f"{number}.jpg").stat().st_size / 1000)
    samples = [Image(pixels) for pixels in images]
    small = JpegSizeConfig(quality=quality).build("cpu").score(samples, prompts(3))
    large = JpegSizeConfig(prefer="large", quality=quality).build("cpu").score(samples, prompts(3))
    torch.testing.assert_close(large, torch.tensor(sizes))
    assert torch.equal(small, -large) and small.dtype == torch.float32


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
def test_float_images_score_as_the_same_uint8_images(seed):
    pixels = noise(9, 12, seed)
    as_uint8, as_float = [Image(pixels)], [Image(pixels.float() / 255)]
    for block in (JpegSizeConfig(), MeanColourConfig(target=(0.2, 0.4, 0.9))):
        reward = block.build("cpu")
        assert torch.equal(reward.score(as_uint8, prompts(1)), reward.score(as_float, prompts(1)))


def test_mean_colour_in_closed_form_for_images_of_unequal_size():
    half_white = torch.cat([torch.ones(3, 4, 3), torch.zeros(3, 4, 3)], dim=2)
    red = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1).expand(3, 2, 5)
    reward = MeanColourConfig(target=(1, 0, 0)).build("cpu")
    scores = reward.score([Image(half_white), Image(red), Image(1 - red)], prompts(3))
    torch.testing.assert_close(scores, torch.tensor([-0.5, 0.0, -1.0]))


def test_mean_colour_is_differentiable_towards_its_target():
    pixels = torch.full((3, 2, 2), 0.5, requires_grad=True)
    reward = MeanColourConfig(target=(1, 0.5, 0)).build("cpu")
    gradient = torch.autograd.grad(reward.score([Image(pixels)], prompts(1)).sum(), pixels)[0]
    assert reward.differentiable
    assert gradient.mean(dim=(1, 2)).sign().tolist() == [1, 0, -1]


def test_colours_outside_the_unit_range_are_refused():
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        MeanColourConfig(target=(255, 0, 0))
