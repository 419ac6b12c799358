"""The one exception that a user's mistake raises, and the sentence that points at the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in a configuration, a file or a command: the command line prints the message and exits with code 2.

    The message names the key or file, the value, what is allowed and the likely fix.
    """


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the allowed name nearest to `value`, in whatever case, else the empty string."""
    by_lower_case = {name.lower(): name for name in allowed}
    nearest = difflib.get_close_matches(value.lower(), list(by_lower_case), n=1, cutoff=0.5)
    return f"; did you mean {by_lower_case[nearest[0]]!r}?" if nearest else ""
