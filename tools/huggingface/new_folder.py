"""Creates an output folder completely or not at all."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from errors import UserError


def refuse_existing(out: Path) -> None:
    if out.exists():
        why = "it already exists"
        raise UserError("--out", str(out), why, "give another folder, or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder in which to write; the end of the block renames it to `out`, and an
    exception removes it. Raises UserError with the key --out if `out` exists, or if writing
    fails."""
    refuse_existing(out)
    for left in out.parent.glob(f"{out.name}.partial-*"):
        print(
            f"warning: {left} was left by a killed attempt; remove it if none is still running",
            file=sys.stderr,
        )
    partial = out.parent / f"{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        why = f"it cannot be created ({error.strerror})"
        raise UserError("--out", str(out), why, "give a folder where you may write") from None
    try:
        yield partial
        refuse_existing(out)
        partial.rename(out)
    except (OSError, SafetensorError) as error:  # a full disk can raise either
        remedy = "free some space, and check that all files can be read"
        raise UserError("--out", str(out), f"it was not written: {error}", remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
