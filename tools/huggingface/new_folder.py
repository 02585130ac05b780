"""A folder that is there whole or not at all."""

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
        why = "is there already"
        raise UserError("--out", str(out), why, "name a folder that is not, or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, beside `out`; at the end of the block it becomes `out`, and after an
    exception it is gone. Raises UserError, naming --out, if there is something of that name, or
    what is to be written cannot be."""
    refuse_existing(out)
    for left in out.parent.glob(f"{out.name}.partial-*"):
        print(
            f"warning: {left} is left of an attempt that was killed; remove it if none is running",
            file=sys.stderr,
        )
    partial = out.parent / f"{out.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        why = f"cannot be made ({error.strerror})"
        raise UserError("--out", str(out), why, "name a folder where you may write") from None
    try:
        yield partial
        refuse_existing(out)
        partial.rename(out)
    except (OSError, SafetensorError) as error:  # a full disk, as either says it
        remedy = "make room, and see that all files can be read"
        raise UserError("--out", str(out), f"was not written: {error}", remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
