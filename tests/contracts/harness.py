"""What the contract suite does with a policy: real rollouts, updates and iterations, nothing simulated but rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contracts.catalog import POLICY
from torch import Tensor
from torch.nn.functional import pad

from modalities.base import Need, Policy, Request, Segment, TokenSegment, Trajectory, summary_of
from modalities.critic import Critic, ValueHead
from modalities.randomness import SampleKey, seeded_generator
from modalities.samples import Prompt, Sample
from rewards.combine import RewardResult
from uniml_rl.algorithms.presets import resolve_algorithm
from uniml_rl.build import StageConfig, build_objective
from uniml_rl.engines.base import Engine
from uniml_rl.monitor.metrics import Metrics
from uniml_rl.objectives.base import Objective
from uniml_rl.objectives.forward_process import ForwardProcessObjective
from uniml_rl.trainer import Scores, Trainer

TEXTS = ["a", "c b d a"]
GROUP_SIZE = 3
ROWS = len(TEXTS) * GROUP_SIZE


def requests() -> list[Request]:
    return [
        Request(Prompt(text, index), index, SampleKey(7, 0, 0, index, sample))
        for index, text in enumerate(TEXTS)
        for sample in range(GROUP_SIZE)
    ]


def scored(total: Tensor) -> RewardResult:
    """Total rewards [B], all valid."""
    return RewardResult(total, torch.ones(len(total), dtype=torch.bool), {}, {}, {}, {})


def random_rewards(count: int, seed: int) -> Tensor:
    """[count], different within every group."""
    return torch.rand(count, generator=seeded_generator(seed))


class RandomRewards:
    """Scores that have nothing to do with the samples."""

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration: int) -> RewardResult:
        assert len(samples) == len(prompts)
        return scored(random_rewards(len(samples), iteration))


@dataclass
class Update:
    """The first update of a rollout, through the real objective; nothing steps."""

    metrics: dict[str, float]
    gradient: Tensor  # of every trained parameter, one after the other


def make_critic(policy: Policy) -> Critic:
    critic = Critic(ValueHead(policy.feature_size, hidden_size=8, seed=0), trunk=None, trunk_gradient=True)
    with torch.no_grad():
        for parameter in critic.head.parameters():
            parameter += 0.1  # a last layer of zeros would give the trunk no gradient
    return critic


def objective_for(policy: Policy, algorithm: dict[str, Any]) -> Objective:
    """The objective of an `algorithm` block; UserError if it does not fit the policy."""
    settings = resolve_algorithm(algorithm)
    settings.check_policy(summary_of(policy), GROUP_SIZE)
    return build_objective(settings, make_critic(policy) if settings.needs_critic else None, None)


def first_update(
    policy: Policy,
    trajectory: Trajectory,
    algorithm: dict[str, Any],
    engine: Engine,
    budget: int,
    spread: float = 1.0,
) -> Update:
    objective = objective_for(policy, algorithm)
    if isinstance(objective, ForwardProcessObjective) and "old" not in policy.weight_sets.names():
        policy.keep("old")
    roots = torch.arange(trajectory.segments[0].num_rows)
    metrics = Metrics()
    rewards = scored(spread * random_rewards(len(trajectory.leaf_prompts()), seed=3))
    trajectory, rewards = objective.as_trained(policy, trajectory, rewards)
    cuts = objective.plan(policy, trajectory, roots, budget)
    with engine.autocast():
        experience = objective.prepare(policy, trajectory, rewards, cuts, engine, metrics)
    minibatch = objective.minibatch(experience, roots, engine)
    critic = getattr(objective, "critic", None)
    modules = [*policy.trainable_modules().values(), *([critic.head] if critic else [])]
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    for cut in cuts:
        with engine.autocast():
            loss = objective.loss(policy, minibatch, cut, 0, metrics)
        engine.backward(loss)
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
    for parameter in parameters:
        parameter.grad = None
    return Update(metrics.reduce(engine), gradient)


def log_probs(policy: Policy, trajectory: Trajectory) -> Tensor:
    """Of every trained decision of every segment, in the order of the plan."""
    needs: frozenset[Need] = frozenset({"log_prob"})
    cuts = policy.plan(trajectory, torch.arange(trajectory.segments[0].num_rows), 100)
    with torch.no_grad():
        replayed = [
            policy.replay(trajectory, cut, needs).of("log_prob")[
                cut.take(trajectory.segments[cut.segment].trained_mask)
            ]
            for cut in cuts
        ]
    return torch.cat(replayed)


def padded(segment: Segment) -> Segment:
    """The same decisions with more padding: prompts on the left, responses on the right."""
    if not isinstance(segment, TokenSegment):
        return segment
    columns = ("tokens", "rollout_log_probs", "trained_mask", "length_mask", "context_mask")
    wider = {name: pad(getattr(segment, name), (0, 12)) for name in columns}
    prompts = {name: pad(getattr(segment, name), (3, 0)) for name in ("prompt_tokens", "prompt_mask")}
    if hasattr(segment, "text_states"):
        prompts["text_states"] = pad(segment.text_states, (0, 0, 3, 0))
    return replace(segment, **wider, **prompts)


def perturb(policy: Policy, scale: float) -> None:
    """Moves every trainable weight a little, as training would."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.weight_sets.parameters().values():
            parameter += scale * torch.randn(parameter.shape, generator=generator)


def make_trainer(
    policy: Policy,
    algorithm: dict[str, Any],
    engine: Engine,
    folder: Path,
    scores: Scores | None = None,
    seed: int = 0,
    **stage_keys: Any,
) -> Trainer:
    """The real trainer of a one-stage run; `folder` takes the prompts."""
    objective = objective_for(policy, algorithm)
    critic = getattr(objective, "critic", None)
    (folder / "prompts.txt").write_text("\n".join(TEXTS))
    stage = StageConfig.model_validate(
        {
            "name": "contract",
            "policy": POLICY,
            "prompts": {"type": "file", "path": str(folder / "prompts.txt")},
            "prompts_per_iteration": len(TEXTS),
            "group_size": GROUP_SIZE,
            "rewards": {"unused": {"type": "regex", "pattern": "a"}},
            "algorithm": algorithm,
            "optimizer": {"learning_rate": 1e-2},
            "critic": {} if critic else None,
            "micro_batch": 4,
            "until": {"iterations": 1},
        }
        | stage_keys
    )
    optimizers = {POLICY: (policy.trainable_modules(), stage.optimizer)}
    if critic and stage.critic:
        optimizers["critic"] = (critic.trainable_modules(), stage.critic.optimizer)
    engine.attach(optimizers)
    objective.start(policy)
    return Trainer(policy, stage.prompts.build(seed), scores or RandomRewards(), objective, engine, stage, 0, seed)


def kept_for_backward(compute: Callable[[], Any], parameters: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
