"""torchrun that ends with the exit code of the processes that it started.

    python -m uniml_rl.torchrun --nproc-per-node 8 -m uniml_rl train run.yaml

torchrun itself ends with 1 whatever happened, and a scheduler cannot tell a mistake (2) from a run that was told to
stop and wants to be started again (75).
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from uniml_rl.engines.endings import REQUEUE


def run() -> int:
    """torchrun with the command line's arguments; the exit code."""
    try:
        main()
    except ChildFailedError as error:
        # Of a run all processes end alike, except those that were killed.
        own = {failure.exitcode for failure in error.failures.values() if failure.exitcode > 0}
        return own.pop() if len(own) == 1 else 1
    except SignalException:  # torchrun was told, has passed it on and has waited for the processes
        return REQUEUE
    return 0


if __name__ == "__main__":
    sys.exit(run())
