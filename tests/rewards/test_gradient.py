"""The gradient of the total reward to pixels: finite differences, and what failed samples leave behind."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models_clip import as_image, picture, tiny_clip, tiny_open_clip
from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

from modalities.errors import UserError
from modalities.samples import Audio, Image, Prompt, Sample, Text, Video
from rewards.audio import RmsLevelConfig, SpectralCentroidConfig
from rewards.base import Reward, RewardConfig
from rewards.clip import ClipScoreConfig, ImageTextScorerConfig
from rewards.combine import RewardSet
from rewards.image import JpegSizeConfig, MeanColourConfig
from rewards.video import FrameSmoothnessConfig, PerFrameConfig

PROMPTS = [Prompt("red cat", 0), Prompt("a blue dog", 1), Prompt("cat", 2)]
TENSOR = {"image": "pixels", "video": "frames", "audio": "waveform"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    made = {"transformers": tiny_clip(tmp_path_factory.mktemp("clip"))}
    return made | {"open_clip": tiny_open_clip(tmp_path_factory.mktemp("open_clip"))}


def images() -> list[Sample]:
    return [Image(0.1 + 0.8 * as_image(picture(*size, seed)).unit()) for seed, size in enumerate([(40, 36), (24, 50)])]


def videos() -> list[Sample]:
    """Frames whose pixels lie far apart: the absolute difference has a kink where they meet."""
    frames = [[low + 0.3 * as_image(picture(20, 24, seed)).unit() for low in (0.1, 0.6)] for seed in (0, 5)]
    return [Video(torch.stack(pair)) for pair in frames]


def sounds() -> list[Sample]:
    noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    return [Audio(0.1 * noise, 8000), Audio(0.3 * noise[:1, :300], 8000)]


def with_tensor(sample: Sample, tensor: torch.Tensor) -> Sample:
    return replace(sample, **{TENSOR[sample.kind]: tensor})


def leaves(samples: list[Sample]) -> list[torch.Tensor]:
    return [getattr(sample, TENSOR[sample.kind]).clone().requires_grad_() for sample in samples]


CASES = {
    "clip": lambda models: (images, {"c": ClipScoreConfig(model=str(models["transformers"]), weight=3.0)}),
    "open_clip": lambda models: (images, {"c": ClipScoreConfig(model=str(models["open_clip"]), scale=10)}),
    "bundled": lambda models: (images, {"c": ImageTextScorerConfig()}),
    "colour": lambda models: (images, {"m": MeanColourConfig(target=(0.9, 0.1, 0.3), weight=-2.0)}),
    "sum": lambda models: (
        images,
        {
            "c": ClipScoreConfig(model=str(models["transformers"]), micro_batch_size=1, timeout_seconds=60),
            "m": MeanColourConfig(target=(0.9, 0.1, 0.3), weight=0.5, fade_in_iterations=8),
            "size": JpegSizeConfig(weight=0),
        },
    ),
    "smooth": lambda models: (videos, {"s": FrameSmoothnessConfig()}),
    "frames": lambda models: (videos, {"f": PerFrameConfig(reward=ClipScoreConfig(model=str(models["transformers"])))}),
    "level": lambda models: (sounds, {"l": RmsLevelConfig(target=0.2)}),
    "bright": lambda models: (sounds, {"b": SpectralCentroidConfig(target_hz=900)}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_finite_differences(name, models) -> None:
    make, blocks = CASES[name](models)
    rewards, samples, iteration = RewardSet.build(blocks, "cpu"), make(), 2
    prompts, tensors = PROMPTS[: len(samples)], leaves(samples)
    total, valid = rewards.score_with_gradient(
        [with_tensor(*pair) for pair in zip(samples, tensors, strict=True)], prompts, iteration
    )
    plain = rewards.score(samples, prompts, iteration)
    assert valid.all() and total.dtype == torch.float32
    torch.testing.assert_close(total.detach(), plain.total)
    for row, tensor in enumerate(tensors):
        gradient, *others = torch.autograd.grad(
            total[row], [tensor, *tensors[:row], *tensors[row + 1 :]], retain_graph=True, allow_unused=True
        )
        assert all(other is None or not other.any() for other in others)  # a score is a function of its own sample
        random = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)) * gradient.abs().mean()
        for direction in (gradient, gradient + random):
            step = 0.02 * direction / direction.abs().max()
            moved = [
                rewards.score([with_tensor(samples[row], (tensor + sign * step).detach())], [prompts[row]], iteration)
                for sign in (1, -1)
            ]
            expected = float((moved[0].total - moved[1].total) / 2)
            assert abs(expected) > 1e-6
            assert float((gradient * step).sum()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", ["transformers", "open_clip"])
def test_float_images_score_as_the_processors_own_8_bit_images(name, models) -> None:
    """Tolerance on the cosine: 2e-3, since the processors round to 8 bits after each pass of the resize."""
    pictures = [picture(*size, seed) for seed, size in enumerate([(40, 36), (24, 50), (70, 64)])]
    floats = [Image(as_image(one).unit().requires_grad_()) for one in pictures]
    rewards = RewardSet.build({"c": ClipScoreConfig(model=str(models[name]))}, "cpu")
    total, _ = rewards.score_with_gradient(floats, PROMPTS, 0)
    texts = [prompt.text for prompt in PROMPTS]
    with torch.no_grad():
        if name == "transformers":
            model = CLIPModel.from_pretrained(models[name]).eval()
            output = model(
                **CLIPTokenizer.from_pretrained(models[name])(texts, padding=True, return_tensors="pt"),
                **CLIPImageProcessor.from_pretrained(models[name])(pictures, return_tensors="pt"),
            )
            expected = torch.cosine_similarity(output.image_embeds, output.text_embeds)
        else:
            import open_clip

            source = f"local-dir:{models[name]}"
            model, _, transform = open_clip.create_model_and_transforms(source)
            seen = model.eval().encode_image(torch.stack([transform(one) for one in pictures]))
            expected = torch.cosine_similarity(seen, model.encode_text(open_clip.get_tokenizer(source)(texts)))
    torch.testing.assert_close(total.detach(), expected, atol=2e-3, rtol=0)
    assert expected.max() - expected.min() > 0.02


class Root(Reward):
    """The root of the mean distance to 0.5: its derivative is infinite there; other rules for other greys."""

    kinds = frozenset({"image"})
    differentiable = True

    def score(self, samples, prompts):
        scores = []
        for sample in samples:
            value = (sample.unit().mean() - 0.5).abs().sqrt()
            if sample.unit()[0, 0, 0] == 0.25:
                value = value / 0  # infinite, with a derivative that is no number
            if sample.unit()[0, 0, 0] == 0.75:
                raise ArithmeticError("boom")
            scores.append(value)
        return torch.stack(scores)


@pytest.mark.parametrize("bad", [0.25, 0.75])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_a_failed_sample_is_marked_and_gives_no_gradient(bad, micro_batch_size) -> None:
    shared = torch.ones((), requires_grad=True)  # stands for the policy's weights
    leaves = [torch.full((3, 2, 2), grey, requires_grad=True) for grey in (0.1, bad, 0.9)]
    samples = [Image(leaf * shared) for leaf in leaves]
    rewards = RewardSet({"r": (RewardConfig(weight=2.0, micro_batch_size=micro_batch_size), Root())})
    total, valid = rewards.score_with_gradient(samples, PROMPTS, 0)
    assert valid.tolist() == [True, False, True] and total.isnan().tolist() == [False, True, False]
    total[valid].sum().backward()
    assert not leaves[1].grad.any()
    expected = [-2 * 0.5 / 0.4**0.5 / 12, 2 * 0.5 / 0.4**0.5 / 12]  # of 2 sqrt(|mean - 0.5|), over 12 pixels
    for leaf, derivative in zip(leaves[::2], expected, strict=True):
        torch.testing.assert_close(leaf.grad, torch.full((3, 2, 2), derivative))
    torch.testing.assert_close(shared.grad, torch.tensor(12 * (0.1 * expected[0] + 0.9 * expected[1])))


def test_a_weight_that_has_not_faded_in_gives_a_gradient_of_zero_and_costs_no_sample() -> None:
    block = RewardConfig(weight=3.0, fade_in_iterations=3)
    leaves = [torch.full((3, 2, 2), grey, requires_grad=True) for grey in (0.1, 0.25)]
    rewards = RewardSet({"r": (block, Root())})
    total, valid = rewards.score_with_gradient([Image(leaf) for leaf in leaves], PROMPTS[:2], 0)
    total.sum().backward()
    assert valid.all() and total.tolist() == [0, 0]
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)
    assert not rewards.score_with_gradient([Image(leaf) for leaf in leaves], PROMPTS[:2], 1)[1].all()


def test_rewards_without_a_gradient_are_refused_by_name() -> None:
    target = (1.0, 0.0, 0.0)
    blocks: dict[str, Callable[[float], RewardConfig]] = {
        "tone": lambda weight: MeanColourConfig(target=target, weight=weight),
        "small": lambda weight: JpegSizeConfig(weight=weight),
    }
    RewardSet.build({"tone": blocks["tone"](1), "small": blocks["small"](0)}, "cpu").check_differentiable()
    mixed = RewardSet.build({"tone": blocks["tone"](1), "small": blocks["small"](-1)}, "cpu")
    pixels = torch.full((3, 2, 2), 0.5, requires_grad=True)
    for refuse in (mixed.check_differentiable, lambda: mixed.score_with_gradient([Image(pixels)], PROMPTS[:1], 0)):
        with pytest.raises(UserError, match=r"Without a gradient: small; with one: tone\."):
            refuse()
    with pytest.raises(UserError, match="Without a gradient: none; with one: none"):
        RewardSet.build({"tone": blocks["tone"](0)}, "cpu").check_differentiable()


def test_a_gradient_that_is_not_there_is_never_taken_for_zero() -> None:
    class Detached(Root):
        def score(self, samples, prompts):
            return super().score(samples, prompts).detach()

    rewards = RewardSet({"mine": (RewardConfig(), Root())})
    pixels = torch.full((3, 2, 2), 0.1)
    for sample in (Image(pixels), Image((pixels * 255).to(torch.uint8)), Text("a", 1, True)):
        with pytest.raises(TypeError, match=r"sample 0.*has no gradient"):
            rewards.score_with_gradient([sample], PROMPTS[:1], 0)
    with pytest.raises(UserError, match="'mine' says that it is differentiable"):
        RewardSet({"mine": (RewardConfig(), Detached())}).score_with_gradient(
            [Image(pixels.requires_grad_())], PROMPTS[:1], 0
        )


def test_rewards_run_without_gradient_unless_it_is_followed() -> None:
    class Spying(Root):
        def score(self, samples, prompts):
            self.had_gradient = torch.is_grad_enabled()
            return super().score(samples, prompts)

    rewards = {name: (RewardConfig(weight=weight), Spying()) for name, weight in (("a", 1.0), ("b", 0.0))}
    samples = [Image(torch.full((3, 2, 2), 0.1, requires_grad=True))]
    assert not RewardSet(rewards).score(samples, PROMPTS[:1], 0).total.requires_grad
    assert [reward.had_gradient for _, reward in rewards.values()] == [False, False]
    with torch.no_grad():
        assert RewardSet(rewards).score_with_gradient(samples, PROMPTS[:1], 0)[0].requires_grad
    assert [reward.had_gradient for _, reward in rewards.values()] == [True, False]
