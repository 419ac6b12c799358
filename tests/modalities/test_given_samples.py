"""Given samples through the verbs that supervised and preference objectives call, in their order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from denoising_helpers import image_policy, video_policy
from PIL import Image as Pil
from tiny_models_text import tiny_gpt2
from torch import Tensor
from torch.nn.functional import logsigmoid

from modalities.base import ForwardSegment, Policy, TokenSegment, Trajectory
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.randomness import SampleKey
from modalities.samples import Image, Prompt, Sample, Text, Video, cover
from modalities.text import TextPolicyConfig
from modalities.trajectories import concatenate, select

PROMPTS = [Prompt(text, index) for index, text in enumerate(["a red cat", "dog"], start=40) for _ in range(2)]
KEYS = [SampleKey(1, 0, 5, prompt.index, number % 2) for number, prompt in enumerate(PROMPTS)]


def image(seed: int, height: int, width: int) -> Image:
    return Image(torch.rand(3, height, width, generator=torch.Generator().manual_seed(seed)))


def texts() -> list[Sample]:
    return [Text(text, 0, finished=True) for text in ("a b c", "d", "e d c b a", "b b")]


def images() -> list[Sample]:
    return [image(seed, height, width) for seed, (height, width) in enumerate([(16, 16), (40, 16), (9, 12), (16, 31)])]


@pytest.fixture(params=["text", "flow", "epsilon"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    if request.param == "text":
        return TextPolicyConfig.model_validate({"model": str(tiny_gpt2(tmp_path))}).build("writer", "cpu", 0)
    name = "stable_diffusion_3_folder" if request.param == "flow" else "stable_diffusion_folder"
    extra: dict[str, Any] = {"max_sequence_length": 8} if request.param == "flow" else {}
    return image_policy(request.getfixturevalue(name), **extra)


def given(policy: Policy) -> Trajectory:
    return policy.encode(PROMPTS, texts() if policy.sample_kind == "text" else images(), KEYS)


def scores(policy: Policy, trajectory: Trajectory, budget: int = 8) -> Tensor:
    """[B]: the sum over tokens, or the mean over draws, of the log-probs; differentiable."""
    segment = trajectory.segments[0]
    total = torch.zeros(segment.num_rows)
    for cut in policy.plan(trajectory, torch.arange(segment.num_rows), budget):
        log_prob = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        part = (log_prob * cut.take(segment.trained_mask)).sum(1)
        total = total.index_add(0, cut.rows, part)
    return total / segment.num_steps if segment.decisions_are_draws else total


def test_imitation_makes_the_given_samples_likelier(policy: Policy) -> None:
    encoded = given(policy)
    optimizer = torch.optim.AdamW(policy.weight_sets.parameters().values(), lr=3e-3)
    with torch.no_grad():
        before = scores(policy, policy.as_likelihood(encoded, ForwardProcessSettings(draws=16), round=99))
    for step in range(6):
        trajectory = policy.as_likelihood(encoded, ForwardProcessSettings(), round=step)
        optimizer.zero_grad()
        (-scores(policy, trajectory).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        after = scores(policy, policy.as_likelihood(encoded, ForwardProcessSettings(draws=16), round=99))
    assert after.mean() > before.mean()


def test_preference_pairs_are_told_apart(policy: Policy) -> None:
    """DPO's margin is 0 at the reference, whatever the policy's draws, and grows for the pairs that are trained."""
    settings = ForwardProcessSettings(shared_in_group=True)
    encoded = given(policy)
    assert encoded.segments[0].group.tolist() == [40, 40, 41, 41]
    pairs = select(concatenate([encoded, encoded]), torch.tensor([3, 2, 4, 5]))  # chosen, rejected
    policy.keep("reference")
    optimizer = torch.optim.SGD(policy.weight_sets.parameters().values(), lr=0.05)
    beta = 0.05 if policy.sample_kind == "text" else 5.0
    losses = []
    for step in range(4):
        trajectory = policy.as_likelihood(pairs, settings, round=step % 2)
        segment = trajectory.segments[0]
        if isinstance(segment, ForwardSegment):
            assert torch.equal(segment.noise_seed[0], segment.noise_seed[1])
            assert not torch.equal(segment.noise_seed[0], segment.noise_seed[2])
        with torch.no_grad(), policy.using("reference"):
            reference = scores(policy, trajectory)
        margin = (scores(policy, trajectory) - reference).view(2, 2)
        if step == 0:
            torch.testing.assert_close(margin.detach(), torch.zeros(2, 2), rtol=0, atol=1e-5)
        loss = -logsigmoid(beta * (margin[:, 0] - margin[:, 1])).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[3] < losses[1] < losses[0]


def test_each_given_text_belongs_to_its_own_prompt(tmp_path: Path) -> None:
    """Several per prompt, which is stored once; and texts without room or of another kind are refused."""
    policy = TextPolicyConfig.model_validate({"model": str(tiny_gpt2(tmp_path))}).build("writer", "cpu", 0)
    trajectory = policy.encode(PROMPTS, texts(), KEYS)
    segment = trajectory.segments[0]
    assert isinstance(segment, TokenSegment)
    assert segment.prompt_index.tolist() == [0, 0, 1, 1]
    assert len(segment.prompt_tokens) == 2
    assert [text.text for text in policy.decode(trajectory)] == [text.text for text in texts()]  # type: ignore[union-attr]
    alone = [policy.encode([p], [t], [k]) for p, t, k in zip(PROMPTS, texts(), KEYS, strict=True)]
    with torch.no_grad():
        torch.testing.assert_close(scores(policy, trajectory), torch.cat([scores(policy, each) for each in alone]))
    with pytest.raises(UserError, match=r"prompt 40 .* positions"):
        policy.encode(PROMPTS[:1], [Text("a " * 3000, 0, True)], KEYS[:1])
    with pytest.raises(ValueError, match="texts only"):
        policy.encode(PROMPTS[:2], [image(0, 8, 8), Text("a", 0, True)], KEYS[:2])


def test_given_images_of_any_size_take_the_policys(stable_diffusion_3_folder: Path) -> None:
    policy = image_policy(stable_diffusion_3_folder, {"height": 16, "width": 32}, max_sequence_length=8)
    latents = policy.latents_from_samples(images())
    assert latents.shape[1:] == policy.latent_shape(policy.sampling)
    alone = torch.cat([policy.latents_from_samples([each]) for each in images()])
    torch.testing.assert_close(latents, alone)


@pytest.mark.parametrize("size", [(16, 16), (40, 16), (9, 12), (16, 31), (100, 37)])
def test_covering_is_pillows_resize_and_crop(size: tuple[int, int]) -> None:
    height, width = 16, 24
    given_image = image(3, *size)
    found = cover(given_image.unit()[None], height, width)[0]
    scale = max(height / size[0], width / size[1])
    scaled = (round(size[1] * scale), round(size[0] * scale))
    channels = []
    for channel in given_image.unit():
        resized = Pil.fromarray(channel.numpy()).resize(scaled, Pil.Resampling.BILINEAR)
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        channels.append(torch.tensor(np.asarray(resized.crop((left, top, left + width, top + height)))))
    torch.testing.assert_close(found, torch.stack(channels), rtol=0, atol=1e-3)
    same = image(4, height, width)
    assert torch.equal(cover(same.unit()[None], height, width)[0], same.pixels)


def test_given_videos_need_the_policys_length(wan_folder: Path) -> None:
    policy = video_policy(wan_folder)
    frames = torch.rand(5, 3, 40, 36)
    assert policy.latents_from_samples([Video(frames)]).shape[1:] == policy.latent_shape(policy.sampling)
    with pytest.raises(UserError, match="has 4 frames"):
        policy.latents_from_samples([Video(frames[:4])])
