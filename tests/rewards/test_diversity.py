"""Diversity of sets, against counting by hand and all pairs one by one."""

import itertools
import math

import pytest
import scipy.spatial.distance
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.diversity import distinct_n, group_distinct_n, mean_pairwise_distance


def test_distinct_n_counts_over_the_set_and_never_across_texts():
    assert distinct_n(["a b", "A, b!"], 1) == 0.5
    assert distinct_n(["a b", "b a"], 2) == 1.0
    assert distinct_n(["a b c", "a b d"], 2) == 3 / 4
    assert math.isnan(distinct_n(["a", ""], 2)) and math.isnan(distinct_n([], 1))


def test_equal_texts_halve_distinct_n_whatever_they_say():
    text = "seven different words stand in this text"
    assert distinct_n([text], 2) == 1.0
    assert distinct_n([text] * 4, 2) == 0.25


def test_group_distinct_n_is_the_mean_over_groups_that_have_ngrams():
    texts, groups = ["a b", "c", "a b", "x y z", "q"], [5, 7, 5, 9, 7]
    assert group_distinct_n(texts, groups, 2) == pytest.approx((0.5 + 1.0) / 2)
    assert math.isnan(group_distinct_n(["a"], [0], 2))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(2, 6), seed=st.integers(0, 99))
def test_pairwise_distance_is_the_mean_over_all_pairs(rows, seed):
    features = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
    pairs = list(itertools.combinations(features.numpy(), 2))
    expected = sum(scipy.spatial.distance.cosine(*pair) for pair in pairs) / len(pairs)
    assert mean_pairwise_distance(features) == pytest.approx(expected, abs=1e-6)


def test_pairwise_distance_of_equal_rows_is_zero_and_of_one_row_unknown():
    assert mean_pairwise_distance(torch.ones(3, 4)) == pytest.approx(0, abs=1e-12)
    assert math.isnan(mean_pairwise_distance(torch.ones(1, 4)))
