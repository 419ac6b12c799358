"""A full disk as one message: the libraries that write files each say it in another way."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modalities.errors import UserError

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
# safetensors' error of the system; torch's archive writer, which only finds that less was written than it had given.
_TEXTS = (*(f"(os error {number})" for number in _NUMBERS), "PytorchStreamWriter", "unexpected pos", "iostream")


@contextmanager
def full_disk_is_a_mistake(folder: Path) -> Iterator[None]:
    """Turns what a full disk (or an exhausted quota) raises in the block into a UserError."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError) and is_full_disk(error):
            raise UserError(
                f"the disk of {folder} is full ({first_line(error)}). The last checkpoint is whole: free some "
                "space, and the same command continues after it."
            ) from error
        raise


def is_full_disk(error: BaseException) -> bool:
    """Whether the error, or what it was raised from, says that there is no space to write."""
    return any(_says_so(each) for each in _chain(error))


def first_line(error: BaseException) -> str:
    """What the error says, or the system's own word among those that it was raised from."""
    own = [each.strerror for each in _chain(error) if isinstance(each, OSError) and each.strerror]
    return own[-1] if own else str(error).split("\n")[0]


def _says_so(error: BaseException) -> bool:
    return (isinstance(error, OSError) and error.errno in _NUMBERS) or any(text in str(error) for text in _TEXTS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
