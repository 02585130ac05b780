"""Why a save failed: the first error of a rank, in the system's words, known to all ranks."""

import contextlib
import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from errors import RunFailed


class SaveFailed(RunFailed):
    """A save that some rank could not finish; raised on every rank. `number`: its errno, if any."""

    def __init__(self, said: str, number: int | None = None) -> None:
        super().__init__(said)
        self.number = number


def agree(action: Callable[[], Any], group: dist.ProcessGroup, folder: Path) -> list[Any]:
    """Run `action`, which writes to `folder`, and return the results of all ranks of `group`. If it
    raises on any rank, SaveFailed is raised on all, with the error of the lowest such rank."""
    result, problem = None, None
    try:
        result = action()
    # raised by DCP on all ranks, with the failures of each; not a subclass of Exception
    except dcp.CheckpointException as error:
        if failure := error.failures.get(dist.get_rank()):
            problem = _words(failure[0], folder)
    except Exception as error:
        problem = _words(error, folder)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (result, problem), group=group)
    failed = [(rank, *theirs) for rank, (_, theirs) in enumerate(everyone) if theirs]
    if failed:
        rank, said, number = failed[0]
        others = f" (and on {len(failed) - 1} more)" if failed[1:] else ""
        raise SaveFailed(f"on rank {rank}{others}: {said}", number)
    return [theirs for theirs, _ in everyone]


def _words(error: BaseException, folder: Path) -> tuple[str, int | None]:
    """An error in words, and its errno."""
    if isinstance(error, OSError) and error.strerror:
        # that of a write names no file
        return f"{error.strerror}: {error.filename2 or error.filename or folder}", error.errno
    return f"{type(error).__name__}: {error}".rstrip(": "), None


def room(error: Exception, folder: Path, needed: float) -> str:
    """If `error` says that `folder` has no room: the bytes that a checkpoint needs, and those that
    are free now."""
    if getattr(error, "number", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ""
    said = f"; a checkpoint needs {needed / 1e6:,.1f} MB"
    with contextlib.suppress(OSError):
        said += f", and {shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"
    return said
