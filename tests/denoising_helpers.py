"""Requests and policies that the tests of denoising models share."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from modalities.base import DenoisingSegment, Request, Trajectory
from modalities.denoising import DenoisingPolicy
from modalities.image import ImagePolicyConfig
from modalities.randomness import SampleKey
from modalities.samples import Prompt
from modalities.video import VideoPolicyConfig

GUIDED = {"steps": 4, "guidance_scale": 3.0, "negative_prompt": "bad", "height": 16, "width": 16}
WORDS = ["a red cat", "dog", "blue"]


def requests(count: int, per_prompt: int = 2, negatives: list[str | None] | None = None) -> list[Request]:
    result = []
    for row in range(count):
        prompt = row // per_prompt
        negative = negatives[row] if negatives else None
        text = WORDS[prompt % len(WORDS)]
        key = SampleKey(run_seed=1, stage=0, iteration=3, prompt=prompt, sample=row % per_prompt)
        result.append(Request(Prompt(text, prompt, negative), prompt, key))
    return result


def image_policy(folder: Path, sampling: dict[str, Any] | None = None, **settings: Any) -> DenoisingPolicy:
    config = ImagePolicyConfig.model_validate({"model": str(folder), "sampling": GUIDED | (sampling or {})} | settings)
    return config.build("painter", "cpu", seed=0)


def video_policy(folder: Path, sampling: dict[str, Any] | None = None, **settings: Any) -> DenoisingPolicy:
    block = GUIDED | {"height": 32, "width": 32, "frames": 5, "steps": 3} | (sampling or {})
    config = {"model": str(folder), "sampling": block, "max_sequence_length": 16} | settings
    return VideoPolicyConfig.model_validate(config).build("film", "cpu", seed=0)


def segment_of(trajectory: Trajectory) -> DenoisingSegment:
    segment = trajectory.segments[0]
    assert isinstance(segment, DenoisingSegment)
    return segment


def replayed(policy: DenoisingPolicy, trajectory: Trajectory, budget: int) -> torch.Tensor:
    """[B, T]: the log-probs of every trained transition, scored in micro-batches of `budget` rows; 0 elsewhere."""
    segment = segment_of(trajectory)
    log_probs = torch.zeros_like(segment.rollout_log_probs)
    for cut in policy.plan(trajectory, torch.arange(segment.num_rows), budget):
        log_probs[cut.rows, cut.steps] = policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").detach()
    return log_probs


def perturb(policy: DenoisingPolicy, scale: float = 0.05) -> None:
    """Moves every trainable weight, as training would."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def pipeline_latents(
    folder: Path, policy: DenoisingPolicy, rows: list[Request], components: Any = None, **options: Any
) -> torch.Tensor:
    """What the plain diffusers pipeline denoises from the same initial noise, prompts and negative prompts."""
    pipeline = DiffusionPipeline.from_pretrained(folder, **(components or {}))
    pipeline.set_progress_bar_config(disable=True)
    shape = policy.latent_shape(policy.sampling)
    sampling = policy.sampling
    output = pipeline(
        [row.prompt.text for row in rows],
        negative_prompt=[row.prompt.negative or "" for row in rows],
        num_inference_steps=sampling.steps,
        guidance_scale=sampling.guidance_scale,
        height=sampling.height,
        width=sampling.width,
        latents=torch.stack([torch.randn(shape, generator=row.key.generator()) for row in rows]),
        output_type="latent",
        **options,
    )
    return output.frames if policy.sample_kind == "video" else output.images


def exported_latents(policy: DenoisingPolicy, folder: Path, rows: list[Request], **options: Any) -> torch.Tensor:
    """The same, from the folder that the policy exports."""
    policy.export(folder)
    return pipeline_latents(folder, policy, rows, **options)
