"""Files that are written durably, replaced as a whole, or written under a lock."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from runtime.output import log


def write_durably(path: Path, text: str, mode: str = "w") -> None:
    """Write a file whose content is on the disk on return; its name, once the folder is synced."""
    with open(path, mode, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that every reader finds the old content or the new one, also after this
    machine has died. Raises OSError, and then leaves only the old one."""
    partial = path.with_suffix(".partial")
    try:
        write_durably(partial, text)  # else its name may be on the disk before its content
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()  # it may have taken the last space
        raise


def write_or_warn(path: Path, text: str) -> bool:
    """As write_whole; a failure (a full disk) is only logged. Returns whether it was written."""
    try:
        write_whole(path, text)
    except OSError as error:
        log(f"warning: {path} cannot be written: {error}")
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a file, which all processes share that ask for it. Go on without it after
    `seconds`: its holder may be stopped, and a shared file system may keep the lock of a machine
    that died, or know no locks at all."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file, until = stack.enter_context(open(path, "ab")), time.monotonic() + seconds
            while not _try_to_lock(file.fileno()) and time.monotonic() < until:
                time.sleep(0.01)
        yield


def _try_to_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
