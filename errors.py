"""Exceptions that become one message from one rank, never a traceback (`training/voice.py`): UserError, which the user can fix,
and RunFailed, which ends a run that had begun.

They may be raised anywhere, so they live below every other module, and this one imports nothing.
"""

from typing import Any


class UserError(Exception):
    """Something the user gave does not work, said so that it can be fixed at once: a wrong key, a layout that does not fit, a
    damaged file. Exit status 2.

    Args:
        key: what to change: a configuration key (`parallel.tp`), a command-line option or a file's path.
        value: what it is now.
        why: why that does not work.
        remedy: what would.
    """

    def __init__(self, key: str, value: Any, why: str, remedy: str) -> None:
        super().__init__(f"{key} = {value!r}: {why}\n  remedy: {remedy}")
        self.key, self.value, self.why, self.remedy = key, value, why, remedy


class RunFailed(Exception):
    """The run cannot go on, and every rank knows it and raises this alike: one message, from rank 0, and exit status 1."""
