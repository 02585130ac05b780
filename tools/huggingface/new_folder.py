"""Creates a folder completely or not at all: any, or a checkpoint that has only weights. Tensors
are written to safetensors files of bounded size, and only those of one file are in memory."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from data.shards import permissions_of_umask
from errors import UserError
from runtime.checkpoint.folder import NAME, step_of
from runtime.checkpoint.manifest import Manifest, fingerprint, write_manifest
from runtime.checkpoint.progress import byte_bar
from runtime.checkpoint.tensor_files import PLACES
from runtime.files import write_durably
from runtime.output import log
from runtime.trainer_state import BEGINNING
from tools.huggingface.checkpoint_reader import DTYPES, WEIGHTS, Stored

FILE_BYTES = 5_000_000_000  # as transformers 4 wrote them


def refuse_existing(out: Path) -> None:
    if os.path.lexists(out):  # also a link to nothing; and it never raises
        why = "it already exists"
        raise UserError("--out", str(out), why, "give another folder, or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder in which to write; the end of the block renames it to `out`, and an
    exception removes it. Raises UserError with the key --out if `out` exists, or if writing
    fails."""
    refuse_existing(out)
    partial = out.parent / f"{out.name}.partial-{os.getpid()}"
    try:
        for left in out.parent.glob(f"{out.name}.partial-*"):
            log(f"warning: {left} was left by a killed attempt; remove it if none is still running")
        partial.mkdir(parents=True)  # another process may have this number on another machine
        try:
            yield partial
            refuse_existing(out)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # a full disk can raise either
        remedy = "give a folder where you may write, free some space, and check that all files "
        remedy += "can be read"
        raise UserError("--out", str(out), f"it was not written: {error}", remedy) from error


def write_files(
    folder: Path,
    tensors: Stored,
    load: Callable[[str], Tensor],
    file_bytes: int,
    task: str,
    is_checkpoint: bool,
) -> Any:
    """Writes tensors to safetensors files in `folder`, and returns huggingface_hub's plan: which
    tensors are in which file.

    A file has as many tensors as fit into `file_bytes`, or one that is larger. A single file is
    named `model.safetensors`.

    Args:
        load: returns a tensor by its name.
        task: the label of the progress bar.
        is_checkpoint: whether headers state the position of each tensor in the global one.
    """
    from huggingface_hub import split_state_dict_into_shards_factory  # comes with datasets

    sizes = {n: math.prod(shape) * DTYPES[dtype].itemsize for n, (dtype, shape) in tensors.items()}
    plan = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=file_bytes,
    )
    with byte_bar(task, sum(sizes.values())) as bar:
        for file, names in plan.filename_to_tensors.items():
            loaded = {}
            for name in names:
                loaded[name] = load(name)
                bar.update(sizes[name])
            about = {"format": "pt"}
            if is_checkpoint:  # each tensor is whole, so it begins at 0
                places = {name: {"saved_offsets": [0] * each.ndim} for name, each in loaded.items()}
                about = {PLACES: json.dumps(places)}
            with permissions_of_umask(folder / file):
                save_file(loaded, folder / file, metadata=about)
    return plan


def write_weights(
    out: Path,
    tensors: Stored,
    load: Callable[[str], Tensor],
    others: dict[str, bytes],
    trainer: dict[str, Any],
    file_bytes: int,
    task: str,
) -> None:
    """Writes a checkpoint from which only weights can be loaded: it has no state of an optimizer.

    Args:
        tensors, load: as for write_files, by their names in the model.
        others: the content of further files, such as the tokenizer's.
        trainer: the entries of trainer.json that say what was trained and on what.
    """
    if NAME.fullmatch(out.name) and step_of(out):
        why = "a folder of this name is that of a run's step"
        raise UserError("--out", str(out), why, "give another name")
    stored = {WEIGHTS + name: about for name, about in tensors.items()}

    def by_our_name(name: str) -> Tensor:
        return load(name.removeprefix(WEIGHTS))

    with new_folder(out) as folder:
        write_files(folder, stored, by_our_name, file_bytes, task, is_checkpoint=True)
        for name, content in others.items():
            (folder / name).write_bytes(content)
        write_durably(folder / "trainer.json", json.dumps(BEGINNING | trainer, indent=1))
        files = {path.name: fingerprint(path) for path in folder.iterdir()}
        write_manifest(folder, Manifest(files=files, tensors=stored))
