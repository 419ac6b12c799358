"""The policy that every denoising model shares; a family adds how its model is called, encoded and decoded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modalities import samplers
from modalities.base import (
    Cut,
    DenoisingSegment,
    ForwardSegment,
    LatentSegment,
    LogProbUnit,
    Need,
    Policy,
    Replay,
    Request,
    Trajectory,
)
from modalities.denoising_settings import DenoisingSampling, DenoisingSettings
from modalities.forward_process import Draws, ForwardProcessSettings, forward_segment
from modalities.guidance import Condition, guided_prediction, mean_over_positions, outputs_of
from modalities.lora import LoraSettings, attach_lora
from modalities.noise_process import NoiseProcess, Schedule, Transition
from modalities.pipeline_folder import export_pipeline, load_pipeline
from modalities.samplers import expand
from modalities.samples import Prompt, Sample
from modalities.weights import WeightSets

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
LORA_TARGETS += ["net.0.proj", "net.2"]


class DenoisingPolicy(Policy):
    """A text-to-image or text-to-video diffusers pipeline whose denoiser is trained.

    Text encoders and the decoder are frozen. Latents, schedules and log-probs are float32 whatever the model's dtype.
    """

    denoiser_component: ClassVar[str]
    process_type: ClassVar[type[NoiseProcess]]
    reads_max_sequence_length: ClassVar[bool] = False
    """Whether the text encoder's length can be chosen."""
    offers: frozenset[Need] = frozenset(get_args(Need))
    settings: DenoisingSettings
    sampling: DenoisingSampling

    def __init__(self, name: str, settings: DenoisingSettings, folder: Path, device: str, seed: int) -> None:
        self.name, self.settings, self.sampling, self.folder = name, settings, settings.sampling, folder
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.storage_dtype: torch.dtype = getattr(torch, settings.storage_dtype)
        self.pipeline = load_pipeline(folder, self.dtype, settings.trust_remote_code, **self.absent_components())
        self.denoiser: nn.Module = getattr(self.pipeline, self.denoiser_component)
        self.vae: Any = self.pipeline.vae
        for component in self.pipeline.components.values():
            if isinstance(component, nn.Module):
                component.requires_grad_(False).eval().to(self.device)
        self.vae.float()
        if settings.vae_tiling:
            self.vae.enable_tiling()
        self.make_trainable(self.denoiser, settings.lora, seed)
        self.denoiser.to(self.device)
        if settings.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        self.weight_sets = WeightSets(self.trainable_modules())
        self.process = self.process_type(self.pipeline.scheduler.config)
        self.schedule(self.sampling)  # a sampler that does not fit is an error now, not at the first rollout

    @classmethod
    def make_trainable(cls, denoiser: nn.Module, lora: LoraSettings | None, seed: int) -> None:
        """Attaches the adapter, or frees every weight; layers without effect on the output stay frozen."""
        if lora is None:
            denoiser.requires_grad_(True)
        else:
            attach_lora(denoiser, lora, LORA_TARGETS, seed)
        for layer in cls.unused_layers(denoiser):
            layer.requires_grad_(False)

    # What a family supplies

    @classmethod
    def unused_layers(cls, denoiser: nn.Module) -> list[nn.Module]:
        """Layers that the denoiser computes but whose result it drops: their gradient is always zero."""
        return []

    def absent_components(self) -> dict[str, None]:
        """Components of the folder that are not loaded."""
        return {}

    @abstractmethod
    def encode_prompts(self, texts: list[str]) -> dict[str, Tensor]:
        """Text embeddings, name -> [len(texts), ...]."""

    @abstractmethod
    def denoise(self, latents: Tensor, model_times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        """The denoiser's raw output [b, ...]."""

    @abstractmethod
    def trunk(self) -> nn.Module:
        """The module whose output, averaged over positions, is the row's features."""

    @staticmethod
    @abstractmethod
    def latent_shape_of(sampling: DenoisingSampling, denoiser: Any, vae: Any) -> tuple[int, ...]:
        """Shape of one sample's latent, from the configurations; UserError if the size in pixels does not fit."""

    @staticmethod
    @abstractmethod
    def sequence_length(shape: tuple[int, ...], denoiser: Any) -> int:
        """Number of the denoiser's tokens for a latent of that shape, which some schedules depend on."""

    @abstractmethod
    def pixels_from_latents(self, latents: Tensor) -> Tensor:
        """VAE decoding: latents [b, ...] float32 -> pixels in [-1, 1], not yet clamped."""

    @abstractmethod
    def latents_from_samples(self, samples: Sequence[Sample]) -> Tensor:
        """VAE encoding, the mean of its posterior: [b, ...] float32."""

    @abstractmethod
    def samples_from_pixels(self, pixels: Tensor, differentiable: bool) -> list[Sample]:
        """Pixels [b, ...] in [0, 1] as samples: uint8, or float with the gradient if `differentiable`."""

    # One step, shared by rollout, replay, forward-process losses and reward backpropagation

    def predict(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """The guided output of the denoiser [b, ...] float32 for latents [b, ...] at `times` [b] of the process."""
        return self._predict(latents, times, condition, with_features=False)[0]

    def transition(
        self,
        latents: Tensor,
        times: Tensor,
        next_times: Tensor,
        std: Tensor,
        sampler: str,
        condition: Condition,
        with_features: bool = False,
    ) -> Transition:
        """The step `times` -> `next_times` [b] with noise `std` [b] of the kernel `sampler`; differentiable."""
        prediction, features = self._predict(latents, times, condition, with_features)
        return replace(self.process.step(sampler, latents, prediction, times, next_times, std), features=features)

    def _predict(
        self, latents: Tensor, times: Tensor, condition: Condition, with_features: bool
    ) -> tuple[Tensor, Tensor | None]:
        with outputs_of(self.trunk(), wanted=with_features) as outputs:
            prediction = guided_prediction(self._call, latents, times, condition, self.settings.guidance_gradient)
        # The rows without the negative branch are the last ones of the last call.
        return prediction, mean_over_positions(outputs[-1][-len(latents) :]) if with_features else None

    def _call(self, latents: Tensor, times: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        embeddings = {key: value.to(self.dtype) for key, value in embeddings.items()}
        return self.denoise(latents.to(self.dtype), self.process.model_times(times), embeddings).float()

    # Rollout

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        return [("denoising", self.sampling.log_prob_unit)]

    @torch.no_grad()
    def rollout(self, requests: Sequence[Request], sampling: Any = None) -> Trajectory:
        return self._generate(list(requests), sampling or self.sampling, clean=None)

    @torch.no_grad()
    def encode(self, prompts: Sequence[Prompt], samples: Sequence[Sample], keys: Sequence[Any]) -> Trajectory:
        """Given samples as a trajectory: the sampler's transitions, drawn with the true clean latent as the prediction.

        It ends at the samples' own latents. The log-prob of its stochastic transitions under the model is, up to
        weights, the denoising objective (Ho et al. 2020, eq. 5). The rollout log-probs are NaN: there was no rollout.
        """
        requests = [Request(prompt, prompt.index, key) for prompt, key in zip(prompts, keys, strict=True)]
        rows = self.settings.decoding_rows
        with torch.autocast(self.device.type, enabled=False):
            latents = [self.latents_from_samples(samples[i : i + rows]).cpu() for i in range(0, len(samples), rows)]
        trajectory = self._generate(requests, self.sampling, clean=torch.cat(latents))
        segment = trajectory.segments[0]
        segment.rollout_log_probs.masked_fill_(segment.trained_mask, torch.nan)
        return trajectory

    def as_likelihood(self, trajectory: Trajectory, settings: ForwardProcessSettings, round: int = 0) -> Trajectory:
        """See `Policy.as_likelihood`: the final latents of the last segment, noised `settings.draws` times."""
        segment = trajectory.segments[-1]
        assert isinstance(segment, DenoisingSegment)
        return Trajectory([forward_segment(segment, self.process, settings, round)], trajectory.requests)

    @classmethod
    def schedule_of(cls, sampling: DenoisingSampling, process: NoiseProcess, denoiser: Any, vae: Any) -> Schedule:
        """The table of `sampling`, from configurations; UserError if its sampler, window or size does not fit."""
        shape = cls.latent_shape_of(sampling, denoiser, vae)
        return process.schedule(sampling, cls.sequence_length(shape, denoiser))

    def schedule(self, sampling: DenoisingSampling) -> Schedule:
        """The table of `sampling` for this model; UserError if it does not fit."""
        return self.schedule_of(sampling, self.process, self.denoiser.config, self.vae.config)

    def latent_shape(self, sampling: DenoisingSampling) -> tuple[int, ...]:
        """Shape of one sample's latent."""
        return self.latent_shape_of(sampling, self.denoiser.config, self.vae.config)

    def _generate(self, requests: list[Request], sampling: DenoisingSampling, clean: Tensor | None) -> Trajectory:
        schedule = self.schedule(sampling)
        is_guided = bool((schedule.guidance_scale != 1).any())
        positives = [request.prompt.text for request in requests]
        negatives = [
            sampling.negative_prompt if request.prompt.negative is None else request.prompt.negative
            for request in requests
        ]
        texts = list(dict.fromkeys(positives + negatives if is_guided else positives))
        position = {text: index for index, text in enumerate(texts)}
        num_rows, num_steps = len(requests), len(schedule.std)
        trained = (schedule.std > 0).expand(num_rows, -1).clone()
        segment = DenoisingSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.zeros(num_rows, num_steps),
            trained_mask=trained,
            length_mask=torch.ones_like(trained),
            context_mask=torch.zeros_like(trained),
            log_prob_unit=sampling.log_prob_unit,
            version=self.version,
            ended=["complete"] * num_rows,
            keys=[request.key for request in requests],
            sampler=schedule.sampler,
            times=schedule.times.expand(num_rows, -1).clone(),
            std=schedule.std.expand(num_rows, -1).clone(),
            guidance_scale=schedule.guidance_scale.expand(num_rows, -1).clone(),
            conditions=self._encode_texts(texts),
            condition_index=torch.tensor([position[text] for text in positives]),
            negative_index=torch.tensor([position[text] if is_guided else -1 for text in negatives]),
        )
        stored = [
            self._denoise_rows(segment, rows, sampling, None if clean is None else clean[rows])
            for rows in torch.arange(num_rows).split(self.settings.sampling_rows)
        ]
        segment.states = {step: torch.cat([states[step] for states in stored]) for step in stored[0]}
        segment.final_latents = segment.states.pop(num_steps)
        return Trajectory([segment], requests)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        rows = self.settings.sampling_rows
        parts = [self.encode_prompts(texts[i : i + rows]) for i in range(0, len(texts), rows)]
        return {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0]}

    def _denoise_rows(
        self, segment: DenoisingSegment, rows: Tensor, sampling: DenoisingSampling, clean: Tensor | None
    ) -> dict[int, Tensor]:
        """Runs the transitions of some rows, fills their log-probs, and returns the states to keep and the last one."""
        keys = [segment.keys[row] for row in rows]
        generators = [key.generator() for key in keys]
        starts = [replace(key, sample=-1).generator() for key in keys] if sampling.shared_initial_noise else generators
        shape = self.latent_shape(sampling) if clean is None else tuple(clean.shape[1:])
        x = self._round(_noise(starts, shape)).to(self.device)
        condition = self._condition(segment, rows, segment.guidance_scale[rows].amax(1))
        states: dict[int, Tensor] = {}
        for step in range(segment.num_steps):
            time, next_time, std = self._table(segment, rows, slice(step, step + 1))
            if clean is None:
                condition = replace(condition, scale=segment.guidance_scale[rows, step])
                transition = self.transition(x, time, next_time, std, segment.sampler, condition)
            else:
                prediction = self.process.oracle(x, clean.to(self.device), time)
                transition = self.process.step(segment.sampler, x, prediction, time, next_time, std)
            following = transition.mean
            stochastic = bool(segment.std[0, step] > 0)
            if stochastic:
                following = following + expand(std, following) * _noise(generators, shape).to(self.device)
            if clean is not None and step == segment.num_steps - 1:
                following = clean.to(self.device)
            following = self._round(following)
            if stochastic:
                states |= {step: self._stored(x), step + 1: self._stored(following)}
                segment.rollout_log_probs[rows, step] = transition.log_prob(following, segment.log_prob_unit).cpu()
            x = following
        states[segment.num_steps] = self._stored(x)
        return states

    def _stored(self, x: Tensor) -> Tensor:
        return x.to("cpu", self.storage_dtype)

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.storage_dtype).float()

    def _table(self, segment: DenoisingSegment, rows: Tensor, steps: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(time, next time, std) of rows x consecutive steps, each flattened to [b * t]."""
        first, last, _ = steps.indices(segment.num_steps)
        tables = (segment.times[rows, first:last], segment.times[rows, first + 1 : last + 1], segment.std[rows, steps])
        time, next_time, std = (table.flatten().to(self.device) for table in tables)
        return time, next_time, std

    def condition(self, segment: LatentSegment, rows: Tensor, steps: slice) -> Condition:
        """The condition of rows x consecutive steps, flattened to b * t rows."""
        scale = segment.guidance_scale[rows, steps]
        return self._condition(segment, rows.repeat_interleave(scale.shape[1]), scale.flatten())

    def _condition(self, segment: LatentSegment, rows: Tensor, scale: Tensor) -> Condition:
        def gather(index: Tensor) -> dict[str, Tensor]:
            return {key: value[index[rows]].to(self.device) for key, value in segment.conditions.items()}

        is_guided = bool((scale != 1).any())
        return Condition(gather(segment.condition_index), gather(segment.negative_index) if is_guided else {}, scale)

    # Replay

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """Scores the recorded transitions, or the draws of the forward process, of `cut` again; see `Policy.replay`.

        Raises ValueError if a transition is deterministic: it has no log-prob, and its latent was not kept.
        """
        segment = trajectory.segments[cut.segment]
        if isinstance(segment, ForwardSegment):
            flat = self._score_draws(segment, cut, needs)
        else:
            assert isinstance(segment, DenoisingSegment)
            flat = self._score_transitions(segment, cut, needs)
        shape = cut.take(segment.guidance_scale).shape
        return Replay(**{name: value.unflatten(0, shape) for name, value in vars(flat).items() if value is not None})

    def _score_draws(self, segment: ForwardSegment, cut: Cut, needs: frozenset[Need]) -> Replay:
        draws = Draws.of(segment, cut, self.process, self.device)
        condition = self.condition(segment, cut.rows, cut.steps)
        prediction, features = self._predict(draws.x, draws.times, condition, "features" in needs)
        return replace(draws.score(prediction, self.process, needs), features=features)

    def _score_transitions(self, segment: DenoisingSegment, cut: Cut, needs: frozenset[Need]) -> Replay:
        time, next_time, std = self._table(segment, cut.rows, cut.steps)
        if not bool((std > 0).all()):
            raise ValueError("the cut holds a deterministic transition, which has no log-prob and is never trained.")
        steps = range(*cut.steps.indices(segment.num_steps))
        x = self._states(segment, cut.rows, steps)
        condition = self.condition(segment, cut.rows, cut.steps)
        step = self.transition(x, time, next_time, std, segment.sampler, condition, "features" in needs)
        result = Replay(features=step.features)
        if "log_prob" in needs:
            following = self._states(segment, cut.rows, range(steps.start + 1, steps.stop + 1))
            result.log_prob = step.log_prob(following, segment.log_prob_unit)
        if "entropy" in needs:
            result.entropy = samplers.gaussian_entropy(std, x[0].numel(), segment.log_prob_unit)
        if "mean" in needs:
            result.mean = step.mean
        if "std" in needs:
            result.std = std
        if "prediction" in needs:
            result.prediction = step.prediction
        if "clean_prediction" in needs:
            result.clean_prediction = self.process.clean(x, step.prediction, time)
        return result

    def _states(self, segment: DenoisingSegment, rows: Tensor, steps: range) -> Tensor:
        """The latents before each of `steps`, flattened to [b * t, ...] float32 on the device."""
        kept = {**segment.states, segment.num_steps: segment.final_latents}
        return torch.stack([kept[step][rows] for step in steps], dim=1).flatten(0, 1).to(self.device).float()

    def plan(self, trajectory: Trajectory, roots: Tensor, budget: int) -> list[Cut]:
        """Cuts of at most `budget` rows and one step each, over the trained decisions of this policy's segments."""
        cuts = []
        for index, segment in enumerate(trajectory.segments):
            if segment.agent != self.name or not isinstance(segment, LatentSegment):
                continue
            mine = torch.isin(trajectory.roots(index), roots)
            for step in range(segment.num_steps):
                rows = (mine & segment.trained_mask[:, step]).nonzero().flatten()
                cuts += [Cut(index, part, slice(step, step + 1)) for part in rows.split(budget) if len(part)]
        return cuts

    # Decoding

    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        segment = trajectory.segments[-1]
        assert isinstance(segment, DenoisingSegment | ForwardSegment)
        final = segment.clean if isinstance(segment, ForwardSegment) else segment.final_latents
        samples: list[Sample] = []
        for latents in final.split(self.settings.decoding_rows):
            samples += self.samples_from_pixels(self.decode_latents(latents, differentiable), differentiable)
        return samples

    def decode_latents(self, latents: Tensor, differentiable: bool = False) -> Tensor:
        """Latents [b, ...] -> pixels [b, ...] float32 in [0, 1] on the device; `differentiable` keeps the gradient."""
        with torch.set_grad_enabled(differentiable), torch.autocast(self.device.type, enabled=False):
            latents = latents.to(self.device).float()
            if differentiable and self.settings.gradient_checkpointing:
                pixels = checkpoint(self.pixels_from_latents, latents, use_reentrant=False)
            else:
                pixels = self.pixels_from_latents(latents)
            return (pixels / 2 + 0.5).clamp(0, 1)

    # Weights

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"denoiser": self.denoiser}

    def export(self, folder: Path) -> None:
        export_pipeline(self.folder, folder, self.denoiser_component, self.denoiser)


def _noise(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """[B, ...] on the CPU, each row from its own generator, so that no row depends on the others."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


Families = Mapping[str, type[DenoisingPolicy]]
"""Policy classes by the name of the diffusers pipeline class that they take."""
