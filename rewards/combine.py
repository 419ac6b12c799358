"""Several rewards as one: the weighted sum, and what becomes of a sample that one of them could not score."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modalities.errors import UserError, did_you_mean
from modalities.samples import Prompt, Sample
from rewards.base import Reward, RewardConfig
from rewards.isolation import RewardProcess, ScoringError, TooManyHangingError, call_in_thread

_log = logging.getLogger(__name__)


@dataclass
class RewardResult:
    """The scores of B samples, on the CPU, in the order of the samples."""

    total: Tensor  # [B] float32: sum of the weighted rewards; NaN where not valid
    valid: Tensor  # [B] bool: every reward with a weight gave a finite score
    raw: dict[str, Tensor]  # name -> [B] float32 as scored; NaN where it failed
    weighted: dict[str, Tensor]  # name -> [B] float32: weight in force x raw
    weights: dict[str, float]
    """The weights in force (they may fade in)."""
    failures: dict[str, Counter[str]]
    """Per reward, how many samples failed for which reason: "time_out", "non_finite", "process_died", or an exception's
    class name."""


class RewardSet:
    """Named rewards and their settings.

    A sample's failure is its own: when a call on a micro-batch raises or times out, its samples are scored again one
    by one. A sample that fails alone, or whose score is not finite, is NaN in `raw` and counted; it is invalid in the
    total if that reward has a weight in force. With `on_error: fail` the run ends instead. What masking would hide
    always ends it: a UserError, scores of a wrong shape, a reward whose calls hang again and again.
    """

    def __init__(self, rewards: Mapping[str, tuple[RewardConfig, Reward]]) -> None:
        if not rewards:
            raise UserError("No rewards are given; at least one is needed.")
        self._rewards = dict(rewards)
        self._processes = {
            name: RewardProcess(config)
            for name, (config, reward) in rewards.items()
            if reward.separate_process and config.timeout_seconds is not None
        }
        self._warned: set[tuple[str, str]] = set()

    @classmethod
    def build(cls, configs: Mapping[str, RewardConfig], device: str) -> RewardSet:
        """Builds each reward from its block, models on `device`."""
        return cls({name: (config, config.build(device)) for name, config in configs.items()})

    def check(self, kind: str, prompts: Sequence[Prompt] = ()) -> None:
        """Raises UserError for a reward that cannot score samples of `kind`, or that reads a field of the record which
        none of `prompts` (a few of the stage's, if any) has."""
        known = sorted({field for prompt in prompts for field in prompt.record})
        for name, (_, reward) in self._rewards.items():
            if kind not in reward.kinds:
                raise UserError(
                    f"Reward {name!r} ({type(reward).__name__}) scores {' or '.join(sorted(reward.kinds))}, but the "
                    f"policy makes {kind}. Use a reward for {kind}."
                )
            for field in sorted(reward.fields) if prompts else ():
                if field not in known:
                    raise UserError(
                        f"Reward {name!r} reads the field {field!r} of the prompts' records, but the first "
                        f"{len(prompts)} records have {', '.join(known) or 'no fields'}{did_you_mean(field, known)}."
                    )

    def reads(self) -> dict[str, int]:
        """By name, the tokens that a reward which cannot score any number of them can score."""
        return {name: reward.reads for name, (_, reward) in self._rewards.items() if reward.reads is not None}

    def score(
        self,
        samples: Sequence[Sample],
        prompts: Sequence[Prompt],
        iteration_in_stage: int,
        shuffle: torch.Generator | None = None,
    ) -> RewardResult:
        """Scores every sample with every reward, without gradient.

        `shuffle` is the control experiment: `total` and `valid` are permuted together over the whole batch, so they say
        nothing about their samples and the reward must not rise. `raw` and `weighted` stay true. The caller passes
        `seeded_generator(run_seed, stage, iteration)` (`modalities.randomness`), so a resumed run permutes alike.
        """
        if len(samples) != len(prompts):
            raise ValueError(f"{len(samples)} samples came with {len(prompts)} prompts.")
        raw, weighted, weights, failures = {}, {}, {}, {}
        total = torch.zeros(len(samples))
        valid = torch.ones(len(samples), dtype=torch.bool)
        for name, (config, _) in self._rewards.items():
            weights[name] = config.weight_at(iteration_in_stage)
            with torch.no_grad():
                raw[name], failures[name] = self._score_one(name, samples, prompts)
            weighted[name] = weights[name] * raw[name]
            if weights[name] != 0:
                valid &= raw[name].isfinite()
                total += weighted[name]
        if shuffle is not None:
            order = torch.randperm(len(samples), generator=shuffle)
            total, valid = total[order], valid[order]
        return RewardResult(total, valid, raw, weighted, weights, failures)

    def model_bytes(self) -> int:
        """Bytes of the weights of all models that score."""
        modules = [module for _, reward in self._rewards.values() for module in reward.models()]
        return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())

    def check_differentiable(self) -> None:
        """Raises UserError unless every reward with a weight keeps the gradient to its samples."""
        trained = {name: reward for name, (config, reward) in self._rewards.items() if config.weight != 0}
        without = [name for name, reward in trained.items() if not reward.differentiable]
        if without or not trained:
            found = [name for name, reward in trained.items() if reward.differentiable]
            raise UserError(
                "rewards: the algorithm follows the gradient of the rewards that have a weight. Without a gradient: "
                f"{', '.join(without) or 'none'}; with one: {', '.join(found) or 'none'}. Give only differentiable "
                "rewards a weight (`weight: 0` measures the others), or use an algorithm that needs scores alone."
            )

    def score_with_gradient(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], iteration_in_stage: int
    ) -> tuple[Tensor, Tensor]:
        """The total of `score` with its gradient to the samples' pixels, frames or waveforms, and which are valid.

        Returns total [B] float32 (NaN where not valid: use `total[valid]`) and valid [B] bool, on the CPU. Rewards
        without a weight are left out. No gradient reaches a sample that is not valid, not even the NaN that 0 times
        its score's infinite derivative would be. Raises UserError as `check_differentiable` and for a score
        without gradient, TypeError for such a sample.
        """
        self.check_differentiable()
        valid = torch.ones(len(samples), dtype=torch.bool)
        with torch.enable_grad():
            shielded = [_shielded(sample, valid, row) for row, sample in enumerate(samples)]
            # A weight that fades in from 0 leaves a gradient of 0, and not a total without one.
            total = torch.stack([_tensor(sample).sum().float().cpu() * 0 for sample in shielded])
            for name, (config, _) in self._rewards.items():
                if (weight := config.weight_at(iteration_in_stage)) != 0:
                    scores, _ = self._score_one(name, shielded, prompts)
                    if scores.isfinite().any() and not scores.requires_grad:
                        raise UserError(f"Reward {name!r} says that it is differentiable, but its scores are not.")
                    valid &= scores.isfinite()
                    total = total + weight * scores
        return total, valid

    def state_dict(self) -> dict[str, Any]:
        """The state of every reward, by name."""
        return {name: reward.state_dict() for name, (_, reward) in self._rewards.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`; raises ValueError when the names differ."""
        if state.keys() != self._rewards.keys():
            raise ValueError(
                f"The checkpoint's rewards are {sorted(state)}, the configuration's {sorted(self._rewards)}."
            )
        for name, (_, reward) in self._rewards.items():
            reward.load_state_dict(state[name])

    def close(self) -> None:
        """Ends the processes of rewards that have one; they start again when needed."""
        for process in self._processes.values():
            process.close()

    def _score_one(
        self, name: str, samples: Sequence[Sample], prompts: Sequence[Prompt]
    ) -> tuple[Tensor, Counter[str]]:
        """([B] float32 with NaN for every failure, reasons) of one reward, micro-batch by micro-batch."""
        config, reward = self._rewards[name]
        for sample in samples:
            if sample.kind not in reward.kinds:
                raise TypeError(
                    f"Reward {name!r} scores {sorted(reward.kinds)} and was given a sample of {sample.kind!r}."
                )
        failures: Counter[str] = Counter()
        parts = [torch.zeros(0)]
        for start in range(0, len(samples), config.micro_batch_size):
            rows = range(start, min(start + config.micro_batch_size, len(samples)))
            try:
                parts.append(self._call(name, [samples[row] for row in rows], [prompts[row] for row in rows]))
            except ScoringError as batch_error:
                if len(rows) > 1:
                    self._warn(name, batch_error, f"on {len(rows)} samples, which are scored one by one")
                parts += [
                    self._score_alone(
                        name, samples[row], prompts[row], batch_error if len(rows) == 1 else None, failures
                    )
                    for row in rows
                ]
        scores = torch.cat(parts)
        non_finite = int((~scores.isfinite()).sum()) - failures.total()
        if non_finite:
            row = int((~scores.isfinite()).nonzero()[0])
            error = ScoringError("non_finite", f"the score of prompt {prompts[row].index} is {scores[row].item()}")
            if config.on_error == "fail":
                raise self._fatal(name, prompts[row], error)
            self._warn(name, error, f"on {non_finite} of {len(samples)} samples, which are left out")
            failures["non_finite"] += non_finite
        return torch.where(scores.isfinite(), scores, torch.nan), failures

    def _score_alone(
        self, name: str, sample: Sample, prompt: Prompt, known: ScoringError | None, failures: Counter[str]
    ) -> Tensor:
        """[1] float32: the sample's score, or NaN and one more failure. `known`: its error, if it was scored alone."""
        try:
            if known is not None:
                raise known
            return self._call(name, [sample], [prompt])
        except ScoringError as error:
            if self._rewards[name][0].on_error == "fail":
                raise self._fatal(name, prompt, error) from error
            self._warn(name, error, f"on the sample of prompt {prompt.index}, which is left out")
            failures[error.reason] += 1
            return torch.full((1,), torch.nan)

    def _call(self, name: str, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        """[b] float32 on the CPU from one call of `score`; every failure that may be masked becomes a ScoringError."""
        config, reward = self._rewards[name]
        try:
            if config.timeout_seconds is None:
                scores = reward.score(samples, prompts)
            elif name in self._processes:
                scores = self._processes[name].score(samples, prompts, config.timeout_seconds)
            else:
                scores = call_in_thread(lambda: reward.score(samples, prompts), config.timeout_seconds)
        except (ScoringError, TooManyHangingError, UserError):
            raise
        except Exception as error:
            raise ScoringError(type(error).__name__, str(error)) from error
        if not isinstance(scores, Tensor) or scores.shape != (len(samples),):
            what = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise UserError(f"Reward {name!r} returned {what} for {len(samples)} samples; expected a tensor [B].")
        return scores.float().cpu()

    def _warn(self, name: str, error: ScoringError, where: str) -> None:
        if (name, error.reason) not in self._warned:  # the counts are metrics; the log needs each kind once
            self._warned.add((name, error.reason))
            _log.warning("Reward %r failed (%s) %s: %s", name, error.reason, where, error, exc_info=error.__cause__)

    @staticmethod
    def _fatal(name: str, prompt: Prompt, error: ScoringError) -> RuntimeError:
        return RuntimeError(
            f"Reward {name!r} failed ({error.reason}) on the sample of prompt {prompt.index} ({prompt.text[:80]!r}): "
            f"{error}. `on_error: mask` leaves such samples out and counts them."
        )


_TENSORS = {"image": "pixels", "video": "frames", "audio": "waveform"}


def _tensor(sample: Sample) -> Tensor:
    tensor: Tensor = getattr(sample, _TENSORS[sample.kind])
    return tensor


def _shielded(sample: Sample, valid: Tensor, row: int) -> Sample:
    """The same sample; in the backward pass no gradient reaches it unless `valid[row]`."""
    if sample.kind not in _TENSORS or not _tensor(sample).requires_grad:
        raise TypeError(f"sample {row}, of {sample.kind}, has no gradient that a reward could be followed along.")
    tensor = _tensor(sample).view_as(_tensor(sample))
    tensor.register_hook(lambda gradient: gradient if valid[row] else torch.zeros_like(gradient))
    changed: Any = {_TENSORS[sample.kind]: tensor}
    return replace(sample, **changed)
