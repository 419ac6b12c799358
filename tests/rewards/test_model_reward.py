"""A trained reward model as a reward: the policy's own score, from the exported folder alone."""

from pathlib import Path

import pytest
import torch
from tiny_models_clip import as_image, picture, tiny_clip
from tiny_models_text import tiny_llama
from transformers import AutoModelForSequenceClassification

from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.reward_model import ImageTextRewardModelConfig, RewardModel, TextRewardModelConfig
from modalities.samples import Image, Prompt, Text
from rewards.clip import ImageTextScorerConfig
from rewards.combine import RewardSet
from rewards.reward_model import ModelRewardConfig

PROMPTS = [Prompt("a b c", 0), Prompt("d", 1), Prompt("e f", 2)]
TEXTS = [Text("g h i j", 5, True), Text("k", 1, False), Text("l m a", 4, True)]


def trained(policy: RewardModel, samples: list) -> torch.Tensor:
    """Moves every weight that trains, and gives the scores [B] that follow."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    trajectory = policy.encode(PROMPTS, samples, [SampleKey(0, 0, 0, 0, row) for row in range(3)])
    (cut,) = policy.plan(trajectory, torch.arange(3), 9)
    return policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")[:, 0].detach()


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_exported_text_model_scores_as_the_policy_did(lora, tmp_path) -> None:
    block = TextRewardModelConfig(model=str(tiny_llama(tmp_path / "base")), lora=lora)
    policy = block.build("judge", "cpu", 0)
    expected = trained(policy, TEXTS)
    policy.export(tmp_path / "judge")
    rewards = RewardSet.build({"judge": ModelRewardConfig(model=str(tmp_path / "judge"), micro_batch_size=2)}, "cpu")
    rewards.check("text")
    torch.testing.assert_close(rewards.score(TEXTS, PROMPTS, 0).total, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="scores text, but the policy makes image"):
        rewards.check("image")
    with pytest.raises(UserError, match="Without a gradient: judge"):
        rewards.check_differentiable()


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_exported_image_model_scores_as_the_policy_did_and_has_a_gradient(lora, tmp_path) -> None:
    policy = ImageTextRewardModelConfig(model=str(tiny_clip(tmp_path / "base")), lora=lora).build("judge", "cpu", 0)
    samples = [as_image(picture(40, 36, seed)) for seed in range(3)]
    expected = trained(policy, samples)
    policy.export(tmp_path / "judge")
    rewards = RewardSet.build({"judge": ModelRewardConfig(model=str(tmp_path / "judge"))}, "cpu")
    torch.testing.assert_close(rewards.score(samples, PROMPTS, 0).total, expected, rtol=1e-4, atol=1e-4)
    pixels = (0.1 + 0.8 * samples[0].unit()).requires_grad_()
    total, _ = rewards.score_with_gradient([Image(pixels)], PROMPTS[:1], 0)
    gradient = torch.autograd.grad(total.sum(), pixels)[0]
    step = 0.02 * gradient / gradient.abs().max()
    higher, lower = (rewards.score([Image((pixels + s * step).detach())], PROMPTS[:1], 0).total for s in (1, -1))
    assert float((gradient * step).sum()) == pytest.approx(float((higher - lower) / 2), rel=0.03)


def test_clip_models_are_reward_models_as_they_are() -> None:
    """The bundled scorer: its logit is the cosine of `image_text_scorer` on another scale."""
    samples = [as_image(picture(32, 32, seed)) for seed in range(3)]
    prompts = [Prompt("red apple", 0), Prompt("cat face", 1), Prompt("star", 2)]
    reward = ModelRewardConfig(model="bundled:models/emoji-scorer").build("cpu")
    scores, cosines = reward.score(samples, prompts), ImageTextScorerConfig().build("cpu").score(samples, prompts)
    scale = scores / cosines
    torch.testing.assert_close(scale, scale[:1].expand(3), rtol=1e-4, atol=0)
    assert float(scale[0]) > 1


def test_half_precision_is_close(tmp_path) -> None:
    policy = ImageTextRewardModelConfig(model=str(tiny_clip(tmp_path / "base"))).build("judge", "cpu", 0)
    samples = [as_image(picture(40, 36, seed)) for seed in range(3)]
    expected = trained(policy, samples)
    policy.export(tmp_path / "judge")
    scores = ModelRewardConfig(model=str(tmp_path / "judge"), dtype="bfloat16").build("cpu").score(samples, PROMPTS)
    assert scores.dtype == torch.float32 and not torch.equal(scores, expected)
    torch.testing.assert_close(scores, expected, rtol=0, atol=0.5)


def test_models_without_a_trained_head_of_one_output_are_refused(tmp_path) -> None:
    base = tiny_llama(tmp_path / "base")
    with pytest.raises(UserError, match=r"is no reward model: .*score\.weight.*text_reward_model"):
        ModelRewardConfig(model=str(base)).build("cpu")
    classes = tmp_path / "classes"
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=3).save_pretrained(classes)
    for file in base.glob("tokenizer*"):
        (classes / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="is no reward model"):
        ModelRewardConfig(model=str(classes)).build("cpu")


def test_a_text_that_is_too_long_has_failed(tmp_path) -> None:
    """It is no mistake of the configuration that would end the run: it is left out and counted, the others are not."""
    policy = TextRewardModelConfig(model=str(tiny_llama(tmp_path / "base"))).build("judge", "cpu", 0)
    policy.export(tmp_path / "judge")
    rewards = RewardSet.build({"judge": ModelRewardConfig(model=str(tmp_path / "judge"))}, "cpu")
    assert rewards.reads() == {"judge": 64}
    long = Text("a " * 62, 62, False)
    result = rewards.score([TEXTS[0], long, TEXTS[2]], PROMPTS[:1] * 3, 0)
    assert result.valid.tolist() == [True, False, True]
    assert result.failures == {"judge": {"too_long": 1}}
    fits = rewards.score([Text("a " * 61, 61, False)], PROMPTS[:1], 0)  # with the prompt's three tokens 64
    assert fits.valid.tolist() == [True]


def test_the_model_of_an_earlier_stage_is_named_by_its_policy() -> None:
    block = ModelRewardConfig(model="policy:judge", weight=2.0)
    assert block.policy == "judge" and ModelRewardConfig(model="judge").policy is None
    found = block.with_model(Path("run/export/judge"))
    assert (found.model, found.weight, found.policy) == ("run/export/judge", 2.0, None)
    with pytest.raises(UserError, match="'policy:judge' is not trained yet"):
        block.build("cpu")
