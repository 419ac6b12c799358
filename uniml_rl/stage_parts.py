"""The objects of a stage besides its policy: where its prompts come from, and who scores, values and evaluates."""

from __future__ import annotations

from pathlib import Path

from modalities.base import Policy
from modalities.critic import Critic, ValueHead
from uniml_rl.alike import check_alike
from uniml_rl.build import RunConfig, StageConfig, build_policy, build_rewards, evaluation_sampling
from uniml_rl.data.prompts import MixedPromptStream, PromptStream
from uniml_rl.data.records import RecordStream
from uniml_rl.engines.base import Engine
from uniml_rl.evaluation import Evaluator
from uniml_rl.given import AuxiliaryLoss
from uniml_rl.stage_rewards import StageRewards


def stage_critic(config: RunConfig, stage: StageConfig, policy: Policy, device: str) -> Critic | None:
    """Values from the policy's own trunk, or from a copy of the model; None for an algorithm without a critic."""
    if stage.critic is None:
        return None
    trunk = build_policy(config, stage.policy, device) if stage.critic.source == "model" else None
    head = ValueHead((trunk or policy).feature_size, stage.critic.hidden_size, config.seed)
    return Critic(head.to(device), trunk, stage.critic.trunk_gradient)


def stage_source(config: RunConfig, stage: StageConfig) -> PromptStream | RecordStream:
    """The stage's records, or its prompts with a share of those that it rehearses."""
    if stage.prompts is None:
        assert stage.records is not None
        records: RecordStream = stage.records.build(config.seed)
        return records
    own: PromptStream = stage.prompts.build(config.seed)
    if not stage.rehearsal:
        return own
    shares = [rehearsal.share for rehearsal in stage.rehearsal]
    streams = [each.prompts.build(config.seed) for each in _rehearsed(config, stage) if each.prompts is not None]
    return MixedPromptStream([own, *streams], [1 - sum(shares), *shares])


def stage_auxiliary(config: RunConfig, stage: StageConfig) -> AuxiliaryLoss | None:
    """The supervised loss beside the algorithm's own."""
    if stage.auxiliary is None:
        return None
    records: RecordStream = stage.auxiliary.records.build(config.seed)
    return AuxiliaryLoss(stage.auxiliary, records, stage.micro_batch)


def stage_rewards(config: RunConfig, index: int, device: str, folder: Path) -> StageRewards:
    """The rewards of stage `index` and of the stages that it rehearses; `folder` is the run's."""
    stage = config.stages[index]
    sets = [build_rewards(each.rewards, device, folder) for each in (stage, *_rehearsed(config, stage))]
    return StageRewards([rewards for rewards in sets if rewards is not None], stage.reward_control, config.seed, index)


def stage_evaluator(
    config: RunConfig, index: int, policy: Policy, rewards: StageRewards, engine: Engine, device: str, folder: Path
) -> Evaluator | None:
    """The held-out evaluation of stage `index`, whose judges the leading rank alone has.

    Raises UserError if the ranks read other prompts, or a judge does not fit the policy.
    """
    stage = config.stages[index]
    settings = stage.evaluation
    if settings is None:
        return None
    prompts = settings.prompts.build(config.seed).first(settings.count)
    texts = [(prompt.text, prompt.negative) for prompt in prompts]
    check_alike(engine, f"the evaluation's prompts of stage {stage.name!r}", repr(texts))
    judges = build_rewards(settings.rewards, device, folder) if engine.leads else None
    if judges is not None:
        judges.check(policy.sample_kind, prompts[:8])
    sampling = evaluation_sampling(config.policies[stage.policy], settings)
    return Evaluator(policy, prompts, rewards.own, judges, settings, sampling, engine, index)


def _rehearsed(config: RunConfig, stage: StageConfig) -> list[StageConfig]:
    named = {each.name: each for each in config.stages}
    return [named[rehearsal.stage] for rehearsal in stage.rehearsal]
