"""The checkpoints of a run folder: which there are, and the file `latest`, which names the newest.

Only the holder of the folder's lease may change them (lease.py).

    checkpoints/step-00000100            complete, and agreed on by all ranks: a name without a
                                         suffix, and a manifest
    checkpoints/step-00000080.damaged    put aside: it was not what was saved, or not complete
    checkpoints/step-00000120.abandoned  put aside: the run went back behind it, or saved it anew
    checkpoints/latest                   step-00000100

What is put aside stays until a person deletes it.
"""

import contextlib
import os
import re
from pathlib import Path

from errors import UserError
from runtime.lease import Lease
from runtime.manifest import MANIFEST, write_durably
from runtime.messages import log
from training.config import Config

NAME = re.compile(r"step-(\d{8})")
LATEST = "latest"


def checkpoint_folder(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were committed, oldest first."""
    return sorted(
        path
        for path in folder.glob("step-*")
        if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
    )


def checkpoints_of(folder: Path, key: str) -> list[Path]:
    """`folder` itself if it is a checkpoint, else the complete ones in it, or in its
    `checkpoints/`, oldest first.

    Raises:
        UserError: there are none; `key` is what the user gave the folder as.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    found = complete_checkpoints(folder) or complete_checkpoints(folder / "checkpoints")
    if not found:
        why = "holds no complete checkpoint"
        raise UserError(key, str(folder), why, "give a run folder or a folder step-…")
    return found


def step_of(checkpoint: Path) -> int:
    """After how many steps it was saved, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def put_incomplete_aside(lease: Lease) -> None:
    """At a start, on rank 0: what has the name of a checkpoint and no manifest (somebody deleted or
    copied a part of it)."""
    for path in sorted(lease.checkpoints.glob("step-*")):
        if NAME.fullmatch(path.name) and not (path / MANIFEST).is_file():
            log(
                f"warning: {path} has no {MANIFEST}: it is put aside as "
                f"{lease.put_aside(path, '.damaged').name}, and not used"
            )
    name_latest(lease)


def put_aside(lease: Lease, path: Path, suffix: str) -> Path:
    """On rank 0: give a checkpoint a name that does not count as one, when `latest` no longer names
    it; the new name."""
    name_latest(lease, but=path)
    return lease.put_aside(path, suffix)


def name_latest(lease: Lease, but: Path | None = None) -> None:
    """On rank 0: let `latest` name the newest complete checkpoint other than `but`; without one
    there is no such file."""
    complete = [path.name for path in complete_checkpoints(lease.checkpoints) if path != but]
    latest, named = lease.checkpoints / LATEST, None
    with contextlib.suppress(OSError, UnicodeDecodeError):
        named = latest.read_text(encoding="utf-8")
    if not complete:
        if named is not None:
            lease.move(latest, lease.work / LATEST)
    elif named != complete[-1]:
        write_durably(lease.make_work() / LATEST, complete[-1])
        lease.move(lease.work / LATEST, latest)


def sync_folder(folder: Path) -> None:
    """Names, too, are durable only when their folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
