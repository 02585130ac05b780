"""Files that several processes write: replaced as a whole, or under a lock of this machine."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from output import log


def write_whole(path: Path, text: str) -> None:
    """Replace a file, so that every reader finds the old content or the new one. Raises OSError."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def write_or_warn(path: Path, text: str) -> None:
    """As write_whole; a failure (a full disk) is only logged."""
    try:
        write_whole(path, text)
    except OSError as error:
        log(f"warning: {path} cannot be written: {error}")


@contextlib.contextmanager
def machine_lock(purpose: str, folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a lock that the processes of this machine share, for a purpose and a run folder. Yields
    False if another process holds it and does not release it within `seconds`.

    The lock's file is not in the run folder: a shared file system may know no locks, or keep those
    of a machine that died. Where a machine has no locks, True is yielded to everyone.
    """
    of_run = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"lattice-{purpose}-{os.getuid()}-{of_run}"
    with contextlib.ExitStack() as stack:
        held, until = True, time.monotonic() + seconds
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            file = stack.enter_context(os.fdopen(os.open(path, flags, 0o600)))
            while not (held := _try_to_lock(file.fileno())) and time.monotonic() < until:
                time.sleep(0.01)
        yield held


def _try_to_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
