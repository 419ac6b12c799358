"""Distributions over all sequences of T tokens out of V, computed by listing them: NumPy, float64.

A policy is a table of logits [P, N, V]: for each of P prompts and each of the N = 1 + V + ... + V^(T-1) prefixes the
logits of the next token. Prefixes are numbered by length and then as numbers to the base V, and so are the sequences.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scale = Literal["none", "group_mean", "group_std"]


@dataclass(frozen=True)
class Sequences:
    """All V^T sequences."""

    vocabulary: int
    length: int

    @property
    def tokens(self) -> NDArray[np.int64]:
        """[V^T, T] int64."""
        return np.array(list(itertools.product(range(self.vocabulary), repeat=self.length)), dtype=np.int64)

    @property
    def prefixes(self) -> NDArray[np.int64]:
        """[V^T, T] int64: the number of the prefix before each token."""
        places, number, first = [], np.zeros(self.vocabulary**self.length, dtype=np.int64), 0
        for step in range(self.length):
            places.append(first + number)
            number = number * self.vocabulary + self.tokens[:, step]
            first += self.vocabulary**step
        return np.stack(places, axis=1)

    @property
    def num_prefixes(self) -> int:
        """N."""
        return sum(self.vocabulary**step for step in range(self.length))

    def log_probs(self, logits: Array) -> Array:
        """[P, V^T] of a table of logits [P, N, V]."""
        return _log_softmax(logits)[:, self.prefixes, self.tokens].sum(2)

    def levels(self) -> list[slice]:
        """The prefixes of each length 0 ... T - 1."""
        ends = list(itertools.accumulate(self.vocabulary**step for step in range(self.length)))
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def divergence(log_p: Array, log_q: Array) -> Array:
    """[P]: KL(p || q) in nats of distributions given as log-probabilities [P, V^T]."""
    return (np.exp(log_p) * (log_p - log_q)).sum(1)


def tilted(reference: Array, rewards: Array, beta: float) -> Array:
    """log of pi_ref exp(r / beta) / Z, [P, V^T]: the maximum of E[r] - beta KL(pi || pi_ref) over all distributions."""
    return _log_softmax(reference + rewards / beta)


def preferred(
    start: Array, strengths: NDArray[np.int64], pairs: list[tuple[int, int]], loss: str, beta: float
) -> Array:
    """log pi [P, V^T] of least preference loss, where x is preferred over y with probability w_x / (w_x + w_y).

    With h = log pi - start, the logistic loss of beta (h_x - h_y) is least where that is log(w_x / w_y), the odds'
    logarithm. The square loss of h_x - h_y - 1 / (2 beta) asks every pair for (2 p - 1) / (2 beta) at once; h is the
    least-squares answer, a pair counting as often as it occurs in the data (its strengths over their common divisor).
    """
    if loss == "logistic":
        return _log_softmax(start + np.log(strengths) / beta)
    result = np.empty_like(start)
    for prompt, weight in enumerate(strengths):
        first, second = np.array(pairs).T
        times = (weight[first] + weight[second]) / np.gcd(weight[first], weight[second])
        wanted = (weight[first] - weight[second]) / (weight[first] + weight[second]) / (2 * beta)
        differences = np.eye(len(weight))[first] - np.eye(len(weight))[second]
        scale = np.sqrt(times)
        result[prompt] = start[prompt] + np.linalg.lstsq(differences * scale[:, None], wanted * scale, rcond=None)[0]
    return _log_softmax(result)


def decisionwise_optimum(
    sequences: Sequences, logits: Array, rewards: Array, beta: float, scale: Scale, group_size: int, epsilon: float
) -> Array:
    """log pi [P, V^T] where every decision weighs the advantage to come against the KL of that decision alone.

    That is where the policy gradient with a KL in the loss of each decision stands still: at each prefix s
    pi(a | s) = pi_ref(a | s) exp(E[A | s, a] / beta) / Z. It differs from `tilted`, whose decisions answer for the KL
    that comes after them, unless T = 1. A is the group's advantage as `expected_advantages` gives it, which depends on
    pi; so this is iterated until it stands still.
    """
    reference, current = _log_softmax(logits), _log_softmax(logits)
    for _ in range(2000):
        advantages = expected_advantages(sequences.log_probs(current), rewards, scale, group_size, epsilon)
        following = _best_responses(sequences, reference, advantages, beta)
        if np.abs(following - current).max() < 1e-12:
            return sequences.log_probs(following)
        current = _log_softmax((current + following) / 2)  # half a step: a whole one may swing for ever
    raise ArithmeticError("the fixed point was not found; take a larger beta.")


def _best_responses(sequences: Sequences, reference: Array, advantages: Array, beta: float) -> Array:
    """[P, N, V] log-probabilities by backward recursion over prefixes."""
    table = reference.copy()
    to_come = advantages  # of every prefix of the next length
    for level in reversed(sequences.levels()):
        per_token = to_come.reshape(len(advantages), -1, sequences.vocabulary)
        table[:, level] = _log_softmax(reference[:, level] + per_token / beta)
        to_come = (np.exp(table[:, level]) * per_token).sum(2)
    return table


def expected_advantages(log_probs: Array, rewards: Array, scale: Scale, group_size: int, epsilon: float) -> Array:
    """E[A | x] [P, V^T] of a sequence x in a group whose other G - 1 members are drawn from the policy, exactly.

    "none": r minus its expectation. "group_mean": r minus the group's mean, which holds r itself and so shrinks A by
    (G - 1) / G. "group_std": that over (the group's population std + epsilon), summed over how often each different
    reward can occur among the other members.
    """
    probability = np.exp(log_probs)
    centred = rewards - (probability * rewards).sum(1, keepdims=True)
    if scale == "none":
        return centred
    if scale == "group_mean":
        return centred * (group_size - 1) / group_size
    values, place = np.unique(rewards, return_inverse=True)
    counts, ways, advantages = _groups(tuple(values.tolist()), group_size, epsilon)
    share = np.stack(
        [np.bincount(at, p, len(values)) for at, p in zip(place.reshape(rewards.shape), probability, strict=True)]
    )
    weights = ways * np.prod(share[:, None] ** counts, axis=2)  # [P, M]
    return np.take_along_axis(weights @ advantages, place.reshape(rewards.shape), 1)


@cache
def _groups(values: tuple[float, ...], group_size: int, epsilon: float) -> tuple[Array, Array, Array]:
    """The M ways in which K different rewards can occur among G - 1 samples.

    How often each occurs [M, K], the multinomial coefficient [M], and the advantage [M, K] of one more sample with
    each of the rewards.
    """
    kinds, others = len(values), group_size - 1
    counts, ways, advantages = [], [], []
    for bars in itertools.combinations(range(others + kinds - 1), kinds - 1):
        count = np.diff((-1, *bars, others + kinds - 1)) - 1
        group = count + np.eye(kinds)  # [K, K]: with one more sample of each reward
        mean = group @ values / group_size
        deviations = np.array(values) - mean[:, None]
        std = np.sqrt((group * deviations**2).sum(1) / group_size)
        counts.append(count)
        ways.append(math.factorial(others) / math.prod(map(math.factorial, count.tolist())))
        advantages.append(np.where(std > 0, np.diag(deviations) / np.where(std > 0, std + epsilon, 1.0), 0.0))
    return np.array(counts, dtype=np.float64), np.array(ways), np.array(advantages)


def _log_softmax(values: Array) -> Array:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
