"""A denoising policy that is affine at each noise level, for Gaussian data and a quadratic reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modalities.base import Policy
from modalities.denoising import DenoisingPolicy
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.noise_process import DiffusionProcess, FlowProcess, NoiseProcess, Schedule
from modalities.samples import Audio, Prompt, Sample
from modalities.weights import WeightSets
from rewards.base import Reward
from uniml_rl.data.records import Record
from uniml_rl.selftest.linear_quadratic import (
    Array,
    Chain,
    QuadraticReward,
    divergence,
    kl_weights,
    optimal_chain,
)
from uniml_rl.selftest.targets import DataKind, Imitation, Optimum, Target


class QuadraticFeatures(nn.Module):
    """1, x and the products of x, apart for each noise level: what a quadratic value function is linear in."""

    def forward(self, levels: Tensor, x: Tensor) -> Tensor:
        """[b, 1, D] for shares of the levels [b, T] and x [b, d]."""
        ones = torch.ones_like(x[:, :1])
        rows, columns = torch.triu_indices(x.shape[1], x.shape[1])
        values = torch.cat([ones, x, x[:, rows] * x[:, columns]], 1)
        return (levels.unsqueeze(2) * values.unsqueeze(1)).flatten(1).unsqueeze(1)


class AffineDenoiser(nn.Module):
    """prediction = weight_t x + bias_t at each time of a table; between two of them, their weights' linear mean."""

    def __init__(self, times: Tensor, weight: Array, bias: Array) -> None:
        super().__init__()
        self.times = times  # [T], descending
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float32))  # [T, d, d]
        self.bias = nn.Parameter(torch.tensor(bias, dtype=torch.float32))  # [T, d]
        self.features = QuadraticFeatures()

    def levels(self, times: Tensor) -> Tensor:
        """[b, T]: the share that each entry of the table has in `times` [b]; they add up to 1."""
        if len(self.times) == 1:
            return torch.ones(len(times), 1)
        lower = torch.searchsorted(-self.times, -times).clamp(1, len(self.times) - 1)
        above, below = self.times[lower - 1], self.times[lower]
        share = ((above - times) / (above - below)).clamp(0, 1).unsqueeze(1)
        one_hot = nn.functional.one_hot(torch.stack([lower - 1, lower]), len(self.times)).float()
        return (1 - share) * one_hot[0] + share * one_hot[1]

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        """[b, d] for x [b, d] at `times` [b]."""
        levels = self.levels(times)
        self.features(levels, x)
        return torch.einsum("bt,tij,bj->bi", levels, self.weight, x) + levels @ self.bias


class AffinePolicy(DenoisingPolicy):
    """The real denoising policy around an affine denoiser: a sample is a point of d numbers, carried as a waveform."""

    sample_kind = "audio"

    def __init__(
        self, name: str, process: NoiseProcess, sampling: DenoisingSampling, weight: Array, bias: Array
    ) -> None:
        self.name, self.sampling, self.process = name, sampling, process
        rows = 1 << 16
        self.settings = DenoisingSettings(model="affine", sampling=sampling, sampling_rows=rows, decoding_rows=rows)
        self.device, self.dtype, self.storage_dtype = torch.device("cpu"), torch.float32, torch.float32
        self.shape = bias.shape[1:]
        times = process.model_times(self.schedule(sampling).times[:-1]).float()
        self.denoiser = AffineDenoiser(times, weight, bias)
        self.feature_size = len(times) * (self.shape[0] + 1) * (self.shape[0] + 2) // 2
        self.weight_sets = WeightSets(self.trainable_modules())

    def schedule(self, sampling: DenoisingSampling, *key: Any) -> Schedule:
        return self.process.schedule(sampling, 1, *key)

    def latent_shape(self, sampling: DenoisingSampling) -> tuple[int, ...]:
        return tuple(self.shape)

    @staticmethod
    def feature_size_of(denoiser: Any) -> int:
        raise NotImplementedError  # there are no configurations to read it from

    @staticmethod
    def latent_shape_of(sampling: DenoisingSampling, denoiser: Any, vae: Any) -> tuple[int, ...]:
        raise NotImplementedError  # there are no configurations to read it from

    @staticmethod
    def sequence_length(shape: tuple[int, ...], denoiser: Any) -> int:
        return 1

    @classmethod
    def activations(cls, denoiser: Any, shape: tuple[int, ...], settings: DenoisingSettings) -> int:
        return 0  # nobody estimates the memory of it

    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        return {"text": torch.zeros(len(texts), 1)}

    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        prediction: Tensor = self.denoiser(latents, model_times.float())
        return prediction

    def trunk(self) -> nn.Module:
        features: nn.Module = self.denoiser.features  # type: ignore[assignment]
        return features

    def decode_latents(self, latents: Tensor, differentiable: bool = False) -> Tensor:
        return latents if differentiable else latents.detach()

    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        return latents

    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        return [Audio(point.unsqueeze(0), sampling_rate=1) for point in pixels]

    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        return points(samples)

    def export(self, folder: Path) -> None:
        torch.save(self.denoiser.state_dict(), folder / "denoiser.pt")


