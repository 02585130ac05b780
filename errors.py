"""Exceptions that are reported as one message from one rank, without a traceback
(`runtime/exit.py`): UserError, which the user can fix, and RunFailed, which ends a running run.

They may be raised anywhere, so every module may import this one, and it imports nothing of ours.
"""

import errno
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST = 600  # characters of a value in a message
# begins the reason of a rank that failed only because another did, which therefore knows no better
LOST = "lost connection to another rank"


class UserError(Exception):
    """Something that the user can fix is wrong: a key, a layout that does not fit, a damaged file.
    The message names the remedy. Exit status 2.

    Args:
        key: what to change: a configuration key (`parallel.tp`), a command-line option or the path
            of a file.
        value: its current value.
        why: why that value does not work.
        remedy: what to do instead.
    """

    def __init__(self, key: str, value: Any, why: str, remedy: str) -> None:
        shown = key if key.isprintable() and len(key) < LONGEST else short(key)
        super().__init__(f"{shown} = {short(value)}: {why}\n  remedy: {remedy}")
        self.key, self.value, self.why, self.remedy = key, value, why, remedy

    def __reduce__(self) -> tuple[Any, ...]:  # workers of data preparation send it to their parent
        return type(self), (self.key, self.value, self.why, self.remedy)


@contextmanager
def within(place: str) -> Iterator[None]:
    """Let a UserError inside name the place that its key is in: `data_stages.1.train.seq_len`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{place}.{error.key}", error.value, error.why, error.remedy) from None


# Errors of a file that do not pass by themselves: someone must mend them. Others may: a disk or the
# network to it has failed (EIO, ESTALE, ESHUTDOWN, …).
_LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM,
            errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP,
            errno.EINVAL}  # fmt: skip


def raise_passing(error: Exception) -> None:
    """Raise the error of a file system again if it may pass: another start may succeed (exit status
    1), so it is no mistake of the user's (status 2), and no file is damaged."""
    if isinstance(error, OSError) and error.errno and error.errno not in _LASTING:
        raise error


def is_file(path: Path) -> bool:
    """As path.is_file(), which from Python 3.14 on takes every error for no."""
    return stat.S_ISREG(_mode(path))


def exists(path: Path) -> bool:
    """As path.exists(), likewise."""
    return _mode(path) > 0


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return 0


class RunFailed(Exception):
    """The run cannot continue. Every rank raises this; rank 0 reports it, and the exit status is
    1."""

    restart_helps = True  # whether torchrun may restart the ranks where they are


def short(value: Any) -> str:
    """Return repr(value), shortened so that a message stays readable."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print an int of thousands of digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 100]} … {text[-90:]}"
