"""Reward models: their score is that of the plain library's model, before and after training, here and exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from tiny_models_clip import as_image, picture, tiny_clip
from tiny_models_text import tiny_gpt2, tiny_llama, tiny_qwen, word_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertModel,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTokenizer,
)

from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.randomness import SampleKey
from modalities.reward_model import ImageTextRewardModelConfig, RewardModel, TextRewardModelConfig
from modalities.samples import Image, Prompt, Sample, Text
from modalities.trajectories import concatenate, select

PROMPTS = [Prompt("a b c", 0), Prompt("a b c", 0), Prompt("d", 1), Prompt("e f", 2)]
TEXTS = [Text("g h i j", 5, True), Text("k", 1, False), Text("", 1, True), Text("l m a b c d", 7, True)]
IMAGE_PROMPTS = [Prompt(text, index) for index, text in enumerate(["red cat", "a blue dog", "red cat", "x"])]
MAKERS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "qwen": tiny_qwen}
LORA = {"rank": 2}
NEEDS = frozenset({"log_prob"})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            make = {**MAKERS, "clip": tiny_clip, "bert": tiny_bert}[name]
            made[name] = make(tmp_path_factory.mktemp(name))
        return made[name]

    return find


def tiny_bert(folder: Path) -> Path:
    """An encoder: its score is read from the first token, through a pooler."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=16, max_position_embeddings=32, pad_token_id=1, **sizes)).save_pretrained(folder)
    word_tokenizer(False).save_pretrained(folder)
    return folder


def text_model(folder: Path, seed: int = 0, **keys) -> RewardModel:
    return TextRewardModelConfig(model=str(folder), **keys).build("judge", "cpu", seed)


def image_model(folder: Path, **keys) -> RewardModel:
    return ImageTextRewardModelConfig(model=str(folder), **keys).build("judge", "cpu", 0)


def pictures() -> list[Sample]:
    return [as_image(picture(*size, seed)) for seed, size in enumerate([(40, 36), (24, 50), (32, 32), (64, 40)])]


def score(policy: RewardModel, prompts: list[Prompt], samples: list[Sample], budget: int = 100) -> Tensor:
    """[B], through encode, plan and replay as an objective does it."""
    keys = [SampleKey(0, 0, 0, prompt.index, row) for row, prompt in enumerate(prompts)]
    trajectory = policy.encode(prompts, samples, keys)
    assert policy.as_likelihood(trajectory, ForwardProcessSettings()) is trajectory
    found = torch.full((len(prompts),), torch.nan)
    for cut in policy.plan(trajectory, torch.arange(len(prompts)), budget):
        log_prob = policy.replay(trajectory, cut, NEEDS).of("log_prob")
        assert log_prob.shape == (len(cut.rows), 1) and log_prob.dtype == torch.float32
        found = found.index_put((cut.rows,), log_prob[:, 0])
    return found


