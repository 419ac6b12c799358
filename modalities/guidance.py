"""Classifier-free guidance, the same in rollout and replay, and the denoiser's features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modalities.samplers import expand

Denoiser = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(latents [b, ...], times [b], embeddings name -> [b, ...]) -> prediction [b, ...] float32."""


@dataclass(frozen=True)
class Condition:
    """What the denoiser is told about each of b rows: text embeddings, and the guidance away from others."""

    positive: Mapping[str, Tensor]  # name -> [b, ...]
    negative: Mapping[str, Tensor]  # name -> [b, ...]; empty if no row is guided
    scale: Tensor  # [b] float32 on the CPU; 1 = no guidance


def guided_prediction(
    denoiser: Denoiser, latents: Tensor, times: Tensor, condition: Condition, with_gradient: bool
) -> Tensor:
    """negative + scale (positive - negative) (Ho and Salimans 2022) for the guided rows, positive for the others.

    `with_gradient` runs both branches as one batch, negative rows first; without it the negative branch runs by itself
    and keeps no activations. A rollout takes the same way as its replay, so that both compute the same bits.
    """
    guided = (condition.scale != 1).nonzero().flatten().to(latents.device)
    if not len(guided):
        return denoiser(latents, times, condition.positive)
    negative = {key: value[guided] for key, value in condition.negative.items()}
    if with_gradient:
        both = {key: torch.cat([negative[key], value]) for key, value in condition.positive.items()}
        output = denoiser(torch.cat([latents[guided], latents]), torch.cat([times[guided], times]), both)
        away, towards = output[: len(guided)], output[len(guided) :]
    else:
        with torch.no_grad():
            away = denoiser(latents[guided], times[guided], negative)
        towards = denoiser(latents, times, condition.positive)
    scale = expand(condition.scale.to(latents.device)[guided], towards)
    return towards.index_copy(0, guided, away + scale * (towards[guided] - away))


@contextmanager
def outputs_of(module: nn.Module, wanted: bool) -> Iterator[list[Tensor]]:
    """Collects the outputs of `module` within the context, if they are wanted."""
    outputs: list[Tensor] = []
    if not wanted:
        yield outputs
        return
    handle = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def mean_over_positions(hidden: Tensor) -> Tensor:
    """[b, L, D] or [b, D, H, W] -> [b, D] float32."""
    return hidden.float().mean(1) if hidden.ndim == 3 else hidden.float().flatten(2).mean(2)
