"""The policy that every denoising model shares: rollout, replay and the forward process of a `DenoisingModel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from modalities import samplers
from modalities.base import (
    Cut,
    DenoisingSegment,
    ForwardSegment,
    LatentSegment,
    LogProbUnit,
    Need,
    Replay,
    Request,
    Trajectory,
)
from modalities.denoising_model import DenoisingModel
from modalities.denoising_settings import DenoisingSampling
from modalities.errors import UserError
from modalities.forward_process import Draws, ForwardProcessSettings, forward_segment
from modalities.guidance import Condition
from modalities.samplers import expand
from modalities.samples import Prompt, Sample


class DenoisingPolicy(DenoisingModel):
    """The decisions of a denoising model. A family, which extends this, supplies what `DenoisingModel` asks for."""

    offers: frozenset[Need] = frozenset(get_args(Need))

    # Rollout

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        return [("denoising", self.schedule(self.sampling).log_prob_unit)]

    @torch.no_grad()
    def rollout(self, requests: Sequence[Request], sampling: Any = None) -> Trajectory:
        return self._generate(list(requests), sampling or self.sampling, clean=None)

    @torch.no_grad()
    def rollout_with_gradient(
        self, requests: Sequence[Request], last_steps: int, sampling: Any = None, early_clean: bool = False
    ) -> Trajectory:
        """See `Policy.rollout_with_gradient`; UserError if there are not so many steps.

        The final latents stay float32, and rounding to the storage dtype passes the gradient on as it is. With
        `gradient_checkpointing` only the latents between transitions are kept, and each transition is computed again.
        """
        sampling = sampling or self.sampling
        if not 1 <= last_steps <= sampling.steps:
            raise UserError(f"last_steps: {last_steps} must lie between 1 and the {sampling.steps} sampling steps.")
        return self._generate(list(requests), sampling, clean=None, last_steps=last_steps, early_clean=early_clean)

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

    def _generate(
        self,
        requests: list[Request],
        sampling: DenoisingSampling,
        clean: Tensor | None,
        last_steps: int = 0,
        early_clean: bool = False,
    ) -> Trajectory:
        if sampling.window and sampling.window.moving and len({request.key.iteration for request in requests}) > 1:
            raise ValueError("with a window that moves, all samples of a rollout must belong to the same iteration.")
        schedule = self.schedule(sampling, requests[0].key)
        is_guided = bool((schedule.guidance_scale != 1).any())
        positives = [request.prompt.text for request in requests]
        negatives = [
            sampling.negative_prompt if request.prompt.negative is None else request.prompt.negative
            for request in requests
        ]
        texts = list(dict.fromkeys(positives + negatives if is_guided else positives))
        position = {text: index for index, text in enumerate(texts)}
        num_rows, num_steps = len(requests), len(schedule.std)
        exists = torch.ones(num_rows, num_steps, dtype=torch.bool)
        if early_clean:
            exists[:, num_steps - last_steps :] = False
        trained = exists & (schedule.std > 0)
        segment = DenoisingSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.zeros(num_rows, num_steps),
            trained_mask=trained,
            length_mask=exists,
            context_mask=torch.zeros_like(trained),
            log_prob_unit=schedule.log_prob_unit,
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
        parts = [
            self._denoise_rows(segment, rows, sampling, None if clean is None else clean[rows], last_steps, early_clean)
            for rows in torch.arange(num_rows).split(self.settings.sampling_rows)
        ]
        segment.states = {step: torch.cat([states[step] for states, _ in parts]) for step in parts[0][0]}
        with torch.set_grad_enabled(last_steps > 0):
            segment.final_latents = torch.cat([final for _, final in parts])
        if not segment.final_latents.isfinite().all():
            raise FloatingPointError(f"policy {self.name!r} gave latents that are not finite while sampling.")
        return Trajectory([segment], requests)

    def _encode_texts(self, texts: list[str]) -> dict[str, Tensor]:
        rows = self.settings.sampling_rows
        parts = [self.encode_prompts(texts[i : i + rows]) for i in range(0, len(texts), rows)]
        return {key: torch.cat([part[key].cpu() for part in parts]) for key in parts[0]}

    def _denoise_rows(
        self,
        segment: DenoisingSegment,
        rows: Tensor,
        sampling: DenoisingSampling,
        clean: Tensor | None,
        last_steps: int,
        early_clean: bool,
    ) -> tuple[dict[int, Tensor], Tensor]:
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
            stochastic = bool(segment.std[0, step] > 0)
            with torch.set_grad_enabled(step >= segment.num_steps - last_steps):
                if clean is None:
                    condition = replace(condition, scale=segment.guidance_scale[rows, step])
                    transition = self.recomputed(self.transition)(x, time, next_time, std, segment.sampler, condition)
                else:
                    prediction = self.process.oracle(x, clean.to(self.device), time)
                    transition = self.process.step(segment.sampler, x, prediction, time, next_time, std)
                if early_clean and step == segment.num_steps - last_steps:
                    x = self._round(self.process.clean(x, transition.prediction, time))
                    break
                following = transition.mean
                if stochastic:
                    following = following + expand(std, following) * _noise(generators, shape).to(self.device)
                if clean is not None and step == segment.num_steps - 1:
                    following = clean.to(self.device)
                following = self._round(following)
            if stochastic:
                states |= {step: self._stored(x), step + 1: self._stored(following)}
                segment.rollout_log_probs[rows, step] = transition.log_prob(following, segment.log_prob_unit).cpu()
            x = following
        states.pop(segment.num_steps, None)
        if not last_steps:
            return states, self._stored(x)
        with torch.enable_grad():
            return states, x.cpu()

    def _stored(self, x: Tensor) -> Tensor:
        return x.to("cpu", self.storage_dtype)

    def _round(self, x: Tensor) -> Tensor:
        rounded = x.detach().to(self.storage_dtype).float()
        # The difference of neighbours is exact, so this is `rounded`, and the gradient of x.
        return x + (rounded - x.detach()) if x.requires_grad else rounded

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
        if "step_size" in needs:
            result.step_size = self.process.step_size(time, next_time)
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


def _noise(generators: Sequence[torch.Generator], shape: tuple[int, ...]) -> Tensor:
    """[B, ...] on the CPU, each row from its own generator, so that no row depends on the others."""
    return torch.stack([torch.randn(shape, generator=generator) for generator in generators])


Families = Mapping[str, type[DenoisingPolicy]]
"""Policy classes by the name of the diffusers pipeline class that they take."""
