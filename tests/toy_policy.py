"""A complete policy in under sixty lines: four independent letters from a table of logits."""

from typing import Literal

import torch
from torch import nn

from modalities.base import Policy, PolicyConfig, Replay, TokenSegment, Trajectory
from modalities.samples import Text
from modalities.weights import WeightSets

LETTERS, LENGTH = "abcdefgh", 4


class ToyConfig(PolicyConfig):
    type: Literal["toy_policy:ToyConfig"] = "toy_policy:ToyConfig"
    """Import path of this class."""

    def build(self, name, device, seed):
        return ToyPolicy(name)


class ToyPolicy(Policy):
    sample_kind, feature_size = "text", len(LETTERS)
    offers = frozenset({"log_prob", "entropy", "features"})

    def __init__(self, name):
        self.name, self.table = name, nn.Embedding(1, len(LETTERS))
        nn.init.zeros_(self.table.weight)
        self.weight_sets = WeightSets(self.trainable_modules())

    def decisions(self):
        return [("tokens", "token")]

    def trainable_modules(self):
        return {"table": self.table}

    @torch.no_grad()
    def rollout(self, requests, sampling=None):
        log_probs = self.table.weight[0].log_softmax(0)
        uniforms = torch.stack([torch.rand(LENGTH, generator=request.key.generator()) for request in requests])
        tokens = torch.searchsorted(log_probs.exp().cumsum(0), uniforms).clamp(max=len(LETTERS) - 1)
        every, group = torch.ones_like(tokens, dtype=torch.bool), torch.tensor([r.group for r in requests])
        keys, ended = [request.key for request in requests], ["length"] * len(requests)
        common = (self.name, group, log_probs[tokens], every, every, ~every, "token", self.version, ended, keys)
        return Trajectory([TokenSegment(*common, tokens=tokens)], list(requests))

    def replay(self, trajectory, cut, needs):
        tokens = cut.take(trajectory.segments[cut.segment].tokens)
        logits = self.table(torch.zeros_like(tokens))
        distribution = torch.distributions.Categorical(logits=logits)
        return Replay(log_prob=distribution.log_prob(tokens), entropy=distribution.entropy(), features=logits)

    def decode(self, trajectory, differentiable=False):
        rows = trajectory.segments[-1].tokens.tolist()
        return [Text("".join(LETTERS[token] for token in row), len(row), False) for row in rows]

    def export(self, folder):
        torch.save(self.table.state_dict(), folder / "table.pt")
