"""Exceptions that become one message from one rank, never a traceback (`runtime/messages.py`):
UserError, which the user can fix, and RunFailed, which ends a run that had begun.

They may be raised anywhere, so they live below every other module, and this one imports nothing.
"""

from typing import Any

LONGEST = 600  # characters of a value in a message


class UserError(Exception):
    """Something the user gave does not work, said so that it can be fixed at once: a wrong key, a
    layout that does not fit, a damaged file. Exit status 2.

    Args:
        key: what to change: a configuration key (`parallel.tp`), a command-line option or a file's
            path.
        value: what it is now.
        why: why that does not work.
        remedy: what would.
    """

    def __init__(self, key: str, value: Any, why: str, remedy: str) -> None:
        shown = key if key.isprintable() and len(key) < LONGEST else short(key)
        super().__init__(f"{shown} = {short(value)}: {why}\n  remedy: {remedy}")
        self.key, self.value, self.why, self.remedy = key, value, why, remedy


class RunFailed(Exception):
    """The run cannot go on, and every rank knows it and raises this alike: one message, from rank
    0, and exit status 1."""


def short(value: Any) -> str:
    """repr(value), shortened: a message must stay one that can be read, whatever was given."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not write an int of thousands of digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 100]} … {text[-90:]}"
