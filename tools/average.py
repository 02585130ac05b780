"""Averages the weights of checkpoints: `python -m tools.average RUN_OR_CHECKPOINT … --out DIR`

Each argument is a checkpoint of any layout, or a run folder, of which all complete checkpoints are
taken (--last N: the newest N of each run); they must be of one model with one tokenizer. The order
is that of their steps. (checkpoint.keep_last and keep_every say which ones a run keeps.)

    --kind uniform             the mean
    --kind exponential         m ← decay · m + (1 − decay) · next, from the oldest on

--out becomes a checkpoint with only weights, which tools.evaluate, generate, export and verify
read, and checkpoint.load_weights_only; its average.json lists what it was made of. Averaging the
last checkpoints of a run replaces a part of the learning rate's decay (Izmailov et al. 2018,
https://arxiv.org/abs/1803.05407; of language models: Sanyal et al. 2023,
https://arxiv.org/abs/2306.03241).

A sum is x₀ + Σ w (x − x₀) in float64, so identical checkpoints give the same bits; the result has
the checkpoints' dtype. In memory are the tensors of one file to be written (at most --file-bytes,
or one larger tensor), and some rows of one tensor of each checkpoint. The exit status is 2 if
something is refused.
"""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import tokenizer_files
from errors import UserError
from runtime.checkpoints.manifest import MANIFEST
from runtime.checkpoints.run_folder import checkpoints_of
from tools.command import CommandParser, at_least, reports_errors, run_command
from tools.huggingface.checkpoint_reader import WEIGHTS, CheckpointReader
from tools.huggingface.new_folder import refuse_existing, write_weights
from tools.huggingface.tensor_files import DTYPES, Piece

FILE_BYTES = 1_000_000_000
NUMBERS_AT_ONCE = 1 << 22  # of each checkpoint, in float64
KINDS = ("uniform", "exponential")
OF_THE_RUN = ("seq_len", "seed", "model")  # of trainer.json; that of the newest is kept


def find(named: Sequence[Path], last: int | None) -> list[CheckpointReader]:
    """The checkpoints to average, oldest first. Raises UserError."""
    folders: list[Path] = []
    for folder in named:
        found = checkpoints_of(folder, "RUN_OR_CHECKPOINT")
        folders += found if last is None else found[-last:]
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            why = "it is named twice, and would count twice"
            raise UserError("RUN_OR_CHECKPOINT", str(folder), why, "name each checkpoint once")
    if len(folders) < 2:
        why = "there is only this one"
        raise UserError("RUN_OR_CHECKPOINT", str(folders[0]), why, "name two or more checkpoints")
    readers = [CheckpointReader(each, "RUN_OR_CHECKPOINT", verified=True) for each in folders]
    readers.sort(key=lambda reader: reader.trainer.step)
    for reader in readers[1:]:
        check_alike(readers[0], reader)
    return readers


def check_alike(one: CheckpointReader, other: CheckpointReader) -> None:
    """Raise UserError unless two checkpoints are of one model, dtype and tokenizer."""

    def refuse(what: str, remedy: str) -> None:
        why = f"{what} differs from that of {one.folder}"
        raise UserError("RUN_OR_CHECKPOINT", str(other.folder), why, remedy)

    for name, value in vars(one.model).items():
        if value != getattr(other.model, name):
            said = f"its model.{name}={getattr(other.model, name)!r}"
            refuse(said, f"average checkpoints with model.{name}={value!r}")
    if tensors_of(one) != tensors_of(other):
        changed = tensors_of(one).items() ^ tensors_of(other).items()
        refuse(f"its {min(name for name, _ in changed)}", "average checkpoints of one dtype")
    files = [
        {name: path.read_bytes() for name, path in tokenizer_files(reader.folder).items()}
        for reader in (one, other)
    ]
    if files[0] != files[1]:
        refuse("its tokenizer", "average checkpoints with the same tokenizer")