def points(samples: Sequence[Sample]) -> Tensor:
    """[B, d]: the samples of an `AffinePolicy`."""
    return torch.stack([sample.waveform[0] for sample in samples if isinstance(sample, Audio)])


class PointReward(Reward):
    """A quadratic reward of points."""

    kinds = frozenset({"audio"})
    differentiable = True

    def __init__(self, reward: QuadraticReward) -> None:
        self.curvature = torch.tensor(reward.curvature, dtype=torch.float32)
        self.target = torch.tensor(reward.target, dtype=torch.float32)

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        gap = points(samples) - self.target
        return -0.5 * ((gap @ self.curvature) * gap).sum(1)


class DenoisingProblem:
    """Data from a Gaussian in two dimensions, the exact denoiser of it, and a reward with another centre and shape.

    Given samples are points around the reward's target, and for pairs points of the data, of which the one of higher
    reward is preferred.
    """

    data_mean = np.array([0.5, -0.5])
    data_covariance = np.array([[0.6, 0.2], [0.2, 0.3]])
    quadratic = QuadraticReward(np.array([[1.0, -0.3], [-0.3, 0.6]]), np.array([1.5, 0.5]))
    num_points = 64

    def __init__(self, **sampling: Any) -> None:
        """`sampling` is the block of a denoising policy; with `sampler: {type: ddim}` the model predicts epsilon."""
        diffusion = (sampling.get("sampler") or {}).get("type") == "ddim"
        block = {"steps": 3} | ({} if diffusion else {"shift": 1.0}) | sampling
        self.sampling = DenoisingSampling.model_validate(block)
        self.process: NoiseProcess = DiffusionProcess(_DDPM) if diffusion else FlowProcess({})
        self.schedule = self._known_schedule()
        self.weight, self.bias = self._denoiser(self.data_mean, self.data_covariance)
        self.reference = self._chain(self.weight, self.bias)
        draw = np.random.default_rng(0).standard_normal((self.num_points, len(self.data_mean)))
        self.points = self.quadratic.target + draw @ np.array([[0.6, -0.2], [0.0, 0.4]])
        self.data_points = self.data_mean + draw @ np.linalg.cholesky(self.data_covariance).T

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt("point", 0)]

    @property
    def reward(self) -> Reward:
        return PointReward(self.quadratic)

    def records(self, kind: DataKind) -> list[Record]:
        """The points one by one, those of high reward being desirable; or in pairs."""
        (prompt,) = self.prompts
        points = torch.tensor(self.data_points if kind == "preferences" else self.points).float()
        samples = [Audio(point.unsqueeze(0), sampling_rate=1) for point in points]
        scores = self.reward.score(samples, []).tolist()
        if kind == "preferences":
            pairs = [sorted((row, row + 1), key=lambda row: -scores[row]) for row in range(0, self.num_points, 2)]
            return [Record(i, prompt, [samples[row] for row in pair], [1.0, 0.0]) for i, pair in enumerate(pairs)]
        middle = np.median(scores) if kind == "labelled" else -np.inf
        labels = [float(score > middle) for score in scores]
        return [Record(row, prompt, [samples[row]], [labels[row]]) for row in range(self.num_points)]

    def policy(self) -> AffinePolicy:
        """The untrained policy, which is the reference: the exact denoiser of the data."""
        return AffinePolicy("learner", self.process, self.sampling, self.weight, self.bias)

    def _known_schedule(self) -> Schedule:
        """The transitions that the answers are about: a window that moves leaves them all stochastic."""
        moves = self.sampling.window is not None and self.sampling.window.moving is not None
        sampling = self.sampling.model_copy(update={"window": None}) if moves else self.sampling
        return self.process.schedule(sampling, sequence_length=1)

    def _factors(self, time: Tensor) -> list[float]:
        """Of data and of noise in x at `time` [1], and of data and of noise in what a perfect denoiser outputs."""
        zero, one = torch.zeros(1, 1), torch.ones(1, 1)
        parts = (self.process.noised, self.process.target)
        return [float(part(*pair, time)) for part in parts for pair in ((one, zero), (zero, one))]

    def _denoiser(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """Weight [T, d, d] and bias [T, d] of the least squares of the denoiser's target on (1, x) at each time.

        x and the target are linear in (data, noise), so it follows from the data's mean and covariance; for Gaussian
        data it is E[target | x].
        """
        weights, biases = [], []
        identity = np.eye(len(mean))
        for time in self.schedule.times[:-1].unsqueeze(1):
            on_data, on_noise, target_data, target_noise = self._factors(time)
            variance = on_data**2 * covariance + on_noise**2 * identity
            shared = target_data * on_data * covariance + target_noise * on_noise * identity
            weight = shared @ np.linalg.inv(variance)
            weights.append(weight)
            biases.append(target_data * mean - weight @ (on_data * mean))
        return np.array(weights), np.array(biases)

    def _coefficients(self) -> tuple[Array, Array]:
        """[T]: the factors of x and of the prediction in the mean of each transition."""
        times, std = self.schedule.times, self.schedule.std
        on_x, on_prediction = self.process.coefficients(self.schedule.sampler, times[:-1], times[1:], std)
        return on_x.double().numpy(), on_prediction.double().numpy()

    def _chain(self, weight: Array, bias: Array) -> Chain:
        on_x, on_prediction = self._coefficients()
        gain = on_x[:, None, None] * np.eye(bias.shape[1]) + on_prediction[:, None, None] * weight
        return Chain(gain, on_prediction[:, None] * bias, self.schedule.std.double().numpy())

    def _weights(self, policy: Policy) -> tuple[Array, Array]:
        assert isinstance(policy, AffinePolicy)
        weight, bias = policy.denoiser.weight, policy.denoiser.bias
        return weight.detach().double().numpy(), bias.detach().double().numpy()  # type: ignore[operator]

    def chain(self, policy: Policy) -> Chain:
        """The transitions of the current weights."""
        return self._chain(*self._weights(policy))

    def target_chain(self, target: Optimum) -> Chain:
        """The transitions that an algorithm should end at."""
        if target.divergence == "kl":
            penalty = target.beta * kl_weights(self.reference.std)
        else:  # the prediction's factor in the transition's mean is on_prediction
            penalty = target.beta / self._coefficients()[1] ** 2
        return optimal_chain(self.reference, self.quadratic, penalty, target.whole_path)

    def distance(self, policy: Policy, target: Target) -> float:
        """How far the policy still is, as a share of the way: 0 at the target, 1 where it began.

        sqrt(KL(target || policy) / KL(target || reference)) of whole denoising paths; for demonstrations, the root of
        the same ratio of the denoiser's excess errors over all times.
        """
        if isinstance(target, Optimum):
            goal = self.target_chain(target)
            return float(np.sqrt(divergence(goal, self.chain(policy)) / divergence(goal, self.reference)))
        if isinstance(target, Imitation):
            left, whole = self._excess(*self._weights(policy)), self._excess(self.weight, self.bias)
            return float(np.sqrt(left / whole))
        raise NotImplementedError(f"no closed form is known for {target} here.")

    def _excess(self, weight: Array, bias: Array) -> float:
        """E |prediction - best prediction|^2, summed over times, for x made of the given points."""
        mean, covariance = self.points.mean(0), np.cov(self.points.T, ddof=0)
        best_weight, best_bias = self._denoiser(mean, covariance)
        total = 0.0
        for step, time in enumerate(self.schedule.times[:-1].unsqueeze(1)):
            on_data, on_noise, *_ = self._factors(time)
            variance = on_data**2 * covariance + on_noise**2 * np.eye(len(mean))
            difference = weight[step] - best_weight[step]
            gap = difference @ (on_data * mean) + bias[step] - best_bias[step]
            total += gap @ gap + np.trace(difference @ variance @ difference.T)
        return total

    def expected_reward(self, policy: Policy) -> float:
        """E[r] of a sample."""
        return self.quadratic.expected(self.chain(policy))

    def best_reward(self) -> float:
        """The reward's maximum, 0: a last step without noise could lead every sample to the target."""
        return 0.0


_DDPM = {
    "beta_schedule": "linear",
    "num_train_timesteps": 20,
    "beta_start": 0.02,
    "beta_end": 0.3,
    "timestep_spacing": "trailing",
    "prediction_type": "epsilon",
    "set_alpha_to_one": False,  # which leaves noise in the last transition, so that it is trained too
}
