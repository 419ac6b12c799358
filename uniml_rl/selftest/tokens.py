"""A token policy that is a table of logits, and a reward that is a table: everything about them can be listed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modalities.base import Cut, LogProbUnit, Need, Policy, Replay, Request, TokenSegment, Trajectory
from modalities.randomness import SampleKey
from modalities.samples import Prompt, Sample, Text
from modalities.weights import WeightSets
from rewards.base import Reward
from uniml_rl.data.records import Record
from uniml_rl.selftest.enumeration import Array, Sequences, decisionwise_optimum, divergence, preferred, tilted
from uniml_rl.selftest.targets import DataKind, Imitation, Preferred, Target


class LogitTable(nn.Module):
    """Logits [P, N, V] of the next token for each prompt and prefix."""

    def __init__(self, logits: Array) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def forward(self, prompts: Tensor, prefixes: Tensor) -> Tensor:
        """[b, t, V] for prompts [b] and prefixes [b, t]."""
        return self.logits[prompts.unsqueeze(1), prefixes]


class TabularPolicy(Policy):
    """Sequences of exactly T tokens 0 ... V - 1, decoded as digits. The features are the prefix itself, one-hot."""

    sample_kind = "text"
    offers: frozenset[Need] = frozenset({"log_prob", "entropy", "features"})

    def __init__(self, name: str, sequences: Sequences, logits: Array) -> None:
        self.name, self.sequences = name, sequences
        self.table = LogitTable(logits)
        self.feature_size = logits.shape[0] * logits.shape[1]
        self.weight_sets = WeightSets(self.trainable_modules())

    def decisions(self) -> list[tuple[str, LogProbUnit]]:
        return [("tokens", "token")]

    def trainable_modules(self) -> dict[str, nn.Module]:
        return {"table": self.table}

    @torch.no_grad()
    def rollout(self, requests: Sequence[Request], sampling: Any = None) -> Trajectory:
        length, size = self.sequences.length, self.sequences.vocabulary
        uniforms = torch.stack([torch.rand(length, generator=request.key.generator()) for request in requests])
        prompts = torch.tensor([request.prompt.index for request in requests])
        prefixes = torch.zeros(len(requests), 1, dtype=torch.long)
        chosen: list[Tensor] = []
        for step in range(length):
            edges = self.table(prompts, prefixes).squeeze(1).softmax(1).cumsum(1)
            token = (uniforms[:, step : step + 1] >= edges).sum(1, keepdim=True).clamp_max(size - 1)
            prefixes = prefixes * size + token + 1
            chosen.append(token)
        return self._trajectory(requests, torch.cat(chosen, 1), scored=True)

    def encode(self, prompts: Sequence[Prompt], samples: Sequence[Sample], keys: Sequence[SampleKey]) -> Trajectory:
        """Given texts of T digits as a trajectory. The rollout log-probs are NaN: there was no rollout."""
        texts = [sample.text for sample in samples if isinstance(sample, Text)]
        tokens = torch.tensor([[int(digit) for digit in text] for text in texts])
        requests = [Request(prompt, prompt.index, key) for prompt, key in zip(prompts, keys, strict=True)]
        return self._trajectory(requests, tokens, scored=False)

    def _trajectory(self, requests: Sequence[Request], tokens: Tensor, scored: bool) -> Trajectory:
        every = torch.ones_like(tokens, dtype=torch.bool)
        prompts = torch.arange(len(self.table.logits)).unsqueeze(1)  # a prompt is one token, its own number
        segment = TokenSegment(
            agent=self.name,
            group=torch.tensor([request.group for request in requests]),
            rollout_log_probs=torch.full(tokens.shape, torch.nan),
            trained_mask=every,
            length_mask=every,
            context_mask=~every,
            log_prob_unit="token",
            version=self.version,
            ended=["length"] * len(tokens),
            keys=[request.key for request in requests],
            tokens=tokens,
            prompt_tokens=prompts,
            prompt_mask=torch.ones_like(prompts, dtype=torch.bool),
            prompt_index=torch.tensor([request.prompt.index for request in requests]),
        )
        trajectory = Trajectory([segment], list(requests))
        if scored:
            everything = Cut(0, torch.arange(len(tokens)), slice(0, tokens.shape[1]))
            segment.rollout_log_probs = self.replay(trajectory, everything, frozenset({"log_prob"})).of("log_prob")
        return trajectory

    def replay(self, trajectory: Trajectory, cut: Cut, needs: frozenset[Need]) -> Replay:
        segment = trajectory.segments[cut.segment]
        assert isinstance(segment, TokenSegment)
        tokens = segment.tokens[cut.rows]
        prompts = segment.prompt_tokens[segment.prompt_index[cut.rows]].squeeze(1)
        prefixes = [torch.zeros(len(tokens), dtype=torch.long)]
        for token in tokens[:, :-1].unbind(1):
            prefixes.append(prefixes[-1] * self.sequences.vocabulary + token + 1)
        before = torch.stack(prefixes, 1)  # [b, T]
        log_probs = self.table(prompts, before).log_softmax(2)
        result = Replay()
        if "log_prob" in needs:
            result.log_prob = log_probs.gather(2, tokens.unsqueeze(2)).squeeze(2)[:, cut.steps]
        if "entropy" in needs:
            result.entropy = -(log_probs.exp() * log_probs).sum(2)[:, cut.steps]
        if "features" in needs:
            states = prompts.unsqueeze(1) * self.sequences.num_prefixes + before
            result.features = nn.functional.one_hot(states, self.feature_size).float()[:, cut.steps]
        return result

    def decode(self, trajectory: Trajectory, differentiable: bool = False) -> list[Sample]:
        segment = trajectory.segments[-1]
        assert isinstance(segment, TokenSegment)
        return [Text("".join(map(str, row)), len(row), False) for row in segment.tokens.tolist()]

    def export(self, folder: Path) -> None:
        torch.save(self.table.state_dict(), folder / "table.pt")


class TableReward(Reward):
    """A number for each prompt and text."""

    kinds = frozenset({"text"})

    def __init__(self, scores: Mapping[tuple[int, str], float]) -> None:
        self.scores = dict(scores)

    def score(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> Tensor:
        pairs = zip(samples, prompts, strict=True)
        return torch.tensor([self.scores[prompt.index, s.text] for s, prompt in pairs if isinstance(s, Text)])


class TokenProblem:
    """Two prompts, and for each a reward of every sequence of T tokens out of V.

    Rewards take few values, so that group statistics can be enumerated. They depend on the tokens jointly: the seed is
    one where the optimum of the whole sample's KL and that of each decision's own KL are far apart.

    The given data express the same reward: with strengths w = 4^r, a demonstration occurs in proportion to w, and of
    a pair x is preferred over y with probability w_x / (w_x + w_y), which is the Bradley-Terry model of r log 4.
    """

    num_prompts = 2
    strength_per_reward = np.log(4)

    def __init__(self, vocabulary: int = 3, length: int = 2, seed: int = 23) -> None:
        self.sequences = Sequences(vocabulary, length)
        draw = np.random.default_rng(seed)
        self.logits = 0.5 * draw.standard_normal((self.num_prompts, self.sequences.num_prefixes, vocabulary))
        self.rewards = draw.choice([0.0, 0.5, 1.0], (self.num_prompts, vocabulary**length), p=[0.5, 0.25, 0.25])
        self.strengths = np.exp(self.strength_per_reward * self.rewards).round().astype(int)  # 1, 2 or 4
        self.texts = ["".join(map(str, row)) for row in self.sequences.tokens.tolist()]

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(f"prompt {index}", index) for index in range(self.num_prompts)]

    @property
    def reward(self) -> Reward:
        return TableReward(
            {
                (prompt, text): score
                for prompt, row in enumerate(self.rewards.tolist())
                for text, score in zip(self.texts, row, strict=True)
            }
        )

    def records(self, kind: DataKind) -> list[Record]:
        """Each sequence w times; or pairs in which each side is preferred as often as its share says; or single
        sequences, desirable if their reward is 1."""
        found: list[tuple[int, list[int], list[float]]] = []
        for prompt, strengths in enumerate(self.strengths.tolist()):
            if kind == "demonstrations":
                found += [(prompt, [x], [1.0]) for x, times in enumerate(strengths) for _ in range(times)]
            elif kind == "preferences":
                for x, y in self.pairs():
                    shared = math.gcd(strengths[x], strengths[y])
                    found += [(prompt, [x, y], [1.0, 0.0])] * (strengths[x] // shared)
                    found += [(prompt, [y, x], [1.0, 0.0])] * (strengths[y] // shared)
            else:
                found += [(prompt, [x], [float(reward == 1)]) for x, reward in enumerate(self.rewards[prompt])]
        prompts = self.prompts
        return [
            Record(index, prompts[prompt], [self.text(x) for x in chosen], labels)
            for index, (prompt, chosen, labels) in enumerate(found)
        ]

    def pairs(self) -> list[tuple[int, int]]:
        """The sequences that are compared: each with the next one, in a circle."""
        return [(x, (x + 1) % len(self.texts)) for x in range(len(self.texts))]

    def text(self, sequence: int) -> Text:
        """A sequence as a sample."""
        return Text(self.texts[sequence], self.sequences.length, False)

    def policy(self) -> TabularPolicy:
        """The untrained policy, which is the reference."""
        return TabularPolicy("learner", self.sequences, self.logits)

    def log_probs(self, policy: Policy) -> Array:
        """[P, V^T] of every sequence under the current weights."""
        assert isinstance(policy, TabularPolicy)
        return self.sequences.log_probs(policy.table.logits.detach().double().numpy())

    def target_log_probs(self, target: Target) -> Array:
        """[P, V^T] of the policy that an algorithm should end at."""
        reference = self.sequences.log_probs(self.logits)
        if isinstance(target, Imitation):
            return np.log(self.strengths / self.strengths.sum(1, keepdims=True))
        if isinstance(target, Preferred):
            start = reference if target.from_reference else np.zeros_like(reference)
            return preferred(start, self.strengths, self.pairs(), target.loss, target.beta)
        if target.whole_path:
            return tilted(reference, self.rewards, target.beta)
        return decisionwise_optimum(
            self.sequences, self.logits, self.rewards, target.beta, target.scale, target.group_size, target.epsilon
        )

    def distance(self, policy: Policy, target: Target) -> float:
        """How far the policy still is, as a share of the way: 0 at the target, 1 where it began.

        sqrt(KL(target || policy) / KL(target || reference)), of the KLs' means over prompts.
        """
        goal, start = self.target_log_probs(target), self.sequences.log_probs(self.logits)
        left, whole = divergence(goal, self.log_probs(policy)), divergence(goal, start)
        return float(np.sqrt(left.mean() / whole.mean()))

    def expected_reward(self, policy: Policy) -> float:
        """E[r], the mean over prompts."""
        return float((np.exp(self.log_probs(policy)) * self.rewards).sum(1).mean())

    def best_reward(self) -> float:
        """The largest E[r] of any policy."""
        return float(self.rewards.max(1).mean())
