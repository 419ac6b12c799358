"""Joining rollouts of unequal shape and taking rows out of them: nothing that a replay reads is lost or moved."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from denoising_helpers import image_policy
from denoising_helpers import requests as image_requests
from hypothesis import given, settings
from tiny_models_audio import tiny_musicgen
from tiny_models_text import tiny_gpt2
from torch import Tensor

from modalities.audio import AudioPolicyConfig, CodecSampling
from modalities.base import DenoisingSegment, Policy, Request, Segment, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.text import TextPolicyConfig
from modalities.tokens import TokenSampling
from modalities.trajectories import concatenate, load_trajectory, select, trajectory_state


def requests(texts: list[str], iteration: int) -> list[Request]:
    keys = [SampleKey(1, 0, iteration, index, 0) for index in range(len(texts))]
    return [Request(Prompt(text, key.prompt), key.prompt, key) for text, key in zip(texts, keys, strict=True)]


def row_scores(policy: Policy, trajectory: Trajectory) -> Tensor:
    """[B]: each row's log-prob of its trained decisions in the last segment."""
    segment = trajectory.segments[-1]
    total = torch.zeros(segment.num_rows)
    for cut in policy.plan(trajectory, torch.arange(segment.num_rows), 2):
        with torch.no_grad():
            log_prob = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob")
        total[cut.rows] += (log_prob * cut.take(segment.trained_mask)).sum(1)
    return total


def assert_joined_is_its_parts(policy: Policy, parts: list[Trajectory]) -> Trajectory:
    joined = concatenate(parts)
    expected = torch.cat([row_scores(policy, part) for part in parts])
    torch.testing.assert_close(row_scores(policy, joined), expected, rtol=1e-5, atol=1e-5)
    start = 0
    for part in parts:
        rows = start + torch.arange(len(part.requests))
        assert trajectory_text(select(joined, rows)) == trajectory_text(part)
        start += len(rows)
    return joined


def trajectory_text(trajectory: Trajectory) -> str:
    """Everything that the trajectory holds but the number of near ties."""
    segments = [
        replace(segment, near_ties=0) if hasattr(segment, "near_ties") else segment for segment in trajectory.segments
    ]
    with torch._tensor_str.printoptions(profile="full", precision=9):
        return str(trajectory_state(replace(trajectory, segments=segments)))


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    config = {"model": str(tiny_gpt2(tmp_path_factory.mktemp("gpt2")))}
    return TextPolicyConfig.model_validate(config).build("writer", "cpu", 0)


def test_texts_of_unequal_length(writer: Policy) -> None:
    parts = [
        writer.rollout(requests(["a b c d e", "a"], 0), TokenSampling(max_new_tokens=3)),
        writer.rollout(requests(["b"], 1), TokenSampling(max_new_tokens=8)),
        writer.rollout(requests(["a b"], 2), TokenSampling(max_new_tokens=1)),
    ]
    writer.set_version(4)
    parts.append(writer.rollout(requests(["c a b"], 3), TokenSampling(max_new_tokens=5)))
    joined = assert_joined_is_its_parts(
        writer, [replace(parts[3], segments=[replace(parts[3].segments[0], version=0)]), *parts[:3]]
    )
    segment = joined.segments[0]
    assert isinstance(segment, TokenSegment)
    assert segment.num_steps == max(part.segments[0].num_steps for part in parts)
    assert len({part.segments[0].num_steps for part in parts}) > 1
    assert concatenate([parts[3], parts[0]]).segments[0].version == 0  # the oldest
    assert segment.near_ties == sum(part.segments[0].near_ties for part in parts)  # type: ignore[attr-defined]