def tensors_of(reader: CheckpointReader) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The weights and biases of a checkpoint, without optimizer states: their dtypes and shapes."""
    return {n: t for n, t in reader.manifest.tensors.items() if n.startswith(WEIGHTS)}


def weights(count: int, kind: str, decay: float) -> list[float]:
    """The weight of each checkpoint, oldest first; their sum is 1."""
    if kind == "uniform":
        return [1 / count] * count
    later = [(1 - decay) * decay ** (count - 1 - i) for i in range(1, count)]
    return [decay ** (count - 1), *later]


def average(readers: Sequence[CheckpointReader], shares: Sequence[float], name: str) -> Tensor:
    """One averaged tensor, in its own dtype."""
    dtype, shape = readers[0].manifest.tensors[WEIGHTS + name]
    whole = torch.empty(shape, dtype=DTYPES[dtype])
    height = max(1, NUMBERS_AT_ONCE // math.prod(shape[1:]))
    for start in range(0, shape[0], height):
        rows = range(start, min(start + height, shape[0]))
        region = [rows, *map(range, shape[1:])]
        first, *others = (reader.region(name, region).double() for reader in readers)
        change = torch.zeros_like(first)
        for other, share in zip(others, shares[1:], strict=True):
            change.add_(other - first, alpha=share)
        # where nothing changes the bits stay, also those of −0
        whole[start : rows.stop] = torch.where(change == 0, first, first + change)
    return whole


def write(
    readers: Sequence[CheckpointReader],
    shares: Sequence[float],
    out: Path,
    about: dict[str, Any],
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the averaged checkpoint `out`, whole or not at all."""
    newest = readers[-1]
    tensors = tensors_of(newest)
    pieces = []
    for name, (dtype, shape) in tensors.items():
        load = partial(average, readers, shares, name.removeprefix(WEIGHTS))
        pieces.append(Piece(name, math.prod(shape) * DTYPES[dtype].itemsize, load))
    trainer = {
        **{key: getattr(newest.trainer, key) for key in OF_THE_RUN},
        "data": {"checksum": "averaged", "next_sample": 0, "skipped": []},
    }
    files = {name: path.read_bytes() for name, path in tokenizer_files(newest.folder).items()}
    files["average.json"] = json.dumps(about, indent=1).encode()
    task = f"averaging {len(readers)} checkpoints"
    write_weights(out, pieces, tensors, files, trainer, file_bytes, task)


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.average", description=__doc__)
    what = "checkpoints, or run folders"
    parser.option("checkpoints", Path, "RUN_OR_CHECKPOINT", what, nargs="+")
    parser.required("--out", Path, "DIR", "the checkpoint to write, which must not exist yet")
    parser.option("--last", int, "N", "of each run only the newest N (default: all)")
    parser.option("--kind", "uniform", None, "the weights", choices=KINDS)
    parser.option("--decay", 0.5, "D", "exponential: what the average keeps at each checkpoint")
    parser.option("--file-bytes", FILE_BYTES, "N", "the most bytes of tensors in one file")
    options = parser.parse_args(arguments)
    at_least(1, last=options.last, file_bytes=options.file_bytes)
    if not 0 <= options.decay < 1:
        why = "it is the share that is kept, from 0 up to but not including 1"
        raise UserError("--decay", options.decay, why, "give for example 0.5")
    refuse_existing(options.out)
    readers = find(options.checkpoints, options.last)
    shares = weights(len(readers), options.kind, options.decay)
    sources = [
        {"path": str(r.folder), "step": r.trainer.step, "tokens": r.trainer.tokens, "weight": w}
        for r, w in zip(readers, shares, strict=True)
    ]
    write(readers, shares, options.out, {"checkpoints": sources}, options.file_bytes)
    for source in sources:
        print(f"{source['weight']:.6f} × {source['path']}, step {source['step']}")
    size = sum(path.stat().st_size for path in options.out.iterdir() if path.name != MANIFEST)
    print(f"{options.out}: {size:,} bytes, and {MANIFEST} with their checksums")
    return 0


if __name__ == "__main__":
    run_command(main)
