"""What a row of the table says that an algorithm ends at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DataKind = Literal["demonstrations", "preferences", "labelled"]


@dataclass(frozen=True)
class Optimum:
    """The maximum of the reward minus `beta` times a divergence from the reference."""

    beta: float
    """Weight of the divergence."""
    whole_path: bool
    """Whether the penalty is that of the whole sample, which every decision answers for (a KL in the reward), or each
    decision's own (a KL in the loss of each decision)."""
    divergence: Literal["kl", "prediction_mse"] = "kl"
    """Of each denoising transition: its KL, or the squared difference of the predictions; both summed over elements."""
    scale: Literal["none", "group_mean", "group_std"] = "none"
    """How tokens' advantages are scaled, where that moves the optimum: see `enumeration.expected_advantages`."""
    group_size: int = 0
    """Samples per prompt; read where `scale` is not none."""
    epsilon: float = 0.0
    """Added to the group's standard deviation."""

    @property
    def claim(self) -> str:
        return "kl_regularised_optimum"

    def __str__(self) -> str:
        what = "squared difference of predictions" if self.divergence == "prediction_mse" else "KL"
        return f"{'E[r]' if self.whole_path else 'A of each decision'} - {self.beta:.3g} {what}"


@dataclass(frozen=True)
class Preferred:
    """The minimum of a preference loss over the given pairs."""

    loss: Literal["logistic", "square"]
    beta: float
    from_reference: bool
    """Whether log-ratios to the reference are compared, or the log-probs themselves."""

    @property
    def claim(self) -> str:
        if self.loss == "square":
            return "least_preference_loss"
        return "kl_regularised_optimum" if self.from_reference else "maximum_likelihood"

    def __str__(self) -> str:
        if self.loss == "square":
            return "square loss of the pairs"
        if not self.from_reference:
            return "the pairs"
        return f"E[r] - {self.beta:.3g} KL, r the Bradley-Terry reward of the pairs"


@dataclass(frozen=True)
class Imitation:
    """The maximum likelihood of the given demonstrations; for a denoiser, the least error in undoing noise."""

    @property
    def claim(self) -> str:
        return "maximum_likelihood"

    def __str__(self) -> str:
        return "the demonstrations"


Target = Optimum | Preferred | Imitation