def test_sounds_of_unequal_length(tmp_path: Path) -> None:
    policy = AudioPolicyConfig.model_validate({"model": str(tiny_musicgen(tmp_path))}).build("singer", "cpu", 0)
    parts = [policy.rollout(requests(["a b c d", "a"], n), CodecSampling(frames=n)) for n in (2, 4, 2)]
    joined = assert_joined_is_its_parts(policy, parts)
    found, expected = policy.decode(joined), [sample for part in parts for sample in policy.decode(part)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.waveform, theirs.waveform)  # type: ignore[union-attr]
    assert len({sample.waveform.shape for sample in found}) == 2  # type: ignore[union-attr]


def test_latents_of_other_windows_and_guidance(stable_diffusion_3_folder: Path) -> None:
    """A row's state that only other rows' samplers visited is NaN, and no replay reads it."""
    policy = image_policy(stable_diffusion_3_folder, max_sequence_length=8)
    early, late = ({"window": {"steps": steps}} for steps in ([0, 0], [1, 2]))
    plain = {"guidance_scale": 1.0}
    parts = [
        policy.rollout(image_requests(2), policy.sampling.model_validate(policy.sampling.model_dump() | changed))
        for changed in (early, late, plain)
    ]
    joined = assert_joined_is_its_parts(policy, parts)
    segment = joined.segments[0]
    assert isinstance(segment, DenoisingSegment)
    assert segment.states[3][:2].isnan().all()
    assert segment.states[3][2:].isfinite().all()
    assert (segment.negative_index >= 0).tolist() == [True] * 4 + [False] * 2


def tokens_of(lengths: list[int], prompts: list[list[int]], prompt_index: list[int], **fields: Any) -> Trajectory:
    """Rows of made-up tokens."""
    exists = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    keys = [SampleKey(0, 0, 0, row, 0) for row in range(len(lengths))]
    width = max(map(len, prompts))
    shared = {"log_prob_unit": "token", "version": 0, "ended": ["eos"] * len(keys), "keys": keys, "agent": "writer"}
    segment = TokenSegment(
        group=torch.arange(len(keys)),
        rollout_log_probs=-torch.rand(exists.shape) * exists,
        trained_mask=exists,
        length_mask=exists,
        context_mask=~exists & False,
        tokens=torch.randint(1, 9, exists.shape) * exists,
        prompt_tokens=torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        prompt_mask=torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in prompts]),
        prompt_index=torch.tensor(prompt_index),
        **(shared | fields),  # type: ignore[arg-type]
    )
    return Trajectory([segment], [Request(Prompt(str(row), row), row, key) for row, key in enumerate(keys)])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=4), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_every_row_keeps_its_tokens_and_its_prompt(parts: list[list[tuple[int, int]]], random: Any) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    trajectories = [tokens_of([length for length, _ in part], prompts, [index for _, index in part]) for part in parts]
    flat = [row for part in parts for row in part]
    chosen = [random.randrange(len(flat)) for _ in range(4)]
    joined = concatenate(trajectories)
    taken = select(joined, torch.tensor(chosen)).segments[0]
    assert isinstance(taken, TokenSegment)
    assert taken.num_steps == max(flat[row][0] for row in chosen)
    assert taken.prompt_tokens.shape[1] == max(len(prompts[flat[row][1]]) for row in chosen)
    rows = [row for part in trajectories for row in part.segments[0].tokens]  # type: ignore[attr-defined]
    for place, row in enumerate(chosen):
        length, prompt = flat[row]
        assert torch.equal(taken.tokens[place][taken.length_mask[place]], rows[row][:length])
        own = taken.prompt_index[place]
        assert taken.prompt_tokens[own][taken.prompt_mask[own]].tolist() == prompts[prompt]


