"""Linear-Gaussian chains with a quadratic reward, solved exactly: NumPy, float64, and nothing of the training code.

A chain starts at x_0 ~ N(0, I) and moves by x_{t+1} = A_t x_t + b_t + s_t noise. Every denoising sampler with an affine
denoiser is one. The noise s_t is given; a learner chooses the mean A_t x + b_t of the steps with s_t > 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chain:
    """T affine Gaussian transitions of d numbers."""

    gain: Array  # [T, d, d]
    offset: Array  # [T, d]
    std: Array  # [T]; 0 = deterministic

    def moments(self) -> list[tuple[Array, Array]]:
        """Mean [d] and covariance [d, d] before each transition, and at the end: T + 1 of them."""
        size = self.offset.shape[1]
        found = [(np.zeros(size), np.eye(size))]
        for gain, offset, std in zip(self.gain, self.offset, self.std, strict=True):
            mean, covariance = found[-1]
            found.append((gain @ mean + offset, gain @ covariance @ gain.T + std**2 * np.eye(size)))
        return found


@dataclass(frozen=True)
class QuadraticReward:
    """r(x) = -(x - target)' curvature (x - target) / 2."""

    curvature: Array  # [d, d], symmetric, positive definite
    target: Array  # [d]

    def expected(self, chain: Chain) -> float:
        """E[r] at the end of a chain."""
        mean, covariance = chain.moments()[-1]
        gap = mean - self.target
        return float(-0.5 * (gap @ self.curvature @ gap + np.trace(self.curvature @ covariance)))


def squared_differences(chain: Chain, other: Chain) -> Array:
    """[T]: E |mean of `chain` - mean of `other`|^2 of each transition, over the states that `chain` visits."""
    moments = chain.moments()[:-1]
    found = []
    for (mean, covariance), gain, offset in zip(
        moments, chain.gain - other.gain, chain.offset - other.offset, strict=True
    ):
        gap = gain @ mean + offset
        found.append(gap @ gap + np.trace(gain @ covariance @ gain.T))
    return np.array(found)


def kl_weights(std: Array) -> Array:
    """[T]: what turns squared differences of means into Gaussian KLs, 1 / (2 s^2); 0 for a deterministic transition."""
    return np.where(std > 0, 0.5 / np.where(std > 0, std, 1.0) ** 2, 0.0)


def divergence(chain: Chain, other: Chain) -> float:
    """KL(chain || other) of whole paths, in nats; the deterministic transitions are taken to be equal."""
    return float(kl_weights(chain.std) @ squared_differences(chain, other))


def optimal_chain(reference: Chain, reward: QuadraticReward, penalty: Array, whole_path: bool) -> Chain:
    """The means that maximise the reward minus a penalty for leaving those of the reference.

    Writes E[what is still to come | x_t] as -x'P_t x / 2 + p_t'x + constant and goes backwards. In each stochastic
    transition the mean m maximises -m'Pm / 2 + p'm - w_t |m - m_ref|^2, which gives
    m = (P + 2 w_t)^-1 (2 w_t m_ref + p), affine in x as m_ref is.

    `whole_path` is the discrete Riccati recursion: it maximises E[r - sum_t w_t |m_t - m_ref_t|^2], so a decision
    answers for the penalties that come after it. Without it each decision weighs the reward to come against its own
    penalty alone, which is where a KL in the loss of each decision leads: the loss does not tell a decision what states
    it leads to.

    Args:
        penalty: w [T], read where the transition is stochastic, > 0 there.
    """
    gains, offsets = reference.gain.copy(), reference.offset.copy()
    identity = np.eye(offsets.shape[1])
    P, p = reward.curvature, reward.curvature @ reward.target
    for t in reversed(range(len(gains))):
        reference_gain, reference_offset, weight = reference.gain[t], reference.offset[t], 2 * penalty[t]
        if reference.std[t] > 0:
            pull = np.linalg.inv(P + weight * identity)
            gains[t] = weight * pull @ reference_gain
            offsets[t] = pull @ (weight * reference_offset + p)
        gain, offset = gains[t], offsets[t]
        linear = gain.T @ (p - P @ offset)
        P = gain.T @ P @ gain
        if whole_path and reference.std[t] > 0:
            away, shift = gain - reference_gain, offset - reference_offset
            P = P + weight * away.T @ away
            linear = linear - weight * away.T @ shift
        p = linear
    return Chain(gains, offsets, reference.std)
