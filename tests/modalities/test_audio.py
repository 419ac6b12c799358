"""The audio policy against transformers' own generation, and what is special about several codebooks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models_audio import tiny_musicgen
from tiny_models_text import tiny_gpt2
from transformers import AutoTokenizer, MusicgenForConditionalGeneration

from modalities.audio import AudioPolicy, AudioPolicyConfig, CodecSampling, CodecSegment
from modalities.base import Cut, Request, Trajectory
from modalities.codec_tokens import delay_pattern, delays
from modalities.errors import UserError
from modalities.randomness import SampleKey
from modalities.samples import Audio, Prompt

TEXTS = ["a", "drum and bass", "slow song"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda channels: tiny_musicgen(tmp_path_factory.mktemp("musicgen"), channels))


def policy_from(folder: Path, **settings: Any) -> AudioPolicy:
    return AudioPolicyConfig(model=str(folder), **settings).build("music", "cpu", seed=0)


def requests(samples: int = 1) -> list[Request]:
    return [
        Request(Prompt(text, index), index, SampleKey(1, 0, 0, index, sample))
        for index, text in enumerate(TEXTS)
        for sample in range(samples)
    ]


def segment_of(trajectory: Trajectory) -> CodecSegment:
    segment = trajectory.segments[0]
    assert isinstance(segment, CodecSegment)
    return segment


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_greedy_sound_is_that_of_generate(folder_of: Any, channels: int, guidance_scale: float) -> None:
    """transformers generates with its own delay pattern, cache and guidance; the waveforms are equal."""
    policy, frames = policy_from(folder_of(channels)), 6
    sampling = CodecSampling(frames=frames, temperature=0, guidance_scale=guidance_scale)
    trajectory = policy.rollout(requests(), sampling)
    assert not segment_of(trajectory).trained_mask.any()
    sounds = policy.decode(trajectory)
    plain = MusicgenForConditionalGeneration.from_pretrained(folder_of(channels))
    inputs = AutoTokenizer.from_pretrained(folder_of(channels))(TEXTS, return_tensors="pt", padding=True)
    expected = plain.generate(
        **inputs, do_sample=False, guidance_scale=guidance_scale, max_length=frames + policy.num_codebooks // channels
    )
    assert expected.shape == (len(TEXTS), channels, frames * 16)
    assert not torch.equal(expected[0], expected[1])
    for sound, wave in zip(sounds, expected, strict=True):
        assert isinstance(sound, Audio)
        assert sound.sampling_rate == 1000
        assert torch.allclose(sound.waveform, wave.clamp(-1, 1), atol=1e-6)


@pytest.mark.parametrize(("frames", "codebooks", "channels"), [(5, 4, 1), (4, 4, 2), (7, 1, 1), (9, 8, 2)])
def test_the_delay_pattern_is_that_of_transformers(folder_of: Any, frames: int, codebooks: int, channels: int) -> None:
    decoder = MusicgenForConditionalGeneration.from_pretrained(folder_of(1)).decoder
    decoder.num_codebooks, decoder.config.audio_channels = codebooks, channels
    start = torch.full((codebooks, 1), 32)
    _, mask = decoder.build_delay_pattern_mask(start, pad_token_id=32, max_length=frames + codebooks // channels)
    ours = delay_pattern(frames, delays(codebooks, channels))
    assert torch.equal(ours.T, mask[:, 1:] == -1)
    assert ours.sum() == frames * codebooks


def test_forced_entries_are_no_decisions(folder_of: Any) -> None:
    policy = policy_from(folder_of(1), sampling={"frames": 3})
    segment = segment_of(policy.rollout(requests()))
    assert segment.tokens.shape == (3, (3 + 3) * 4)
    assert torch.equal(segment.trained_mask, segment.length_mask)
    assert (segment.length_mask.sum(1) == 3 * 4).all()
    forced = ~segment.length_mask
    assert (segment.tokens[forced] == 32).all() and (segment.tokens[~forced] < 32).all()
    assert (segment.rollout_log_probs[forced] == 0).all() and (segment.rollout_log_probs[~forced] < 0).all()


def test_codes_come_back_out_of_the_pattern(folder_of: Any) -> None:
    policy = policy_from(folder_of(2), sampling={"frames": 3})
    segment = segment_of(policy.rollout(requests()))
    codes = torch.stack(policy.codes(segment))
    assert codes.shape == (3, 8, 3)
    for codebook in range(8):
        for frame in range(3):
            column = frame + codebook // 2
            assert torch.equal(codes[:, codebook, frame], segment.tokens[:, column * 8 + codebook])


@pytest.mark.parametrize("guidance_scale", [1.0, 2.5])
def test_replay_scores_a_decision_by_the_whole_models_logits(folder_of: Any, guidance_scale: float) -> None:
    """The oracle is one plain forward pass of the whole model over the delayed columns, per row."""
    policy = policy_from(folder_of(1), sampling={"frames": 4, "guidance_scale": guidance_scale, "temperature": 0.8})
    trajectory = policy.rollout(requests(2))
    segment = segment_of(trajectory)
    cut = Cut(0, torch.tensor([3, 0, 5]), slice(5, 17))
    replay = policy.replay(trajectory, cut, frozenset({"log_prob", "entropy", "features"}))
    plain = MusicgenForConditionalGeneration.from_pretrained(folder_of(1))
    tokenizer = AutoTokenizer.from_pretrained(folder_of(1))
    for position, row in enumerate(cut.rows.tolist()):
        inputs = tokenizer(trajectory.requests[row].prompt.text, return_tensors="pt")
        columns = torch.cat([torch.full((4, 1), 32), segment.tokens[row].view(-1, 4).T], dim=1)
        with torch.no_grad():
            logits = plain(**inputs, decoder_input_ids=columns).logits
            states = torch.zeros(1, 1, 32)
            nothing = plain(
                encoder_outputs=(states,), attention_mask=torch.zeros(1, 1).long(), decoder_input_ids=columns
            ).logits
        guided = nothing + guidance_scale * (logits - nothing)
        choices = torch.distributions.Categorical(logits=guided[:, :-1].transpose(0, 1) / 0.8)
        exists = segment.length_mask[row].view(-1, 4)
        tokens = segment.tokens[row].view(-1, 4).clamp_max(31)
        log_probs = torch.where(exists, choices.log_prob(tokens), 0.0).flatten()[cut.steps]
        entropy = torch.where(exists, choices.entropy(), 0.0).flatten()[cut.steps]
        assert torch.allclose(replay.of("log_prob")[position], log_probs, atol=2e-5)
        assert torch.allclose(replay.of("entropy")[position], entropy, atol=2e-5)
    assert replay.of("features").shape == (3, 12, policy.feature_size)
    log_prob = replay.of("log_prob")
    assert torch.allclose(log_prob, cut.take(segment.rollout_log_probs), atol=2e-5)
    log_prob.sum().backward()
    assert all(p.grad is not None for p in policy.model.parameters() if p.requires_grad)


def test_a_longer_sound_begins_like_a_shorter_one(folder_of: Any) -> None:
    """Decisions that both make come from the same numbers: those of the first codebook and what it shares."""
    policy = policy_from(folder_of(1))
    short, long = (segment_of(policy.rollout(requests(), CodecSampling(frames=frames))) for frames in (3, 6))
    assert torch.equal(torch.stack(policy.codes(short))[:, 0], torch.stack(policy.codes(long))[:, 0, :3])


def test_the_text_encoder_runs_once_per_prompt(folder_of: Any) -> None:
    policy = policy_from(folder_of(1), sampling={"frames": 2})
    rows: list[int] = []
    policy.musicgen.text_encoder.register_forward_hook(lambda _module, _in, out: rows.append(len(out[0])))
    trajectory = policy.rollout(requests(4))
    assert sum(rows) == len(TEXTS)
    policy.replay(trajectory, Cut(0, torch.arange(12), slice(0, 20)), frozenset({"log_prob"}))
    assert sum(rows) == len(TEXTS)


def test_the_adapter_trains_the_decoder_alone_and_full_training_the_projection_too(folder_of: Any) -> None:
    for settings, wanted in (({"lora": {"rank": 2}}, {"decoder"}), ({}, {"decoder", "enc_to_dec_proj"})):
        config = AudioPolicyConfig(model=str(folder_of(1)), **settings)
        policy = config.build("music", "cpu", seed=0)
        trained = {n.split(".")[0] for n, p in policy.musicgen.named_parameters() if p.requires_grad}
        assert trained == wanted
        summary = config.inspect()
        assert summary.weights.parameters == sum(p.numel() for p in policy.musicgen.parameters())
        assert summary.weights.trainable == sum(p.numel() for p in policy.weight_sets.parameters().values())


def test_mistakes_are_named(folder_of: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a gpt2 model; an audio policy takes a musicgen model"):
        policy_from(tiny_gpt2(tmp_path))
    with pytest.raises(ValueError, match="top_k: 250 samples from a truncated distribution"):
        policy_from(folder_of(1), sampling={"top_k": 250})
    with pytest.raises(ValueError, match=r"dtype: bfloat16 .* without `lora` every weight is trained, in float32"):
        policy_from(folder_of(1), dtype="bfloat16")
    policy = policy_from(folder_of(1), sampling={"frames": 2})
    with pytest.raises(ValueError, match="cannot be differentiable"):
        policy.decode(policy.rollout(requests()), differentiable=True)
