"""Standard output and standard error: whatever becomes of them, the work goes on.

    their reader is gone (`| head`)        nothing more is written, and nothing fails
    their disk is full                     what does not fit is lost; a command that printed a
                                           result then ends with status 1 (tools/command.py)
    they are closed (`>&-`)                as /dev/null, so that no file takes their number
    they cannot encode a character         it is written as an escape: `\\xd7`

It imports nothing of ours.
"""

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO


class _Unfailing(io.FileIO):
    """A standard stream whose writes never fail. `problem`: why the first one was lost, unless
    nobody reads it."""

    problem = ""

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        try:
            while left:
                written = super().write(left)
                if written is None:  # full, and set not to block
                    select.select([], [self], [])
                left = left[written or 0 :]
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.problem = self.problem or error.strerror or str(error)
        return memoryview(data).nbytes


def guard_output() -> _Unfailing | None:
    """Guard both streams; called once, by a program's main module. Returns standard output's; None
    if somebody has put an object of their own in its place."""
    found: dict[str, _Unfailing] = {}
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:  # closed: opening takes the lowest number that is free, usually this one
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if name == "stdin" or not isinstance(stream, io.TextIOWrapper | None):
            continue
        raw = _Unfailing(number, "w", closefd=False)
        unbuffered = stream is not None and stream.write_through  # python -u
        guarded = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),
            encoding=stream.encoding if stream is not None else "utf-8",
            errors="backslashreplace",
            line_buffering=stream is None or stream.line_buffering,
            write_through=unbuffered,
        )
        setattr(sys, name, guarded)
        found[name] = raw
    return found.get("stdout")


def log(text: str, file: TextIO | None = None) -> None:
    """Write a line to standard error, or to `file`. If that fails (the log may be on a full disk),
    the run continues without it.

    The text and its end are one write: between two, as `print` makes, another thread's line could
    come (a checkpoint is reported from the thread that wrote it)."""
    file = file or sys.stderr
    with contextlib.suppress(OSError):
        file.write(f"{text}\n")
        file.flush()
