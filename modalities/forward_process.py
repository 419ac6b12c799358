"""The forward process as a likelihood: clean latents are noised, and how well the denoiser undoes it scores them.

Up to weights and a constant, the mean of that squared error over times and noise is the evidence bound of the sample's
log-likelihood (Ho et al. 2020, eq. 5; Kingma and Gao 2023).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field
from torch import Tensor

from modalities.base import Cut, DenoisingSegment, ForwardSegment, Need, Replay
from modalities.randomness import SampleKey, seeded_generator
from modalities.settings import Settings

if TYPE_CHECKING:
    from modalities.noise_process import NoiseProcess


class ForwardProcessSettings(Settings):
    """How given samples are noised and scored by a denoising model; token models ignore it."""

    draws: int = Field(default=4, ge=1)
    """Times (each with its own noise) that every sample is scored at; their mean estimates the evidence bound."""
    times: Literal["uniform", "logit_normal", "sampling_grid"] = "uniform"
    """Where: `uniform` in sigma over (0, 1] for flow models and over the timesteps 1..N for diffusion models;
    `logit_normal` takes the logistic function of a standard normal as share of the way to pure noise (Esser et al.
    2024, without their shift); `sampling_grid` takes the times that the sampler visits, its clean end left out. One
    sample's draws are spread evenly over the distribution, and each of them alone follows it (Kingma et al. 2021)."""
    weighting: Literal["uniform", "noise", "clean", "level"] = "uniform"
    """Whose squared error the log-prob is: that of the model's own output (`uniform`, w = 1: flow matching, AWM,
    Diffusion-DPO with epsilon), of the noise that it implies (`noise`: w = (1 - sigma)^2 for flow models; 1 for
    epsilon, alpha for v, alpha / (1 - alpha) for x0), or of the clean latent that it implies (`clean`: sigma^2 for
    flow models; (1 - alpha) / alpha, 1 - alpha and 1). `level` is the model's own, times the noise level: sigma, or
    sqrt(1 - alpha) of a diffusion model (AWM's setting)."""
    shared_in_group: bool = False
    """The same times and noise for all samples of a group, so that a pair's difference is not that of its noise."""


def forward_segment(
    segment: DenoisingSegment, process: NoiseProcess, settings: ForwardProcessSettings, round: int
) -> ForwardSegment:
    """Draws of the forward process from the segment's final latents; `round` selects other times and noise."""
    seeds = [
        _noise_seed(key, group if settings.shared_in_group else None, round)
        for key, group in zip(segment.keys, segment.group.tolist(), strict=True)
    ]
    times = _draw_times(settings, process, seeds, segment.times[:, :-1])
    every = torch.ones_like(times, dtype=torch.bool)
    return ForwardSegment(
        agent=segment.agent,
        group=segment.group,
        rollout_log_probs=torch.full_like(times, torch.nan),
        trained_mask=every,
        length_mask=every,
        context_mask=~every,
        log_prob_unit="element_mean",
        version=segment.version,
        ended=segment.ended,
        keys=segment.keys,
        parent=segment.parent,
        guidance_scale=torch.ones_like(times),
        conditions=segment.conditions,
        condition_index=segment.condition_index,
        negative_index=segment.negative_index,
        clean=segment.final_latents.detach(),
        times=times,
        weights=_weights(settings.weighting, process, times.flatten()).view_as(times),
        noise_seed=torch.tensor(seeds, dtype=torch.long),
    )


def _noise_seed(key: SampleKey, shared_by: int | None, round: int) -> int:
    """63 bits of the row's own, or of the group `shared_by`; never those of the sampler, which hashes fewer fields."""
    fields = astuple(key) if shared_by is None else astuple(replace(key, sample=-1))
    return seeded_generator(*fields, shared_by or 0, round).initial_seed()


def _draw_times(settings: ForwardProcessSettings, process: NoiseProcess, seeds: list[int], grid_BN: Tensor) -> Tensor:
    """[B, draws] float32, each row from its own seed: one uniform number, shifted by 1 / draws from draw to draw."""
    uniforms = [float(torch.rand((), generator=seeded_generator(seed), dtype=torch.float64)) for seed in seeds]
    first = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(1)
    shares = 1 - (first + torch.arange(settings.draws) / settings.draws) % 1  # [B, draws] in (0, 1]
    if settings.times == "sampling_grid":
        return grid_BN.gather(1, (shares * grid_BN.shape[1]).ceil().long() - 1)
    if settings.times == "logit_normal":
        shares = torch.special.ndtri(shares).sigmoid()
    return process.time_at(shares)


def _weights(weighting: str, process: NoiseProcess, times: Tensor) -> Tensor:
    """[N] -> [N]: the squared factor from an error of the denoiser's output to that of what it implies."""
    one, zero = torch.ones_like(times), torch.zeros_like(times)
    if weighting == "uniform":
        return one
    if weighting == "level":
        return process.noise_levels(times)
    factor = process.clean(zero, one, times)  # of the clean latent
    if weighting == "noise":
        factor = factor * process.noised(one, zero, times) / process.noised(zero, one, times)
    return factor**2


@dataclass(frozen=True)
class Draws:
    """Noised latents of a cut, N = b t of them."""

    x: Tensor  # [N, ...] float32
    times: Tensor  # [N]
    weights: Tensor  # [N]
    target: Tensor  # [N, ...] float32

    @staticmethod
    def of(segment: ForwardSegment, cut: Cut, process: NoiseProcess, device: torch.device) -> Draws:
        """Draws the noise of the cut again and adds it."""
        columns = range(*cut.steps.indices(segment.num_steps))
        shape = tuple(segment.clean.shape[1:])
        noise = torch.stack(
            [
                torch.randn(shape, generator=seeded_generator(seed, column))
                for seed in segment.noise_seed[cut.rows].tolist()
                for column in columns
            ]
        ).to(device)
        clean = segment.clean[cut.rows].to(device).float().repeat_interleave(len(columns), dim=0)
        times, weights = (cut.take(table).flatten().to(device) for table in (segment.times, segment.weights))
        x, target = process.noised(clean, noise, times), process.target(clean, noise, times)
        return Draws(x, times, weights, target)

    def score(self, prediction: Tensor, process: NoiseProcess, needs: frozenset[Need]) -> Replay:
        """What `needs` names of the denoiser's output [N, ...], flat; features are not its business."""
        result = Replay()
        if "log_prob" in needs:
            result.log_prob = -self.weights * (prediction - self.target).square().flatten(1).mean(1)
        if "prediction" in needs:
            result.prediction = prediction
        if "clean_prediction" in needs:
            result.clean_prediction = process.clean(self.x, prediction, self.times)
        if "target" in needs:
            result.target = self.target
        return result
