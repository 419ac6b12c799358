"""What is decided by memory: how divided weights sample. Reads the estimate and what the machine has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from uniml_rl.build import RunConfig
from uniml_rl.memory import GIB, STAYS, Known, estimate, in_words

SHARE = 0.9
"""Of a device's memory that a plan may fill: the estimate leaves things out."""
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class RolloutPlan:
    """How weights that are divided over ranks are sampled from, and why."""

    gathered: bool
    reason: str

    def in_words(self) -> str:
        """The decision and why."""
        return f"{'gathered' if self.gathered else 'sharded'}, {self.reason}"


def available_memory(device: str, processes: int) -> int:
    """Bytes for one process: its GPU's, or an equal share of the machine's (of the container's, if that has less)."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    limits = [int(text) for path in _CGROUP_LIMITS if path.exists() and (text := path.read_text().strip()).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits]) // processes


def plan_rollouts(config: RunConfig, known: Known, ranks: int, available: int) -> RolloutPlan | None:
    """Gathered if, in every stage, whole weights and the cache fit beside what stays; else sharded.

    `available` are the bytes of one process. None where weights are whole anyway; what the user chose stays.
    """
    splits = config.engine.splits(ranks)
    if splits.parameters == 1 and "parameters" not in splits.on_cpu:
        return None
    asked = config.engine.rollout_weights
    if asked != "auto":
        return RolloutPlan(asked == "gathered", "as engine.rollout_weights says")
    sizes = [estimate(config, index, known, ranks, gathered=True) for index in range(len(config.stages))]
    needs = [(sum(size[name] for name in STAYS), size["rollout"]) for size in sizes]
    stays, rollout = max(needs, key=sum)
    fits = stays + rollout <= SHARE * available / GIB
    return RolloutPlan(
        fits,
        f"whole weights and cache of {in_words(rollout)} beside {in_words(stays)} that stay "
        f"{'fit' if fits else 'do not fit'} into {SHARE:.0%} of {in_words(available / GIB)}",
    )
