"""Streams: one global sequence, whoever reads which part of it and whenever it was interrupted."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modalities.errors import UserError
from modalities.randomness import seeded_generator
from modalities.samples import Prompt
from uniml_rl.data.streams import SOURCE_STRIDE, DrawnPrompt, MixedPromptStream, PromptStream, RecordPromptStream

FEW = settings(max_examples=40, deadline=None)


def records(size: int, seed: int = 0, shuffle: bool = True, fingerprint: str = "same") -> RecordPromptStream:
    return RecordPromptStream(size, lambda i: Prompt(f"prompt {i}", 100 + i), seed, shuffle, fingerprint, "test data")


def mixture(sizes: list[int], shares: list[float]) -> MixedPromptStream:
    return MixedPromptStream([records(size, seed) for seed, size in enumerate(sizes)], shares)


def streams() -> st.SearchStrategy[tuple]:
    """Makers of equal streams, so that a test can build the same stream twice."""
    sizes = st.integers(1, 7)
    single = st.tuples(st.just("single"), sizes, st.booleans())
    mixed = st.tuples(st.just("mixed"), st.lists(sizes, min_size=2, max_size=3), st.integers(1, 9))
    return st.one_of(single, mixed)


def make(recipe: tuple) -> PromptStream:
    if recipe[0] == "single":
        return records(recipe[1], seed=3, shuffle=recipe[2])
    return mixture(recipe[1], [recipe[2], *([2.0] * (len(recipe[1]) - 1))])


@FEW
@given(streams(), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 6))
def test_a_stream_resumed_anywhere_continues_exactly(recipe: tuple, counts: list[int], stop: int) -> None:
    uninterrupted = make(recipe)
    expected = [uninterrupted.take(count) for count in counts]
    before, after = make(recipe), make(recipe)
    got = [before.take(count) for count in counts[:stop]]
    after.load_state_dict(before.state_dict())
    got += [after.take(count) for count in counts[stop:]]
    assert got == expected
    assert (after if counts[stop:] else before).state_dict() == uninterrupted.state_dict()


@FEW
@given(streams(), st.lists(st.integers(0, 11), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_shares_are_the_global_list_and_nearly_equal(recipe: tuple, counts: list[int], world: int) -> None:
    alone, ranks = make(recipe), [make(recipe) for _ in range(world)]
    for count in counts:
        shares = [stream.take(count, rank, world) for rank, stream in enumerate(ranks)]
        assert [prompt for share in shares for prompt in share] == alone.take(count)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(stream.state_dict() == alone.state_dict() for stream in ranks)


@FEW
@given(st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_epoch_visits_every_record_once_however_it_is_cut(size: int, seed: int, counts: list[int]) -> None:
    stream, drawn = records(size, seed), []
    while len(drawn) < 3 * size:
        drawn += [prompt.index for prompt in stream.take(counts[len(drawn) % len(counts)])]
    for epoch in range(3):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(100, 100 + size))


def test_epochs_and_seeds_have_orders_of_their_own_and_no_shuffle_keeps_the_files_order() -> None:
    orders = {tuple(p.index for p in records(30, seed).take(30)) for seed in range(4)}
    stream = records(30, 0)
    orders |= {tuple(p.index for p in stream.take(30)) for _ in range(4)}
    assert len(orders) == 4 + 4 - 1  # seed 0's first epoch is in both
    assert [p.index for p in records(3, shuffle=False).take(7)] == [100, 101, 102, 100, 101, 102, 100]


@FEW
@given(streams(), st.integers(0, 20), st.integers(0, 20))
def test_prompt_and_repeat_name_an_occurrence_within_one_batch(recipe: tuple, skipped: int, count: int) -> None:
    stream = make(recipe)
    stream.take(skipped)
    batch = stream.take(count)
    assert len({(prompt.index, prompt.repeat) for prompt in batch}) == count
    for index, occurrences in Counter(prompt.index for prompt in batch).items():
        assert sorted(p.repeat for p in batch if p.index == index) == list(range(occurrences))


def test_first_is_fixed_and_moves_nothing() -> None:
    stream = records(5)
    before = stream.state_dict()
    assert [p.index for p in stream.first(3)] == [100, 101, 102] == [p.index for p in stream.first(3)]
    assert len(stream.first(9)) == 5
    assert stream.state_dict() == before


@FEW
@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.integers(1, 200), st.integers(0, 50))
def test_a_mixture_keeps_its_shares_in_every_stretch(weights: list[int], length: int, start: int) -> None:
    stream = mixture([5] * len(weights), [float(weight) for weight in weights])
    stream.take(start)
    counts = Counter(prompt.source for prompt in stream.take(length))
    for source, weight in enumerate(weights):
        # Each prefix is off by less than the number of streams, so a stretch by less than twice that.
        assert abs(counts[source] - length * weight / sum(weights)) < 2 * len(weights)


def test_two_streams_are_mixed_to_within_one_prompt_of_their_shares() -> None:
    for share in (0.05, 0.25, 0.5, 0.9):
        sources = [prompt.source for prompt in mixture([7, 7], [1 - share, share]).take(400)]
        for length in range(1, 401):
            assert abs(sum(sources[:length]) - share * length) <= 1


def test_a_mixture_tags_sources_and_keeps_indices_apart() -> None:
    batch = mixture([3, 3], [0.5, 0.5]).take(6)
    assert {(p.source, p.index) for p in batch} == {(s, s * SOURCE_STRIDE + 100 + i) for s in (0, 1) for i in range(3)}
    alone = records(3, seed=0).take(3)
    assert [p for p in batch if p.source == 0] == alone, "source 0 is the stage's own data, unchanged"
    assert [p.index for p in mixture([3, 3], [0.5, 0.5]).first(5)] == [100, 101, 102]
    assert isinstance(batch[0], DrawnPrompt)


def test_changed_data_is_refused_on_resume() -> None:
    state = records(5).state_dict()
    for changed in (records(6), records(5, fingerprint="other")):
        with pytest.raises(UserError, match="test data"):
            changed.load_state_dict(state)
    with pytest.raises(UserError, match="2 prompt streams"):
        mixture([3, 3, 3], [1, 1, 1]).load_state_dict(mixture([3, 3], [1, 1]).state_dict())


def test_impossible_shares_are_errors() -> None:
    for count, rank, world in ((-1, 0, 1), (3, 2, 2), (3, -1, 2)):
        with pytest.raises(ValueError, match="share"):
            records(3).take(count, rank, world)
    for shares in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive shares"):
            mixture([3, 3], shares)
    with pytest.raises(ValueError, match="cannot be mixed again"):
        MixedPromptStream([records(3), mixture([3, 3], [1, 1])], [1, 1])
    with pytest.raises(ValueError, match="no prompts"):
        records(0)


def test_a_seed_beyond_64_bits_is_a_mistake_of_the_user() -> None:
    with pytest.raises(UserError, match="seed: 1180591620717411303424 does not fit"):
        seeded_generator(2**70, 0)
