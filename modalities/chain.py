"""A chain of two policies under one reward: the first rewrites each prompt, the second makes samples from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, model_validator
from torch import nn

from modalities.base import (
    Cut,
    LogProbUnit,
    Need,
    Policy,
    PolicyConfig,
    Replay,
    Request,
    Segment,
    Trajectory,
    with_parent,
)
from modalities.errors import UserError
from modalities.forward_process import ForwardProcessSettings
from modalities.samples import Prompt, Sample, Text
from modalities.settings import Settings
from modalities.summary import PolicySummary
from modalities.weights import WeightSets

_SAMPLES_PER_GROUP = 2**20


class ChainSampling(Settings):
    """How a chain is sampled: each part as its own block says, unless a key is replaced here."""

    branch: int = Field(default=2, ge=1)
    """Samples of the second part that continue each text."""
    first: dict[str, Any] = Field(default_factory=dict)
    """Keys of the first part's `sampling` block that are replaced."""
    second: dict[str, Any] = Field(default_factory=dict)
    """Keys of the second part's `sampling` block that are replaced."""


class ChainPolicyConfig(PolicyConfig):
    """Two policies of this file as one: both are trained by the reward of what the second one makes."""

    type: Literal["chain"] = "chain"
    """Selects this policy."""
    parts: list[str] = Field(min_length=2, max_length=2)
    """Names of the two policies: the first writes a text, the second makes a sample from it. A stage that trains one of
    them by itself trains the same weights."""
    second_groups: Literal["prompt", "rewrite"] = "prompt"
    """With which others a sample of the second part is compared: all of the prompt, whichever text they come from (more
    of them, but texts of unequal quality add noise), or only the `branch` samples of the same text."""
    sampling: ChainSampling = ChainSampling()
    """How both parts are sampled."""

    @model_validator(mode="after")
    def _parts_fit(self) -> ChainPolicyConfig:
        if self.parts[0] == self.parts[1]:
            raise ValueError(f"parts: {self.parts} names the same policy twice")
        if self.second_groups == "rewrite" and self.sampling.branch < 2:
            raise ValueError("second_groups: rewrite compares the samples of one text, so sampling.branch must be >= 2")
        return self

    def join(self, name: str, parts: Sequence[Policy]) -> ChainPolicy:
        """The chain of the built policies that `parts` names. Raises UserError if they do not fit."""
        return ChainPolicy(name, parts[0], parts[1], self)

    def join_summaries(self, parts: Sequence[PolicySummary]) -> PolicySummary:
        """What `uniml-rl check` says of the chain. Raises UserError if the parts do not fit."""
        first, second = parts
        check_parts(self.parts, first.sample_kind, first.decisions, second.decisions)

        def fit(prompts: Sequence[Prompt], sampling: ChainSampling) -> int:
            samplings = part_sampling(sampling, self.parts, own)
            second.fit([], samplings[1])  # its prompts are not written yet
            return first.fit(prompts, samplings[0])

        own = [first.sampling, second.sampling]
        samplings = part_sampling(self.sampling, self.parts, own)
        fit([], self.sampling)
        offers, feature_size = shared_offers(parts)
        return PolicySummary(
            model=f"{first.model} -> {second.model}",
            sample_kind=second.sample_kind,
            decisions=[*first.decisions, *second.decisions],
            offers=offers,
            weights=first.weights + second.weights,
            feature_size=feature_size,
            windowed=any(getattr(each, "window", None) is not None for each in samplings),
            sampling=self.sampling,
            fit=fit,
            rows=[*first.rows, *second.rows],
        )


def part_sampling(sampling: ChainSampling, names: Sequence[str], own: Sequence[Any]) -> list[Any]:
    """The sampling settings of both parts: their own, with the keys that the chain replaces.

    Raises UserError for a key or value that a part does not take.
    """
    result = []
    for key, name, settings in zip(("first", "second"), names, own, strict=True):
        replaced = getattr(sampling, key)
        if not replaced:
            result.append(settings)
            continue
        if settings is None:
            raise UserError(f"sampling.{key}: policy {name!r} has no sampling settings to replace.")
        try:
            result.append(type(settings).model_validate({**settings.model_dump(), **replaced}))
        except ValidationError as error:
            problem = error.errors()[0]
            raise UserError(
                f"sampling.{key}.{'.'.join(map(str, problem['loc']))}: {problem['msg']} (policy {name!r})."
            ) from error
    return result


def check_parts(
    names: Sequence[str],
    first_kind: str,
    first: list[tuple[str, LogProbUnit]],
    second: list[tuple[str, LogProbUnit]],
) -> None:
    """Raises UserError if the first part makes no text, or one of them is a chain itself."""
    if first_kind != "text":
        raise UserError(f"parts: {names[0]!r} makes {first_kind}; the first part must be a text policy.")
    for name, decisions in zip(names, (first, second), strict=True):
        if len(decisions) != 1:
            raise UserError(f"parts: {name!r} is a chain itself; a part makes one segment.")


