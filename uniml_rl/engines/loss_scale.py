"""The factor that keeps gradients within float16: as large as nothing overflows, found while training."""

from __future__ import annotations

from typing import Any

_START, _FLOOR = 2.0**16, 1.0
_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000


class LossScale:
    """`torch.amp.GradScaler`'s rule and numbers: half after an overflow, double after 2000 steps without one.

    GradScaler decides for each optimizer and each rank by itself. Here one decision holds for all optimizers, which
    share a loss, and is made of norms over all ranks, so it fits gradients of any sharding. The value is a power of 2:
    multiplying and dividing by it rounds nothing. It stays at 1 or above.
    """

    def __init__(self) -> None:
        self.value = _START
        self._good_steps = 0

    def update(self, overflow: bool) -> bool:
        """Takes note of a step; True if it overflowed and a smaller scale, which is set now, may help."""
        if overflow:
            lowered = max(self.value * _BACKOFF, _FLOOR)
            helps, self.value, self._good_steps = lowered < self.value, lowered, 0
            return helps
        self._good_steps += 1
        if self._good_steps == _GROWTH_INTERVAL:
            self.value, self._good_steps = self.value * _GROWTH, 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`."""
        self.value, self._good_steps = state["value"], state["good_steps"]