def test_descendants_follow_their_root() -> None:
    """Segments of a chain, one of them without parents: its rows continue those before it one by one."""
    first, second, third = (tokens_of([2] * rows, [[1]], [0] * rows).segments[0] for rows in (2, 4, 4))
    second.parent = torch.tensor([0, 0, 1, 1])
    requests_of = [
        [Request(Prompt(f"{n}{row}", row), row, SampleKey(0, 0, 0, row, n)) for row in range(n)] for n in (2, 4, 4)
    ]
    trajectory = Trajectory([first, second, third], requests_of[0], requests_of)
    joined = concatenate([trajectory, trajectory])
    assert joined.roots(2).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    taken = select(joined, torch.tensor([3, 0]))
    assert taken.roots(1).tolist() == taken.roots(2).tolist() == [0, 0, 1, 1]
    assert [request.prompt.text for request in taken.part_requests[2]] == ["42", "43", "40", "41"]
    assert taken.segments[2].group.tolist() == [2, 3, 0, 1]


def test_no_row_can_be_selected() -> None:
    taken = select(tokens_of([2, 3], [[1]], [0, 0]), torch.zeros(0, dtype=torch.long))
    assert (taken.segments[0].num_rows, taken.requests) == (0, [])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"agent": "other"}, "agent"),
        ({"log_prob_unit": "nats"}, "log_prob_unit"),
    ],
)
def test_rows_that_a_replay_could_not_tell_apart_are_refused(changed: dict[str, Any], message: str) -> None:
    one, other = tokens_of([2], [[1]], [0]), tokens_of([2], [[1]], [0], **changed)
    with pytest.raises(ValueError, match=f"different {message}"):
        concatenate([one, other])


def test_latents_of_unequal_shape_are_refused(stable_diffusion_3_folder: Path) -> None:
    policy = image_policy(stable_diffusion_3_folder, max_sequence_length=8)
    plain = policy.rollout(image_requests(1))
    for changed in ({"steps": 3}, {"height": 32}):
        other = policy.rollout(image_requests(1), policy.sampling.model_copy(update=changed))
        with pytest.raises(ValueError, match="have shapes"):
            concatenate([plain, other])
    with pytest.raises(ValueError, match="kinds"):
        concatenate([plain, tokens_of([2], [[1]], [0])])
    with pytest.raises(ValueError, match="no trajectory"):
        concatenate([])


@dataclass
class UnknownSegment(Segment):
    """A segment whose extra field does not say what it belongs to."""

    extra: Tensor = field(default_factory=lambda: torch.zeros(1))


def test_a_field_that_does_not_state_its_layout_is_refused() -> None:
    plain = tokens_of([2], [[1]], [0]).segments[0]
    names = ("agent", "group", "rollout_log_probs", "trained_mask", "length_mask", "context_mask", "log_prob_unit")
    segment = UnknownSegment(*(getattr(plain, name) for name in (*names, "version", "ended", "keys")))
    with pytest.raises(TypeError, match=r"UnknownSegment\.extra"):
        concatenate([Trajectory([segment], [])])


def test_what_cannot_be_saved_or_loaded_is_named() -> None:
    trajectory = tokens_of([2], [[1]], [0])
    picture = Prompt("a", 7, record={"reference": object()})
    with pytest.raises(TypeError, match="record of prompt 7 holds a object"):
        trajectory_state(replace(trajectory, requests=[replace(trajectory.requests[0], prompt=picture)]))
    state = trajectory_state(trajectory)
    state["segments"][0]["class"] = "os.system"
    with pytest.raises(ValueError, match=r"os\.system"):
        load_trajectory(state)


def test_a_prompt_of_many_rows_is_saved_once() -> None:
    trajectory = tokens_of([2, 2], [[1]], [0, 0])
    prompt = Prompt("a", 0, record={"page": "x" * 100, "tags": ("a", 1, None)})
    trajectory.requests = [replace(request, prompt=prompt) for request in trajectory.requests]
    state = trajectory_state(trajectory)
    assert len(state["prompts"]) == 1
    loaded = load_trajectory(state)
    assert loaded.requests[0].prompt is loaded.requests[1].prompt
    assert loaded.requests[0].prompt.record == {"page": "x" * 100, "tags": ["a", 1, None]}
