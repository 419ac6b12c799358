"""How a run of several ranks ends when one cannot go on. The command line imports it, so it imports nothing heavy."""


class LostRankError(Exception):
    """A rank that this one waited for is gone, or was silent for longer than the time-out."""


class EndedByAnotherRankError(Exception):
    """Another rank ended the run and has said why; this one has nothing to add."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} ended the run; its message says why.")
        self.exit_code = exit_code
