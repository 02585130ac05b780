"""The folder of a run's checkpoints. (It imports nothing that takes time: the monitor reads it.)

    checkpoints/step-00000100            complete and agreed on by all ranks: no suffix in the name,
                                         and a manifest
    checkpoints/step-00000080.damaged    put aside: damaged or incomplete
    checkpoints/step-00000120.abandoned  put aside: the run rolled back to an earlier step, or saved
                                         this step again
    checkpoints/latest                   contains "step-00000100", the newest
    checkpoints/after_commit/            for which of them the command runs or has succeeded

Only the holder of the folder's lease may change it (lease.py). A checkpoint that was put aside
stays until a person deletes it.
"""

import os
import re
from pathlib import Path

from errors import UserError, is_file, raise_passing

NAME = re.compile(r"step-(\d{8})")
LATEST = "latest"
MANIFEST = "manifest.json"  # the last file of a checkpoint (manifest.py)
AFTER_COMMIT = "after_commit"  # how far checkpoint.after_commit is (monitor/after_commit.py)
DAMAGED, ABANDONED = ".damaged", ".abandoned"  # suffixes of those that are put aside


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoints of a folder, oldest first."""
    return sorted(path for path in named_checkpoints(folder) if is_file(path / MANIFEST))


def replaceable(folder: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Return the checkpoints that a run need not keep, oldest first."""
    older = complete_checkpoints(folder)[:-keep_last]
    return [path for path in older if not keep_every or step_of(path) % keep_every]


def named_checkpoints(folder: Path) -> list[Path]:
    """Return what has the name of a checkpoint, complete or not."""
    return [folder / name for name in names_in(folder) if NAME.fullmatch(name)]


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; none if there is no such folder. Unlike `glob`, this raises
    OSError if it cannot be listed: a run must not take that for an empty folder."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def step_of(checkpoint: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step-"))


def has_command(checkpoint: Path) -> bool:
    """Whether checkpoint.after_commit runs for this checkpoint, which must then stay; as it must if
    that cannot be read."""
    try:
        names = names_in(checkpoint.parent / AFTER_COMMIT)
    except OSError:
        return True
    return any(n.startswith(f"{checkpoint.name}.") and n.endswith(".running") for n in names)


def checkpoints_of(folder: Path, key: str) -> list[Path]:
    """Return `folder` itself if it is a checkpoint, else the complete checkpoints in it or in its
    `checkpoints/`, oldest first.

    Raises:
        UserError: there are none, or they cannot be read; `key` is the key or option that named the
            folder.
    """
    try:
        if is_file(folder / MANIFEST):
            return [folder]
        found = complete_checkpoints(folder) or complete_checkpoints(folder / "checkpoints")
        why = "holds no complete checkpoint"
    except OSError as error:
        raise_passing(error)
        found, why = [], error.strerror or str(error)
    if not found:
        raise UserError(key, str(folder), why, "give a run folder or a folder step-…")
    return found


def sync(path: Path) -> None:
    """Flush a file, or a folder, to disk: only then is its content durable, or the names in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
