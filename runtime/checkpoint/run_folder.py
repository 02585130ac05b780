"""List the checkpoints of a run folder, put some aside, and write `latest`, which names the newest.

Only the holder of the folder's lease may change them (lease.py).

    checkpoints/step-00000100            complete and agreed on by all ranks: no suffix in the name,
                                         and a manifest
    checkpoints/step-00000080.damaged    put aside: damaged or incomplete
    checkpoints/step-00000120.abandoned  put aside: the run rolled back to an earlier step, or saved
                                         this step again
    checkpoints/latest                   contains "step-00000100"

A checkpoint that was put aside stays until a person deletes it.
"""

import contextlib
import os
from pathlib import Path

from errors import UserError
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import write_durably
from runtime.checkpoint.names import LATEST, MANIFEST, NAME, complete_checkpoints
from runtime.messages import log
from settings.config import Config


def checkpoint_folder(config: Config) -> Path:
    return Path(config.run.dir) / "checkpoints"


def checkpoints_of(folder: Path, key: str) -> list[Path]:
    """Return `folder` itself if it is a checkpoint, else the complete checkpoints in it or in its
    `checkpoints/`, oldest first.

    Raises:
        UserError: there are none; `key` is the key or option that named the folder.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    found = complete_checkpoints(folder) or complete_checkpoints(folder / "checkpoints")
    if not found:
        why = "holds no complete checkpoint"
        raise UserError(key, str(folder), why, "give a run folder or a folder step-…")
    return found


def put_incomplete_aside(lease: Lease) -> None:
    """Put aside folders that have a checkpoint's name but no manifest, because someone copied or
    deleted a part of them. Called on rank 0, at a start."""
    for path in sorted(lease.checkpoints.glob("step-*")):
        if NAME.fullmatch(path.name) and not (path / MANIFEST).is_file():
            log(
                f"warning: {path} has no {MANIFEST}: it is put aside as "
                f"{lease.put_aside(path, '.damaged').name} and not used"
            )
    name_latest(lease)


def put_aside(lease: Lease, path: Path, suffix: str) -> Path:
    """Rename a checkpoint so that it no longer counts as one, after taking it out of `latest`;
    return the new path. Called on rank 0."""
    name_latest(lease, but=path)
    return lease.put_aside(path, suffix)


def name_latest(lease: Lease, but: Path | None = None) -> None:
    """Let `latest` name the newest complete checkpoint other than `but`, or remove the file if
    there is none. Called on rank 0."""
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
    """Flush a folder to disk: only then are the names in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_to_begin_anew(config: Config) -> None:
    """Raise UserError if the run had checkpoints, and all are damaged: a copy of one may be
    elsewhere."""
    folder = checkpoint_folder(config)
    if damaged := sorted(path.name for path in folder.glob("step-*.damaged")):
        why = f"all checkpoints in {folder} are damaged: {', '.join(damaged)}"
        remedy = "restore one (tools.objects fetch), or move these elsewhere to begin anew"
        raise UserError("checkpoint.resume", config.checkpoint.resume, why, remedy)
