"""Rows of several rollouts in one trajectory, some rows of one, and trajectories as plain data for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, astuple, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from modalities.base import DenoisingSegment, Request, Segment, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Prompt

# Joining


def concatenate(trajectories: Sequence[Trajectory]) -> Trajectory:
    """The rows of all `trajectories` of one policy, in order; each keeps its group, its key and what replay needs.

    Responses of unequal length are padded on the right, prompts on the left. The version is the oldest one. Raises
    ValueError if there is none, or if rows cannot go together: other agents, temperatures, samplers, numbers of
    denoising steps or sizes of latents. A latent before a transition that only other rows' samplers drew is NaN.
    """
    if not trajectories:
        raise ValueError("there is no trajectory to concatenate.")
    segments = []
    for index, parts in enumerate(zip(*(trajectory.segments for trajectory in trajectories), strict=True)):
        segments.append(_joined(parts))
        if index:
            starts = _starts([trajectory.segments[index - 1].num_rows for trajectory in trajectories])
            segments[-1].parent = torch.cat([_parent(part) + at for part, at in zip(parts, starts, strict=True)])
    lists = zip(*(trajectory.part_requests for trajectory in trajectories), strict=True)
    return Trajectory(
        segments,
        [request for trajectory in trajectories for request in trajectory.requests],
        [[request for requests in parts for request in requests] for parts in lists],
    )


def _starts(sizes: Sequence[int]) -> list[int]:
    return torch.tensor([0, *sizes]).cumsum(0)[:-1].tolist()


def _parent(segment: Segment) -> Tensor:
    return torch.arange(segment.num_rows) if segment.parent is None else segment.parent


def _joined(parts: Sequence[Segment]) -> Segment:
    if len({type(part) for part in parts}) > 1:
        raise ValueError(f"segments of kinds {sorted({part.kind for part in parts})} cannot be one segment.")
    table_starts = _starts([_table_size(part) for part in parts])
    states = {step for part in parts if isinstance(part, DenoisingSegment) for step in part.states}
    values: dict[str, Any] = {}
    for each in fields(parts[0]):
        found = [getattr(part, each.name) for part in parts]
        match each.metadata.get("layout"):
            case "rows" if isinstance(found[0], list):
                values[each.name] = [entry for entries in found for entry in entries]
            case "rows":
                values[each.name] = _cat(each.name, found)
            case "steps":
                values[each.name] = _cat(each.name, [_right_pad(value, _width(found)) for value in found])
            case "prompts":
                values[each.name] = {name: _cat(name, [tables[name] for tables in found]) for name in found[0]}
            case "padded prompts":
                values[each.name] = _cat(each.name, [_left_pad(value, _width(found)) for value in found])
            case "prompt index":
                shifted = [index + at * (index >= 0) for index, at in zip(found, table_starts, strict=True)]
                values[each.name] = torch.cat(shifted)
            case "states":
                values[each.name] = {step: _cat_states(found, parts, step) for step in sorted(states)}
            case "total":
                values[each.name] = sum(found)
            case "oldest":
                values[each.name] = min(found)
            case "parent":
                values[each.name] = None
            case None:
                values[each.name] = _the_same(parts[0], each, found)
            case other:
                raise ValueError(f"{type(parts[0]).__name__}.{each.name} has the unknown layout {other!r}.")
    return type(parts[0])(**values)


def _the_same(segment: Segment, each: Field[Any], found: Sequence[Any]) -> Any:
    if not isinstance(found[0], str | int | float):
        raise TypeError(f"{type(segment).__name__}.{each.name} does not state its layout; see modalities/segments.py.")
    if len(set(found)) > 1:
        raise ValueError(f"rows with different {each.name} cannot be one segment: {sorted(set(found))}.")
    return found[0]


def _cat(name: str, values: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(value.shape[1:]) for value in values}
    if len(shapes) > 1:
        raise ValueError(f"rows whose {name} have shapes {sorted(shapes)} cannot be one segment.")
    return torch.cat(list(values))


def _cat_states(found: Sequence[Mapping[int, Tensor]], parts: Sequence[Segment], step: int) -> Tensor:
    example = next(states[step] for states in found if step in states)
    missing = (example.new_full((part.num_rows, *example.shape[1:]), torch.nan) for part in parts)
    return _cat("states", [states.get(step, none) for states, none in zip(found, missing, strict=True)])


def _width(values: Sequence[Tensor]) -> int:
    return max(value.shape[1] for value in values)


def _right_pad(value: Tensor, width: int) -> Tensor:
    return pad(value, (0, 0) * (value.ndim - 2) + (0, width - value.shape[1]))


def _left_pad(value: Tensor, width: int) -> Tensor:
    return pad(value, (0, 0) * (value.ndim - 2) + (width - value.shape[1], 0))


def _of_layout(segment: Segment, *layouts: str) -> Iterator[tuple[str, Any]]:
    """(name, value) of the fields with one of the layouts."""
    for each in fields(segment):
        if each.metadata.get("layout") in layouts:
            yield each.name, getattr(segment, each.name)


def _table_size(segment: Segment) -> int:
    for _, table in _of_layout(segment, "prompts", "padded prompts"):
        return len(next(iter(table.values()))) if isinstance(table, dict) else len(table)
    return 0


# Selecting


def select(trajectory: Trajectory, roots: Tensor) -> Trajectory:
    """The rows `roots` [b] int64 of the first segment, in that order, with all that descends from them.

    A row may be taken more than once. Padding, prompts and latents that only other rows needed are left out. The number
    of near ties stays that of all rows.
    """
    rows = roots
    segments, kept = [], [roots]
    for index, segment in enumerate(trajectory.segments):
        if not index:
            segments.append(_taken(segment, rows))
            continue
        parent = _parent(segment)
        children = [(parent == row).nonzero().flatten() for row in rows.tolist()]
        rows = torch.cat(children) if children else rows
        segments.append(_taken(segment, rows))
        counts = torch.tensor([len(own) for own in children], dtype=torch.long)
        segments[-1].parent = torch.arange(len(counts)).repeat_interleave(counts)
        kept.append(rows)
    return Trajectory(
        segments,
        [trajectory.requests[row] for row in roots.tolist()],
        [
            [requests[row] for row in own.tolist()]
            for requests, own in zip(trajectory.part_requests, kept, strict=False)
        ],
    )


def _taken(segment: Segment, rows: Tensor) -> Segment:
    values: dict[str, Any] = {"parent": None}
    for name, value in _of_layout(segment, "rows", "steps"):
        values[name] = [value[row] for row in rows.tolist()] if isinstance(value, list) else value[rows]
    for name, value in _of_layout(segment, "states"):
        values[name] = {step: state[rows] for step, state in value.items()}
    taken = _with_used_prompts(replace(segment, **values), rows)
    if isinstance(taken, TokenSegment):
        return _without_padding(taken)
    if isinstance(taken, DenoisingSegment):
        stochastic = (taken.std > 0).any(0).nonzero().flatten().tolist()
        needed = {*stochastic, *(step + 1 for step in stochastic)}
        taken.states = {step: state for step, state in taken.states.items() if step in needed}
    return taken


def _with_used_prompts(segment: Segment, rows: Tensor) -> Segment:
    """With the tables' entries that the rows point to; a segment whose tables are empty stays as it is."""
    index = {name: value[rows] for name, value in _of_layout(segment, "prompt index") if len(value)}
    if not index:
        return segment
    used = torch.cat(list(index.values())).unique()
    used = used[used >= 0]
    values: dict[str, Any] = {
        name: torch.where(value >= 0, torch.searchsorted(used, value), -1) for name, value in index.items()
    }
    for name, table in _of_layout(segment, "prompts", "padded prompts"):
        values[name] = {key: t[used] for key, t in table.items()} if isinstance(table, dict) else table[used]
    return replace(segment, **values)


