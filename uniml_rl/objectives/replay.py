"""Recent experience that is trained again, each decision with the advantage and the old log-prob that it had."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from modalities.trajectories import concatenate, load_trajectory, trajectory_state
from uniml_rl.experience import Experience, SegmentExperience

_GROUPS_PER_ROLLOUT = 1 << 32
"""Keeps the groups of different rollouts apart."""


class ExperienceReplay:
    """The experience of the last `iterations` rollouts, of this rank."""

    def __init__(self, iterations: int) -> None:
        self._recent: deque[Experience] = deque(maxlen=iterations)

    def beside(self, newest: Experience) -> Experience:
        """The newest experience with what came before it."""
        return concatenate_experience([newest, *reversed(self._recent)])

    def remember(self, newest: Experience) -> None:
        """Takes the newest experience in, and the oldest out if it is full."""
        self._recent.append(newest)

    def state_dict(self) -> dict[str, Any]:
        """Everything, oldest first, as plain values and tensors."""
        return {
            "experience": [
                {
                    "trajectory": trajectory_state(experience.trajectory),
                    "segments": [
                        {each.name: getattr(segment, each.name) for each in fields(segment)}
                        for segment in experience.segments
                    ],
                }
                for experience in self._recent
            ]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self._recent.clear()
        for part in state["experience"]:
            segments = [SegmentExperience(**segment) for segment in part["segments"]]
            self._recent.append(Experience(load_trajectory(part["trajectory"]), segments))


def concatenate_experience(parts: Sequence[Experience]) -> Experience:
    """The rows of all parts, in order, in groups of their own; what only some of them hold is 0 for the others."""
    if len(parts) == 1:
        return parts[0]
    trajectory = concatenate([part.trajectory for part in parts])
    segments = []
    for index, joined in enumerate(trajectory.segments):
        own = [part.segments[index] for part in parts]
        groups = [segment.groups + age * _GROUPS_PER_ROLLOUT for age, segment in enumerate(own)]
        joined.group = torch.cat(groups)
        values = {each.name: _joined([getattr(s, each.name) for s in own], joined.num_steps) for each in fields(own[0])}
        segments.append(replace(own[0], **values | {"groups": joined.group}))
    return Experience(trajectory, segments)


def _joined(found: Sequence[Any], steps: int) -> Any:
    """Tensors [B, T, ...] one after the other, padded to `steps` on the right; dicts of them entry by entry."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _joined([values[key] for values in found], steps) for key in first}
    if not isinstance(first, Tensor) or first.ndim < 2:
        return first
    padded = [pad(value, (0, 0) * (value.ndim - 2) + (0, steps - value.shape[1])) for value in found]
    return torch.cat(padded)