def plain_text_scores(folder: Path, texts: list[str]) -> Tensor:
    """transformers alone: its classifier and its tokenizer, each text by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits.float()[:, 0] for text in texts])


def plain_image_scores(folder: Path, prompts: list[Prompt], images: list[Image]) -> Tensor:
    model = CLIPModel.from_pretrained(folder).eval()
    texts = [prompt.text for prompt in prompts]
    words = CLIPTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    pixels = CLIPImageProcessor.from_pretrained(folder)([image.uint8() for image in images], return_tensors="pt")
    with torch.no_grad():
        return model(**words, **pixels).logits_per_image.diagonal()


def whole(prompts: list[Prompt], texts: list[Text]) -> list[str]:
    """Prompt, response and the end token of a finished one, as one text for a plain tokenizer."""
    return [f"{p.text} {t.text}{' <eos>' * t.finished}" for p, t in zip(prompts, texts, strict=True)]


def train(policy: RewardModel, prompts: list[Prompt], chosen: list[Sample], rejected: list[Sample], steps: int) -> None:
    """The Bradley-Terry loss, written out."""
    parameters = list(policy.weight_sets.parameters().values())
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(steps):
        both = score(policy, [*prompts, *prompts], [*chosen, *rejected])
        margin = both[: len(prompts)] - both[len(prompts) :]
        loss = -torch.nn.functional.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("name", MAKERS)
def test_the_score_is_the_heads_at_the_last_token_whatever_else_is_in_the_batch(name, folder_of) -> None:
    policy = text_model(folder_of(name))
    scores = score(policy, PROMPTS, TEXTS).detach()
    model = policy.scorer.model
    trunk, head = model.base_model, model.score.weight
    tokenizer = AutoTokenizer.from_pretrained(folder_of(name))
    expected = []
    for text in whole(PROMPTS, TEXTS):
        ids = tokenizer(text, return_tensors="pt").input_ids
        if name == "gpt2":  # pads with its end token, so the score is read before that
            ids = ids[:, : int((ids != tokenizer.pad_token_id).nonzero()[-1, 1]) + 1]
        with torch.no_grad():
            expected.append(trunk(ids).last_hidden_state[0, -1] @ head[0])
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert scores.unique().numel() == 4
    for budget in (1, 3):
        torch.testing.assert_close(score(policy, PROMPTS, TEXTS, budget).detach(), scores, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "clip"])
def test_rows_of_several_batches_score_together_as_they_did(name, folder_of) -> None:
    policy = image_model(folder_of(name)) if name == "clip" else text_model(folder_of(name))
    prompts, samples = (IMAGE_PROMPTS, pictures()) if name == "clip" else (PROMPTS, TEXTS)
    keys = [SampleKey(0, 0, 0, 0, row) for row in range(4)]
    parts = [policy.encode(prompts[s], samples[s], keys[s]) for s in (slice(0, 1), slice(1, 2), slice(2, 4))]
    order = torch.tensor([3, 0, 2, 1])
    joined = select(concatenate(parts), order)
    (cut,) = policy.plan(joined, torch.arange(4), 9)
    found = policy.replay(joined, cut, NEEDS).of("log_prob")[:, 0]
    torch.testing.assert_close(found, score(policy, prompts, samples)[order], rtol=1e-4, atol=1e-4)


def test_prompt_and_response_are_read_through_the_chat_template(folder_of, tmp_path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    tokenizer = word_tokenizer(False)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'a ' if m.role == 'user' else '' }}{{ m.content }}"
        "{{ ' b ' if m.role == 'user' else ' <eos>' }}{% endfor %}"
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "c d"}, {"role": "assistant", "content": "e f"}]
    prompts, texts = [Prompt("c d", 0)], [Text("e f", 0, True)]
    expected = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
    with_template, without = text_model(tmp_path), text_model(tmp_path, chat_template=False)
    assert with_template.scorer.inputs(prompts, texts).tokens[0].tolist() == expected
    assert without.scorer.inputs(prompts, texts).tokens[0].tolist() == tokenizer("c d e f <eos>").input_ids
    for policy, is_there in ((with_template, True), (without, False)):
        policy.export(tmp_path / str(is_there))
        exported = AutoTokenizer.from_pretrained(tmp_path / str(is_there))
        assert (exported.chat_template is not None) == is_there
    with pytest.raises(UserError, match="has no chat template"):
        text_model(folder_of("llama"), chat_template=True)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("name", [*MAKERS, "bert"])
def test_exported_texts_are_scored_alike_by_plain_transformers(name, lora, folder_of, tmp_path) -> None:
    policy = text_model(folder_of(name), lora=lora)
    train(policy, PROMPTS[2:], TEXTS[2:], TEXTS[:2], steps=3)
    policy.export(tmp_path / "judge")
    expected = score(policy, PROMPTS, TEXTS).detach()
    found = plain_text_scores(tmp_path / "judge", whole(PROMPTS, TEXTS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    again = text_model(tmp_path / "judge", seed=5)  # trained on from there: the head is not drawn again
    torch.testing.assert_close(score(again, PROMPTS, TEXTS).detach(), expected, rtol=1e-4, atol=1e-5)
    if lora:
        base = AutoModelForSequenceClassification.from_pretrained(folder_of(name), num_labels=1)
        base.config.pad_token_id = policy.scorer.model.config.pad_token_id
        adapted = PeftModel.from_pretrained(base, tmp_path / "judge" / "adapter").eval()
        inputs = policy.scorer.inputs(PROMPTS, TEXTS)
        with torch.no_grad():
            tokens = inputs.tokens.masked_fill(~inputs.token_mask, base.config.pad_token_id)
            logits = adapted(input_ids=tokens, attention_mask=inputs.token_mask.long()).logits[:, 0]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [None, LORA])
def test_images_are_scored_by_clips_own_logit_before_and_after_training(lora, folder_of, tmp_path) -> None:
    policy = image_model(folder_of("clip"), lora=lora)
    samples = pictures()
    before = score(policy, IMAGE_PROMPTS, samples).detach()
    # The processor rounds to 8 bits after each pass of the resize; the scale here is 14.
    expected = plain_image_scores(folder_of("clip"), IMAGE_PROMPTS, samples)
    torch.testing.assert_close(before, expected, rtol=0, atol=0.03)
    assert expected.unique().numel() == 4
    torch.testing.assert_close(score(policy, IMAGE_PROMPTS, samples, budget=1).detach(), before, rtol=0, atol=1e-4)
    train(policy, IMAGE_PROMPTS[:2], samples[:2], samples[2:], steps=3)
    policy.export(tmp_path / "judge")
    after = score(policy, IMAGE_PROMPTS, samples).detach()
    assert (after - before).abs().max() > 0.3
    torch.testing.assert_close(plain_image_scores(tmp_path / "judge", IMAGE_PROMPTS, samples), after, rtol=0, atol=0.03)
    assert (tmp_path / "judge" / "adapter").exists() == (lora is not None)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_few_steps_teach_a_preference_between_texts(lora, folder_of) -> None:
    generator = torch.Generator().manual_seed(0)

    def words(first: str, count: int) -> list[Sample]:
        others = torch.randint(0, 10, (count, 3), generator=generator)
        return [Text(" ".join([first, *("cdefghijkl"[i] for i in row)]), 5, True) for row in others]

    prompts = [Prompt("m", index) for index in range(48)]
    chosen, rejected = words("a", 48), words("b", 48)
    policy = text_model(folder_of("llama"), lora=lora)

    def accuracy() -> float:
        with torch.no_grad():
            margin = score(policy, prompts[32:], chosen[32:]) - score(policy, prompts[32:], rejected[32:])
        return float((margin > 0).float().mean())

    before = accuracy()
    train(policy, prompts[:32], chosen[:32], rejected[:32], steps=25)
    assert before < 0.9 and accuracy() == 1.0


def test_a_few_steps_teach_a_preference_between_images(folder_of) -> None:
    """Dark for one prompt and bright for the other: no score of the image alone can tell."""
    faint = [0.3 * as_image(picture(32, 32, seed)).unit() for seed in range(12)]
    dark, bright = [Image(pixels) for pixels in faint], [Image(pixels + 0.7) for pixels in faint]
    prompts = [Prompt(("night", "day")[seed % 2], seed) for seed in range(12)]
    chosen = [(dark, bright)[seed % 2][seed] for seed in range(12)]
    rejected = [(bright, dark)[seed % 2][seed] for seed in range(12)]
    policy = image_model(folder_of("clip"))

    def accuracy() -> float:
        with torch.no_grad():
            margin = score(policy, prompts[8:], chosen[8:]) - score(policy, prompts[8:], rejected[8:])
        return float((margin > 0).float().mean())

    before = accuracy()
    train(policy, prompts[:8], chosen[:8], rejected[:8], steps=30)
    assert before < 0.9 and accuracy() == 1.0


@pytest.mark.parametrize("lora", [None, LORA])
def test_what_should_train_has_a_gradient_and_nothing_else(lora, folder_of) -> None:
    policy = text_model(folder_of("qwen"), lora=lora)
    train(policy, PROMPTS[2:], TEXTS[2:], TEXTS[:2], steps=1)  # a fresh adapter's first factor has no gradient yet
    gradients = torch.autograd.grad(
        score(policy, PROMPTS, TEXTS).sum(), list(policy.weight_sets.parameters().values()), allow_unused=True
    )
    assert all(gradient is not None and gradient.any() for gradient in gradients)
    names = set(policy.weight_sets.parameters())
    assert "model.model.score.weight" in names
    assert all("lora_" in name or ".score." in name for name in names) == (lora is not None)
    assert all(parameter.dtype == torch.float32 for parameter in policy.weight_sets.parameters().values())
    assert not policy.scorer.training and not any(module.training for module in policy.scorer.modules())


@pytest.mark.parametrize("lora", [None, LORA])
def test_kept_weights_hold_the_head_too(lora, folder_of) -> None:
    policy = text_model(folder_of("llama"), lora=lora)
    policy.keep("reference")
    before = score(policy, PROMPTS, TEXTS).detach()
    saved = {key: value.clone() for key, value in policy.weight_state().items()}
    train(policy, PROMPTS[2:], TEXTS[2:], TEXTS[:2], steps=2)
    assert not torch.allclose(score(policy, PROMPTS, TEXTS).detach(), before, atol=1e-3)
    with policy.using("reference"):
        assert torch.equal(score(policy, PROMPTS, TEXTS).detach(), before)
    policy.load_weight_state(saved)
    assert torch.equal(score(policy, PROMPTS, TEXTS).detach(), before)


def test_frozen_weights_in_bfloat16_keep_a_head_in_float32(folder_of, tmp_path) -> None:
    policy = text_model(folder_of("llama"), lora=LORA, dtype="bfloat16", gradient_checkpointing=True)
    exact = text_model(folder_of("llama"), lora=LORA)
    assert policy.scorer.model.base_model.embed_tokens.weight.dtype == torch.bfloat16
    torch.testing.assert_close(
        score(policy, PROMPTS, TEXTS).detach(), score(exact, PROMPTS, TEXTS).detach(), rtol=0, atol=0.1
    )
    train(policy, PROMPTS[2:], TEXTS[2:], TEXTS[:2], steps=2)
    with pytest.warns(UserWarning, match="half-precision"):
        policy.export(tmp_path)


def test_a_new_head_is_a_function_of_the_seed_and_gives_scores_of_order_one(folder_of) -> None:
    heads = [text_model(folder_of("llama"), seed).scorer.model.score.weight.detach() for seed in (0, *range(12))]
    assert torch.equal(heads[0], heads[1]) and len(torch.cat(heads).unique(dim=0)) == 12
    drawn = torch.cat(heads[1:])
    assert float(drawn.std()) == pytest.approx(17**-0.5, rel=0.2) and float(drawn.mean().abs()) < 0.06


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("name", ["llama", "bert", "clip"])
def test_inspect_counts_what_is_built(name, lora, folder_of) -> None:
    block = ImageTextRewardModelConfig if name == "clip" else TextRewardModelConfig
    config = block(model=str(folder_of(name)), lora=lora)
    policy, summary = config.build("judge", "cpu", 0), config.inspect()
    parameters = list(policy.scorer.parameters())
    assert summary.weights.parameters == sum(p.numel() for p in parameters)
    assert summary.weights.trainable == sum(p.numel() for p in parameters if p.requires_grad) > 0
    assert (summary.sample_kind, summary.decisions) == (policy.sample_kind, policy.decisions())


def test_what_a_reward_model_cannot_do_is_said(folder_of) -> None:
    policy = text_model(folder_of("llama"))
    trajectory = policy.encode(PROMPTS, TEXTS, [SampleKey(0, 0, 0, 0, row) for row in range(4)])
    (cut,) = policy.plan(trajectory, torch.arange(4), 9)
    with pytest.raises(UserError, match=r"'judge' is a reward model and samples nothing; .* learns from records"):
        policy.rollout(trajectory.requests)
    with pytest.raises(ValueError, match="no samples to decode"):
        policy.decode(trajectory)
    with pytest.raises(ValueError, match=r"offers \['log_prob'\], not \['entropy'\]"):
        policy.replay(trajectory, cut, frozenset({"entropy"}))
    with pytest.raises(TypeError, match="given a sample of image"):
        score(policy, PROMPTS[:1], pictures()[:1])
    with pytest.raises(TypeError, match="0 images for 1 prompts"):
        score(image_model(folder_of("clip")), PROMPTS[:1], TEXTS[:1])
    with pytest.raises(UserError, match=r"reads 1 to 64 tokens, but prompt 0 .* have 70"):
        score(policy, PROMPTS[:1], [Text("a " * 66, 0, True)])


def test_wrong_blocks_are_refused(folder_of, tmp_path) -> None:
    llama = str(folder_of("llama"))
    with pytest.raises(ValidationError, match="without `lora` every weight is trained"):
        TextRewardModelConfig(model=llama, dtype="bfloat16")
    with pytest.raises(ValidationError, match="sampling"):
        TextRewardModelConfig(model=llama, sampling={"temperature": 1})
    with pytest.raises(UserError, match=r"is a 'llama' model; an image-text reward model is a CLIP model"):
        image_model(folder_of("llama"))
    model = AutoModelForCausalLM.from_pretrained(llama)
    state = {key: value for key, value in model.state_dict().items() if "layers.1.mlp" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    word_tokenizer(False).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no weights for 3 tensors .*layers\.1\.mlp"):
        text_model(tmp_path)


def test_a_classifier_of_several_classes_gets_a_new_head(folder_of, tmp_path) -> None:
    AutoModelForSequenceClassification.from_pretrained(folder_of("llama"), num_labels=3).save_pretrained(tmp_path)
    word_tokenizer(False).save_pretrained(tmp_path)
    policy = text_model(tmp_path)
    assert policy.scorer.model.score.weight.shape == (1, 16)
    assert torch.equal(policy.scorer.model.score.weight, text_model(folder_of("llama")).scorer.model.score.weight)
