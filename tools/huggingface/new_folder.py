"""Creates a folder completely or not at all: any, or a checkpoint that has only weights."""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from errors import UserError
from runtime.checkpoints.manifest import Manifest, fingerprint, write_durably, write_manifest
from tools.huggingface.tensor_files import Piece, whole_places, write_files


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


def write_weights(
    out: Path,
    pieces: Iterable[Piece],
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    others: dict[str, bytes],
    trainer: dict[str, Any],
    file_bytes: int,
    task: str,
) -> None:
    """Writes a checkpoint from which only weights can be loaded: it has no state of an optimizer.

    Args:
        tensors: the dtype and shape of each piece.
        others: the content of further files, such as the tokenizer's.
        trainer: the entries of trainer.json that say what was trained and on what.
    """
    begun = {"step": 0, "updates": 0, "tokens": 0, "recent_losses": [], "bad_in_a_row": 0}
    with new_folder(out) as folder:
        write_files(folder, pieces, file_bytes, whole_places, task)
        for name, content in others.items():
            (folder / name).write_bytes(content)
        write_durably(folder / "trainer.json", json.dumps(begun | trainer, indent=1))
        files = {path.name: fingerprint(path) for path in folder.iterdir()}
        write_manifest(folder, Manifest(files, tensors))
