"""A critic: a value for each decision, read by a small head from features of a policy's trunk or of its own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from modalities.base import Cut, Need, Policy, Trajectory
from modalities.randomness import global_generator_seeded
from modalities.settings import Settings
from modalities.shards import give_back, local_part, shard_of
from modalities.weights import put_like, under


class CriticSettings(Settings):
    """What the value of a decision is computed from."""

    source: Literal["head", "model"] = "head"
    """`head` reads the trained policy's own trunk; `model` is a second copy of the policy's model, trained only for
    values."""
    trunk_gradient: bool = False
    """Whether the value loss also trains the policy's trunk; only with `source: head`."""
    hidden_size: int = Field(default=64, ge=1)
    """Width of the head's hidden layer."""

    @model_validator(mode="after")
    def _trunk_is_shared(self) -> CriticSettings:
        if self.trunk_gradient and self.source == "model":
            raise ValueError("`trunk_gradient` is for `source: head`; a model of its own is always trained whole")
        return self


class ValueHead(nn.Module):
    """Two layers from features [b, t, D] to values [b, t]; the last layer starts at zero, so the first value is 0."""

    def __init__(self, feature_size: int, hidden_size: int, seed: int) -> None:
        super().__init__()
        with global_generator_seeded(seed):
            self.layers = nn.Sequential(
                nn.LayerNorm(feature_size), nn.Linear(feature_size, hidden_size), nn.GELU(), nn.Linear(hidden_size, 1)
            )
        nn.init.zeros_(self.layers[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.layers[-1].bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        """[b, t] float32."""
        with torch.autocast(features.device.type, enabled=False):
            # A copy: hooks of a sharded engine on this module's output would be lost with a view that is written to.
            return self.layers(features.float()).squeeze(-1).clone()


class Critic:
    """V of each decision's state. `trunk` is None when the value head sits on the trained policy itself."""

    def __init__(self, head: ValueHead, trunk: Policy | None, trunk_gradient: bool) -> None:
        self.head = head
        self.trunk = trunk
        self.trunk_gradient = trunk_gradient

    def needs(self) -> frozenset[Need]:
        """What the policy's own replay must give for `values`: its features, unless the critic has its own trunk."""
        return frozenset() if self.trunk is not None else frozenset({"features"})

    def values(self, trajectory: Trajectory, cut: Cut, features: Tensor | None) -> Tensor:
        """[b, t] float32 values of the cut's decisions, each computed before its own decision is seen.

        `features` are the policy's, from the replay of the same cut; ignored by a critic with its own trunk.
        """
        if self.trunk is not None:
            features = self.trunk.replay(trajectory, cut, frozenset({"features"})).of("features")
        elif features is None:
            raise ValueError("a critic on the policy's trunk needs the features of the policy's replay.")
        elif not self.trunk_gradient:
            features = features.detach()
        return self.head(features)

    def trainable_modules(self) -> dict[str, nn.Module]:
        """The head, and the critic's own trunk."""
        trunk = {} if self.trunk is None else {f"trunk_{k}": m for k, m in self.trunk.trainable_modules().items()}
        return {"head": self.head, **trunk}

    def weight_state(self) -> dict[str, Tensor]:
        """The head's and the trunk's trainable weights."""
        give_back(self.head)
        head = {f"head/{key}": shard_of(value) for key, value in self.head.named_parameters()}
        trunk = {} if self.trunk is None else {f"trunk/{key}": v for key, v in self.trunk.weight_state().items()}
        return head | trunk

    @torch.no_grad()
    def load_weight_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores `weight_state`."""
        give_back(self.head)
        for key, parameter in self.head.named_parameters():
            local_part(parameter).copy_(local_part(put_like(state[f"head/{key}"], parameter)))
        if self.trunk is not None:
            self.trunk.load_weight_state(under(state, "trunk/"))
