"""What this process does right now, for the other ranks to read when the run does not go on. A process is one rank."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Phase:
    """Where a rank is."""

    name: str = "start-up"
    stage: str = ""
    iteration: int = 0  # from 1 within the stage; 0 before the first
    since: float = 0.0  # Unix seconds

    def __str__(self) -> str:
        iteration = f", iteration {self.iteration}" if self.iteration else ""
        return self.name + (f" (stage {self.stage}{iteration})" if self.stage else "")

    def dumps(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Phase:
        """Of `dumps`."""
        return cls(**json.loads(text))


changed = threading.Event()
"""Set whenever a phase begins, for the thread that publishes it."""
_now = Phase(since=time.time())


def now() -> Phase:
    """The phase of this process."""
    return _now


def enter(name: str, stage: str | None = None, iteration: int | None = None) -> None:
    """Begins a phase (rollout, reward, update ...); the stage and the iteration stay as they are unless given."""
    global _now
    _now = replace(
        _now,
        name=name,
        stage=_now.stage if stage is None else stage,
        iteration=_now.iteration if iteration is None else iteration,
        since=time.time(),
    )
    changed.set()
