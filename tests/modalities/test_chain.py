"""A chain delegates to its parts: its segments are what the parts make and score by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models_diffusion import tiny_stable_diffusion_3
from tiny_models_text import tiny_qwen
from transformers import AutoModelForCausalLM

from modalities.base import Cut, Policy, Request, Trajectory
from modalities.chain import ChainPolicy, ChainPolicyConfig, ChainSampling
from modalities.errors import UserError
from modalities.image import ImagePolicyConfig
from modalities.randomness import SampleKey
from modalities.samples import Image, Prompt
from modalities.text import TextPolicyConfig

LORA = {"rank": 2}
LOG_PROB = frozenset({"log_prob"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("chain")
    return tiny_qwen(folder / "text"), tiny_stable_diffusion_3(folder / "image", with_t5=False)


def build_parts(folders: tuple[Path, Path]) -> tuple[Policy, Policy]:
    text = {"model": str(folders[0]), "lora": LORA, "sampling": {"max_new_tokens": 4}}
    image = {"model": str(folders[1]), "lora": LORA, "sampling": {"steps": 3}}
    return (
        TextPolicyConfig.model_validate(text).build("writer", "cpu", 0),
        ImagePolicyConfig.model_validate(image).build("painter", "cpu", 0),
    )


@pytest.fixture(scope="module")
def parts(folders: tuple[Path, Path]) -> tuple[Policy, Policy]:
    return build_parts(folders)


def chain_of(parts: tuple[Policy, Policy], **settings: Any) -> ChainPolicy:
    return ChainPolicyConfig(parts=["writer", "painter"], **settings).join("both", parts)


def requests() -> list[Request]:
    return [
        Request(Prompt(text, index, record={"answer": text}), 10 + index, SampleKey(1, 0, 0, index, sample))
        for index, text in enumerate(["a b", "c"])
        for sample in range(2)
    ]


def rolled_out(chain: ChainPolicy, sampling: ChainSampling | None = None) -> Trajectory:
    return chain.rollout(requests(), sampling)


def test_both_parts_make_what_they_make_by_themselves(parts: tuple[Policy, Policy]) -> None:
    chain = chain_of(parts, sampling={"branch": 3})
    trajectory = rolled_out(chain)
    texts, images = trajectory.segments
    assert (texts.num_rows, images.num_rows) == (4, 12)
    assert [segment.agent for segment in trajectory.segments] == ["writer", "painter"]
    assert images.parent is not None and images.parent.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    alone = parts[0].rollout(requests())
    assert torch.equal(alone.segments[0].tokens, texts.tokens)
    written = [text.text for text in parts[0].decode(alone)]
    assert [request.prompt.text for request in trajectory.part_requests[1]] == [t for t in written for _ in range(3)]
    drawn = parts[1].rollout(trajectory.part_requests[1])
    assert torch.equal(drawn.segments[0].final_latents, images.final_latents)


def test_the_reward_sees_the_users_prompt_and_the_image(parts: tuple[Policy, Policy]) -> None:
    chain = chain_of(parts)
    trajectory = rolled_out(chain)
    samples, prompts = chain.decode(trajectory), trajectory.leaf_prompts()
    assert len(samples) == len(prompts) == 8
    assert all(isinstance(sample, Image) for sample in samples)
    assert [prompt.text for prompt in prompts] == ["a b"] * 4 + ["c"] * 4
    assert prompts[0].record == {"answer": "a b"}
    assert [request.prompt.record for request in trajectory.part_requests[1]] == [prompt.record for prompt in prompts]


def test_random_numbers_of_the_segments_have_nothing_in_common(parts: tuple[Policy, Policy]) -> None:
    trajectory = rolled_out(chain_of(parts, sampling={"branch": 2}))
    keys = [key for segment in trajectory.segments for key in segment.keys]
    assert len(set(keys)) == len(keys)
    assert {key.segment for key in trajectory.segments[1].keys} == {1}
    assert len(trajectory.segments[1].final_latents.unique(dim=0)) == 8


def test_images_are_compared_within_the_prompt_or_within_the_text(parts: tuple[Policy, Policy]) -> None:
    by_prompt = rolled_out(chain_of(parts)).segments
    assert by_prompt[1].group.tolist() == [10] * 4 + [11] * 4
    by_text = rolled_out(chain_of(parts, second_groups="rewrite")).segments
    assert by_text[0].group.tolist() == [10, 10, 11, 11]
    _, sizes = by_text[1].group.unique(return_counts=True)
    assert sizes.tolist() == [2, 2, 2, 2]
    assert torch.equal(by_text[1].group[::2], by_text[1].group[1::2])


def test_a_cut_is_scored_by_the_part_that_made_it(parts: tuple[Policy, Policy]) -> None:
    chain = chain_of(parts)
    trajectory = rolled_out(chain)
    seen = []
    for cut in chain.plan(trajectory, torch.tensor([0, 3]), budget=3):
        own = Trajectory([trajectory.segments[cut.segment]], trajectory.part_requests[cut.segment])
        expected = parts[cut.segment].replay(own, Cut(0, cut.rows, cut.steps), LOG_PROB).of("log_prob")
        found = chain.replay(trajectory, cut, LOG_PROB).of("log_prob")
        assert torch.equal(found, expected)
        assert set(trajectory.roots(cut.segment)[cut.rows].tolist()) <= {0, 3}
        seen.append((cut.segment, sorted(cut.rows.tolist())))
    assert {segment for segment, _ in seen} == {0, 1}
    assert {row for segment, rows in seen if segment == 1 for row in rows} == {0, 1, 6, 7}


def test_sampling_replaces_keys_of_the_parts(parts: tuple[Policy, Policy]) -> None:
    chain = chain_of(parts)
    sampling = ChainSampling(branch=1, first={"max_new_tokens": 2}, second={"steps": 5, "sampler": {"type": "ode"}})
    texts, images = rolled_out(chain, sampling).segments
    assert texts.num_steps <= 2
    assert (images.num_rows, images.num_steps) == (4, 5)
    assert not images.trained_mask.any()


def test_weights_are_the_parts_own(folders: tuple[Path, Path], tmp_path: Path) -> None:
    parts = build_parts(folders)
    chain = chain_of(parts)
    assert set(chain.trainable_modules()) == {"writer_model", "painter_denoiser"}
    trajectory = rolled_out(chain)
    cut = Cut(0, torch.arange(4), slice(0, trajectory.segments[0].num_steps))
    before = chain.replay(trajectory, cut, LOG_PROB).of("log_prob").detach()
    chain.keep("reference")
    with torch.no_grad():
        for parameter in parts[0].weight_sets.parameters().values():
            parameter += 0.3
    after = chain.replay(trajectory, cut, LOG_PROB).of("log_prob").detach()
    assert not torch.allclose(before, after)
    with chain.using("reference"):
        assert torch.allclose(chain.replay(trajectory, cut, LOG_PROB).of("log_prob"), before)
    chain.export(tmp_path)
    assert (tmp_path / "painter" / "model_index.json").exists()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "writer")
    again = TextPolicyConfig(model=str(tmp_path / "writer")).build("writer", "cpu", 0)
    assert exported.num_parameters() == again.model.causal_lm.num_parameters()
    assert torch.allclose(again.replay(trajectory.part(0), cut, LOG_PROB).of("log_prob"), after, atol=1e-5)


def test_versions_reach_both_segments(parts: tuple[Policy, Policy]) -> None:
    chain = chain_of(parts)
    chain.set_version(3)
    assert [segment.version for segment in rolled_out(chain).segments] == [3, 3]


def test_mistakes_are_named(parts: tuple[Policy, Policy]) -> None:
    writer, painter = parts
    with pytest.raises(UserError, match="parts: 'writer' makes image; the first part must be a text policy"):
        chain_of((painter, painter))
    with pytest.raises(UserError, match="parts: 'painter' is a chain itself"):
        chain_of((writer, chain_of(parts)))
    with pytest.raises(ValueError, match="names the same policy twice"):
        ChainPolicyConfig(parts=["writer", "writer"])
    with pytest.raises(ValueError, match=r"sampling\.branch must be >= 2"):
        ChainPolicyConfig(parts=["writer", "painter"], second_groups="rewrite", sampling={"branch": 1})
    with pytest.raises(UserError, match=r"sampling\.second\.stepz: .* \(policy 'painter'\)"):
        chain_of(parts, sampling={"second": {"stepz": 3}})
