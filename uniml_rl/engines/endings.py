"""How a run ends that cannot go on, and its exit code. The command line imports it, so it imports nothing heavy."""

MISTAKE, DIVERGED, INTERRUPTED, REQUEUE = 2, 3, 130, 75
"""Exit codes: a mistake of the user's, numbers that are not finite any more, Ctrl-C, and a run that was told to stop
and wants to be started again (the EX_TEMPFAIL of sysexits.h). A bug and a lost rank are 1."""


class StoppedError(BaseException):
    """A signal told the run to stop, and it can be continued. Like KeyboardInterrupt it may be raised anywhere, and no
    library's `except Exception` shall take it for a failure of its own."""


class DivergedError(Exception):
    """Training has made weights that are not finite, or that compute what is not; nothing of them was saved."""


class LostRankError(Exception):
    """A rank that this one waited for is gone, or was silent for longer than the time-out."""


class EndedByAnotherRankError(Exception):
    """Another rank ended the run and has said why; this one has nothing to add."""

    def __init__(self, rank: int, exit_code: int) -> None:
        super().__init__(f"rank {rank} ended the run; its message says why.")
        self.exit_code = exit_code
