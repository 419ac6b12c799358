"""Evaluation: held-out prompts, fixed seeds, its own sampling settings, judges that are never trained on."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.base import Policy, Request
from modalities.randomness import SampleKey
from modalities.samples import Audio, Image, Prompt, Sample, Text, Video
from rewards.combine import RewardSet
from uniml_rl.build import TOTAL, EvaluationSettings
from uniml_rl.engines.base import Engine
from uniml_rl.engines.ranks import gather_on_first
from uniml_rl.monitor.report import PairedDifference, paired_difference
from uniml_rl.stage_rewards import FADED_IN

_KINDS = {"text": Text, "image": Image, "video": Video, "audio": Audio}


@dataclass(frozen=True)
class Evaluation:
    """What was sampled from held-out prompts, and its scores."""

    prompts: list[Prompt]  # P
    samples: list[Sample]  # P x S, the samples of a prompt in a row
    scores: dict[str, Tensor]  # reward name -> [P, S] float32 raw scores, NaN where one failed; and `total`

    def prompt_of_each_sample(self) -> list[Prompt]:
        """[P x S]"""
        per_prompt = len(self.samples) // len(self.prompts)
        return [prompt for prompt in self.prompts for _ in range(per_prompt)]

    def score_lists(self) -> dict[str, list[float]]:
        """The scores as flat lists of P x S numbers."""
        return {name: values.flatten().tolist() for name, values in self.scores.items()}

    def save(self, path: Path) -> None:
        """Writes it aside and renames it, so that an existing file is always whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".writing")
        record = {
            "prompts": [[prompt.text, prompt.index] for prompt in self.prompts],
            "samples": [_as_plain(sample) for sample in self.samples],
            "scores": self.scores,
        }
        with aside.open("wb") as handle:
            torch.save(record, handle)
        os.replace(aside, path)

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Reads what `save` wrote; nothing in the file is executed."""
        record = torch.load(path, weights_only=True)
        prompts = [Prompt(text, index) for text, index in record["prompts"]]
        return cls(prompts, [_KINDS[kind](**values) for kind, values in record["samples"]], record["scores"])


def _as_plain(sample: Sample) -> tuple[str, dict[str, Any]]:
    values = {field.name: getattr(sample, field.name) for field in fields(sample) if field.name != "kind"}
    return sample.kind, {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def compare(before: Evaluation, after: Evaluation) -> dict[str, PairedDifference]:
    """The paired difference of every reward that both measured, over the same prompts."""
    return {
        name: paired_difference(before.scores[name], after.scores[name])
        for name in after.scores
        if name in before.scores
    }


def evaluation_metrics(prefix: str, evaluation: Evaluation, before: Evaluation | None) -> dict[str, float]:
    """The evaluation's numbers under their names in the vocabulary; differences only if there was one before."""
    metrics = {}
    for name, scores in evaluation.scores.items():
        valid = scores.isfinite()
        means = torch.where(valid, scores, 0.0).sum(1) / valid.sum(1)
        if valid.any():
            metrics[f"{prefix}/{name}/mean"] = float(means[means.isfinite()].double().mean())
        metrics[f"{prefix}/{name}/failures"] = float((~valid).sum())
    for name, paired in (compare(before, evaluation) if before is not None else {}).items():
        ends = {"": paired.difference, "_low": paired.low, "_high": paired.high}
        metrics |= {f"{prefix}/{name}/difference{end}": value for end, value in ends.items() if value == value}
    return metrics


class Evaluator:
    """Evaluates one policy on one stage's held-out prompts; every run of it uses the same seeds."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        rewards: RewardSet | None,
        judges: RewardSet | None,
        settings: EvaluationSettings,
        sampling: Any,
        engine: Engine,
        stage_index: int,
    ) -> None:
        self.policy = policy
        self.prompts = list(prompts)
        self.rewards = rewards
        self.judges = judges
        self.settings = settings
        self.sampling = sampling
        self.engine = engine
        self.stage_index = stage_index

    def run(self) -> Evaluation:
        """Samples and scores, in one process."""
        return self.score(self.sample())

    @torch.no_grad()
    def sample(self) -> list[Sample]:
        """The samples of this rank's share of the prompts, some prompts at a time.

        Ranks share out what one process would sample at once, so that the samples are those of one process exactly.
        """
        count, rank, ranks = self.settings.samples_per_prompt, self.engine.rank, self.engine.world_size
        at_once = max(1, self.settings.rows_at_once // count)
        starts = range(0, len(self.prompts), at_once)
        samples: list[Sample] = []
        for start in starts[len(starts) * rank // ranks : len(starts) * (rank + 1) // ranks]:
            requests = [
                Request(
                    prompt, start + position, SampleKey(self.settings.seed, self.stage_index, 0, prompt.index, number)
                )
                for position, prompt in enumerate(self.prompts[start : start + at_once])
                for number in range(count)
            ]
            with self.engine.autocast():
                trajectory = self.policy.rollout(requests, self.sampling)
            samples += self.policy.decode(trajectory)
        return samples

    @torch.no_grad()
    def score(self, samples: list[Sample]) -> Evaluation:
        """The samples of all prompts, with their scores.

        Rewards that fade in count with their full weight, so that the total before and after is the same measure; what
        rewards remember of training's samples is as before afterwards.
        """
        # A chain makes more samples than requests; those of a prompt follow each other all the same.
        prompts = [prompt for prompt in self.prompts for _ in range(len(samples) // len(self.prompts))]
        scores: dict[str, Tensor] = {}
        if self.rewards is not None:
            remembered = copy.deepcopy(self.rewards.state_dict())
            result = self.rewards.score(samples, prompts, FADED_IN)
            self.rewards.load_state_dict(remembered)
            scores = {TOTAL: result.total, **result.raw}
        if self.judges is not None:
            scores |= self.judges.score(samples, prompts, FADED_IN).raw
        shape = (len(self.prompts), -1)
        return Evaluation(self.prompts, samples, {name: value.view(shape) for name, value in scores.items()})

    def close(self) -> None:
        """Ends processes that the judges keep."""
        if self.judges is not None:
            self.judges.close()


def of_all_ranks(samples: list[Sample], engine: Engine) -> list[Sample]:
    """On rank 0 the samples of all ranks in rank order; on the others their own. It takes as long as the slowest."""
    if engine.world_size == 1:
        return samples
    engine.wait()
    brought = gather_on_first((engine.rank, [_as_plain(sample) for sample in samples]))
    return [_KINDS[kind](**values) for _, plain in sorted(dict(brought).items()) for kind, values in plain] or samples


def held_out_names(settings: EvaluationSettings) -> frozenset[str]:
    """Names of the rewards that are only measured."""
    return frozenset(settings.rewards)


def summary(evaluation: Evaluation) -> Mapping[str, float]:
    """Mean over prompts of each reward."""
    metrics = evaluation_metrics("eval", evaluation, None)
    return {name: metrics[f"eval/{name}/mean"] for name in evaluation.scores if f"eval/{name}/mean" in metrics}