def _without_padding(segment: TokenSegment) -> TokenSegment:
    columns = (segment.length_mask | segment.context_mask).any(0).nonzero()
    width = int(columns.max()) + 1 if len(columns) else 1
    values = {name: value[:, :width] for name, value in _of_layout(segment, "steps")}
    if segment.prompt_mask.any():
        longest = int(segment.prompt_mask.sum(1).max())
        values |= {name: table[:, -longest:] for name, table in _of_layout(segment, "padded prompts")}
    return replace(segment, **values)


# Plain data


def trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as dicts, lists, texts, numbers and CPU tensors, which `torch.load` reads with `weights_only`.

    Raises TypeError for a prompt whose record holds anything else.
    """
    lists = [trajectory.requests, *trajectory.part_requests]
    prompts = {id(request.prompt): request.prompt for requests in lists for request in requests}
    place = {identity: number for number, identity in enumerate(prompts)}
    return {
        "prompts": [
            {"text": each.text, "index": each.index, "negative": each.negative, "record": _plain(each.record, each)}
            for each in prompts.values()
        ],
        "requests": [
            [[place[id(request.prompt)], request.group, *astuple(request.key)] for request in requests]
            for requests in lists
        ],
        "segments": [_segment_state(segment) for segment in trajectory.segments],
    }


def _segment_state(segment: Segment) -> dict[str, Any]:
    values = {each.name: getattr(segment, each.name) for each in fields(segment)}
    state = {name: _detached(value) for name, value in values.items()}
    return state | {"keys": [list(astuple(key)) for key in segment.keys], "class": _name_of(type(segment))}


def _detached(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached(entry) for key, entry in value.items()}
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _plain(value: Any, prompt: Prompt) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry, prompt) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, prompt) for entry in value]
    if value is None or isinstance(value, str | bytes | int | float | Tensor):
        return value
    raise TypeError(f"the record of prompt {prompt.index} holds a {type(value).__name__}, which cannot be saved.")


def load_trajectory(state: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a `trajectory_state`; ValueError for a class of segments that nothing has imported."""
    prompts = [Prompt(**prompt) for prompt in state["prompts"]]
    requests, *part_requests = (
        [Request(prompts[prompt], group, SampleKey(*key)) for prompt, group, *key in entries]
        for entries in state["requests"]
    )
    return Trajectory([_load_segment(segment) for segment in state["segments"]], requests, part_requests)


def _load_segment(state: Mapping[str, Any]) -> Segment:
    classes = {_name_of(known): known for known in _segment_classes(Segment)}
    if state["class"] not in classes:
        raise ValueError(f"segment class {state['class']!r} is not among the imported ones: {sorted(classes)}.")
    values = {name: value for name, value in state.items() if name != "class"}
    return classes[state["class"]](**values | {"keys": [SampleKey(*key) for key in state["keys"]]})


def _name_of(segment_class: type[Segment]) -> str:
    return f"{segment_class.__module__}.{segment_class.__qualname__}"


def _segment_classes(root: type[Segment]) -> Iterator[type[Segment]]:
    yield root
    for known in root.__subclasses__():
        yield from _segment_classes(known)