def shared_offers(parts: Sequence[Policy | PolicySummary]) -> tuple[frozenset[Need], int]:
    """What both parts offer, and the width of their features, which one value head can read only if it is the same."""
    first, second = parts
    shared = first.offers & second.offers
    if first.feature_size == second.feature_size:
        return shared, first.feature_size
    return shared - {"features"}, 0


class ChainPolicy(Policy):
    """Delegates every segment to the part that made it. Rows of the second segment descend from those of the first."""

    def __init__(self, name: str, first: Policy, second: Policy, config: ChainPolicyConfig) -> None:
        check_parts(config.parts, first.sample_kind, first.decisions(), second.decisions())
        self.name, self.config, self.sampling = name, config, config.sampling
        self.parts = (first, second)
        self.sample_kind = second.sample_kind
        self.device = second.device
        # The narrower type decides whether log-probs are scored again before an update.
        self.dtype = min((part.dtype for part in self.parts), key=lambda dtype: dtype.itemsize)
        self.offers, self.feature_size = shared_offers(self.parts)
        # Sets of its own over both parts' modules: one swap, and the parts' own sets stay out of it.
        self.weight_sets = WeightSets(self.trainable_modules())
        self._part_sampling(self.sampling)  # a wrong key is an error now, not at the first rollout

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        """See `Policy.decisions`."""
        return [decision for part in self.parts for decision in part.decisions()]

    def _part_sampling(self, sampling: ChainSampling) -> list[Any]:
        return part_sampling(sampling, self.config.parts, [part.sampling for part in self.parts])

    def rollout(self, requests: Sequence[Request], sampling: ChainSampling | None = None) -> Trajectory:
        """See `Policy.rollout`: one text per request, then `branch` samples of the second part for each text."""
        sampling = sampling or self.sampling
        first, second = self.parts
        first_sampling, second_sampling = self._part_sampling(sampling)
        texts = first.rollout(requests, first_sampling)
        parent = torch.arange(len(requests)).repeat_interleave(sampling.branch)
        continued = [
            self._continue(request, text, number, sampling.branch)
            for request, text in zip(requests, first.decode(texts), strict=True)
            for number in range(sampling.branch)
        ]
        samples = second.rollout(continued, second_sampling)
        segments: list[Segment] = [texts.segments[0], with_parent(samples.segments[0], parent)]
        return Trajectory(segments, list(requests), [list(requests), continued])

    def _continue(self, request: Request, text: Sample, number: int, branch: int) -> Request:
        assert isinstance(text, Text)
        old, key = request.prompt, request.key
        prompt = Prompt(text.text, old.index, old.negative, old.record)
        group = request.group
        if self.config.second_groups == "rewrite":
            group = group * _SAMPLES_PER_GROUP + key.sample
        return Request(prompt, group, replace(key.at_segment(1), sample=key.sample * branch + number))

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        """See `Policy.replay`."""
        return self.parts[cut.segment].replay(trajectory.part(cut.segment), replace(cut, segment=0), needs)

    def as_likelihood(self, trajectory: Trajectory, settings: ForwardProcessSettings, round: int = 0) -> Trajectory:
        """See `Policy.as_likelihood`: each part's own, of the text and of the sample given the text."""
        segments = [
            part.as_likelihood(trajectory.part(index), settings, round).segments[0]
            for index, part in enumerate(self.parts)
        ]
        return replace(trajectory, segments=segments)

    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        """See `Policy.decode`: what the second part made."""
        return self.parts[1].decode(trajectory.part(1), differentiable)

    def texts(self, trajectory: Trajectory) -> list[Sample]:
        """What the first part wrote, for each row of the first segment."""
        return self.parts[0].decode(trajectory.part(0))

    def trainable_modules(self) -> dict[str, nn.Module]:
        """See `Policy.trainable_modules`: those of both parts, as `part_module`."""
        return {f"{part.name}_{key}": module for part in self.parts for key, module in part.trainable_modules().items()}

    def plan(self, trajectory: Trajectory, roots: torch.Tensor, budget: int) -> list[Cut]:
        """See `Policy.plan`: each part cuts its own segment."""
        return [
            replace(cut, segment=index)
            for index, part in enumerate(self.parts)
            for cut in part.plan(
                trajectory.part(index), torch.isin(trajectory.roots(index), roots).nonzero()[:, 0], budget
            )
        ]

    def forget_all(self) -> None:
        """See `Policy.forget_all`; also drops what stages of the parts alone have kept."""
        super().forget_all()
        for part in self.parts:
            part.forget_all()

    def export(self, folder: Path) -> None:
        """See `Policy.export`: one folder for each part, by its name."""
        for part in self.parts:
            (folder / part.name).mkdir(parents=True, exist_ok=True)
            part.export(folder / part.name)

    def set_version(self, version: int) -> None:
        """See `Policy.set_version`."""
        super().set_version(version)
        for part in self.parts:
            part.set_version(version)
