"""The coefficient of the KL term over the run."""

from __future__ import annotations

import math
from typing import Protocol


class KLController(Protocol):
    """Holds the coefficient that the next iteration uses."""

    coefficient: float

    def update(self, kl: float, samples: int) -> None:
        """Takes the iteration's mean KL and its number of samples, over all ranks."""
        ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKL:
    """The coefficient of the settings, always."""

    def __init__(self, coefficient: float) -> None:
        self.coefficient = coefficient

    def update(self, kl: float, samples: int) -> None:
        """Changes nothing."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the settings say it all, and a changed setting takes effect on resume."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores nothing."""


class AdaptiveKL:
    """beta <- beta (1 + clip(kl / target - 1, +-0.2) samples / horizon) (Ziegler et al. 2019, section 2.2).

    More samples than the horizon count as the horizon, else beta could turn negative.
    """

    def __init__(self, coefficient: float, target: float, horizon: float) -> None:
        self.coefficient, self.target, self.horizon = coefficient, target, horizon

    def update(self, kl: float, samples: int) -> None:
        """Raises the coefficient when `kl` is above the target, lowers it below. ValueError if `kl` is not finite."""
        if not math.isfinite(kl):
            raise ValueError(f"the KL controller was given kl = {kl}; the policy has diverged.")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= 1 + error * min(samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores the coefficient."""
        self.coefficient = state["coefficient"]
