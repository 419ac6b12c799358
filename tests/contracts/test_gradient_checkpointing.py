"""`gradient_checkpointing` of every policy that has it keeps less for the backward pass, and changes no gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contracts.catalog import POLICIES, POLICY, one, run_config
from contracts.harness import kept_for_backward, requests
from tiny_models_clip import tiny_clip
from tiny_models_text import tiny_llama
from torch import Tensor

from modalities.base import Policy, Request, Trajectory
from modalities.samples import Image, Sample, Text
from uniml_rl.build import RunConfig, build_policy

SCORERS = {
    "text_reward_model": one("text_reward_model", tiny_llama),
    "image_text_reward_model-lora": one("image_text_reward_model", tiny_clip, lora={"rank": 2}),
}


def given(asked: list[Request], kind: str) -> list[Sample]:
    if kind == "text":
        return [Text("a b c d", 4, finished=True) for _ in asked]
    return [Image(torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(row))) for row in range(len(asked))]


def trajectory_of(policy: Policy) -> Trajectory:
    asked = requests()
    if policy.decisions()[0][0] != "scores":
        return policy.rollout(asked)
    prompts, keys = [request.prompt for request in asked], [request.key for request in asked]
    return policy.encode(prompts, given(asked, policy.sample_kind), keys)


def gradient(policy: Policy, trajectory: Trajectory) -> tuple[Tensor, int]:
    """Of the sum of the log-probs, and the bytes that its graphs keep."""
    modules = policy.trainable_modules().values()
    parameters = [p for module in modules for p in module.parameters()]
    kept = 0
    for cut in policy.plan(trajectory, torch.arange(trajectory.segments[0].num_rows), 100):
        losses: list[Tensor] = []

        def score(cut: Any = cut, losses: list[Tensor] = losses) -> None:
            losses.append(policy.replay(trajectory, cut, frozenset({"log_prob"})).of("log_prob").sum())

        kept += kept_for_backward(score, parameters)
        losses[0].backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), kept


def built(name: str, folder: Path, checkpointed: bool) -> Policy:
    config = run_config(name, folder)
    blocks = {
        key: block.model_copy(update={"gradient_checkpointing": checkpointed})
        if "gradient_checkpointing" in type(block).model_fields
        else block
        for key, block in config.policies.items()
    }
    assert any(getattr(block, "gradient_checkpointing", None) is checkpointed for block in blocks.values())
    return build_policy(RunConfig.model_construct(policies=blocks, seed=0), POLICY, "cpu")


@pytest.mark.parametrize("name", [name for name in (*POLICIES, *SCORERS) if name != "toy"])
def test_less_is_kept_and_the_gradient_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contracts.catalog.POLICIES", POLICIES | SCORERS)
    plain, kept = gradient(policy := built(name, tmp_path, False), trajectory := trajectory_of(policy))
    again, less = gradient(built(name, tmp_path, True), trajectory)
    assert plain.norm() > 0 and (again - plain).norm() <= 1e-6 * plain.norm()
    assert less < kept
