"""Run a command that a configuration names: without a shell, in a session of its own, never longer
than allowed."""

import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from typing import IO

LOOK_SECONDS = 0.2  # between two looks at the time that is left


def run_command(
    command: str,
    *arguments: str,
    cwd: str,
    variables: dict[str, str],
    until: Callable[[], float],
    given: bytes = b"",
    output: int | IO[bytes] = subprocess.DEVNULL,
    patience: float = 0.0,
) -> str:
    """Run a command to its end; return why it failed, or the empty string.

    Args:
        variables: added to its environment.
        until: when it is ended, by the monotonic clock; looked at again and again.
        given: its standard input.
        output: what it prints.
        patience: seconds from SIGTERM to SIGKILL; 0: at once SIGKILL.
    """
    began, left = time.monotonic(), given
    try:
        process = subprocess.Popen(
            [*shlex.split(command), *arguments],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if output == subprocess.DEVNULL else output,
            cwd=cwd,
            env={**os.environ, **variables},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # a ValueError: a null byte in the text of an error
        return f"it cannot be started: {getattr(error, 'strerror', None) or error}"
    while time.monotonic() < until():
        try:
            process.communicate(left or None, timeout=LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            left = b""  # it is being given
        else:
            status = process.returncode
            return f"it ended with status {status}" if status else ""
    _end(process, patience)
    return f"it was ended after {time.monotonic() - began:.0f} s"


def _end(process: "subprocess.Popen[bytes]", patience: float) -> None:
    """End the process, and what it has started in its session."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        if seconds:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
