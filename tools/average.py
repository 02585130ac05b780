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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import tokenizer_files
from declare import keys_of
from errors import UserError
from runtime.checkpoint.folder import checkpoints_of
from runtime.checkpoint.manifest import fingerprint, read_manifest
from tools.command import CommandParser, at_least, reports_errors, run_command
from tools.huggingface.checkpoint_reader import DTYPES, CheckpointReader
from tools.huggingface.new_folder import refuse_existing, write_weights

NUMBERS_AT_ONCE = 1 << 22  # of each checkpoint, in float64
KINDS = ("uniform", "exponential")
OF_THE_RUN = ("seq_len", "seed", "model")  # of trainer.json; that of the newest is kept


def find(named: Sequence[Path], last: int | None) -> list[CheckpointReader]:
    """The checkpoints to average, oldest first. Raises UserError."""
    folders: list[Path] = []
    for folder in named:
        folders += checkpoints_of(folder, "RUN_OR_CHECKPOINT")[-(last or 0) :]  # -0: all
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            why = "it is named twice, and would count twice"
            raise UserError("RUN_OR_CHECKPOINT", str(folder), why, "name each checkpoint once")
    if len(folders) < 2:
        why = "there is only this one"
        raise UserError("RUN_OR_CHECKPOINT", str(folders[0]), why, "name two or more checkpoints")
    readers = [CheckpointReader(each, "RUN_OR_CHECKPOINT") for each in folders]
    readers.sort(key=lambda reader: reader.trainer.step)
    expected = facts(readers[0])
    for reader in readers[1:]:
        found = facts(reader)
        for name in expected | found:
            wanted, value = expected.get(name), found.get(name)
            if value != wanted:
                why = f"its {name}={value!r} differs from {wanted!r} in {readers[0].folder}"
                remedy = "average checkpoints of one model, dtype and tokenizer"
                raise UserError("RUN_OR_CHECKPOINT", str(reader.folder), why, remedy)
    return readers


def facts(reader: CheckpointReader) -> dict[str, Any]:
    """What checkpoints must have in common: their model, tensors and tokenizer."""
    model = {key: value for key, value, _ in keys_of(reader.model)}
    files = tokenizer_files(reader.folder).items()
    return model | reader.tensors | {name: fingerprint(path) for name, path in files}


def weights(count: int, kind: str, decay: float) -> list[float]:
    """The weight of each checkpoint, oldest first; their sum is 1."""
    if kind == "uniform":
        return [1 / count] * count
    later = [(1 - decay) * decay ** (count - 1 - i) for i in range(1, count)]
    return [decay ** (count - 1), *later]


def average(readers: Sequence[CheckpointReader], shares: Sequence[float], name: str) -> Tensor:
    """One averaged tensor, in its own dtype."""
    dtype, shape = readers[0].tensors[name]
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


@reports_errors
def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(prog="python -m tools.average", description=__doc__)
    named = "checkpoints, or run folders"
    parser.option("checkpoints", Path, "RUN_OR_CHECKPOINT", named, nargs="+")
    parser.required("--out", Path, "DIR", "the checkpoint to write, which must not exist yet")
    parser.option("--last", int, "N", "of each run only the newest N (default: all)")
    parser.option("--kind", "uniform", None, "the weights", choices=KINDS)
    parser.option("--decay", 0.5, "D", "exponential: what the average keeps at each checkpoint")
    parser.option("--file-bytes", 1_000_000_000, "N", "the most bytes of tensors in one file")
    options = parser.parse_args(arguments)
    at_least(1, last=options.last, file_bytes=options.file_bytes)
    at_least(0, 1, decay=options.decay)
    refuse_existing(options.out)
    readers = find(options.checkpoints, options.last)
    shares, newest = weights(len(readers), options.kind, options.decay), readers[-1]
    sources = [
        {"path": str(r.folder), "step": r.trainer.step, "tokens": r.trainer.tokens, "weight": w}
        for r, w in zip(readers, shares, strict=True)
    ]
    about = json.dumps({"checkpoints": sources}, indent=1).encode()
    files = {name: path.read_bytes() for name, path in tokenizer_files(newest.folder).items()}
    write_weights(
        options.out,
        newest.tensors,
        lambda name: average(readers, shares, name),
        files | {"average.json": about},
        {
            **{key: getattr(newest.trainer, key) for key in OF_THE_RUN},
            "data": {"checksum": "averaged", "next_sample": 0, "skipped": []},
        },
        options.file_bytes,
        f"averaging {len(readers)} checkpoints",
    )
    for source in sources:
        print(f"{source['weight']:.6f} × {source['path']}, step {source['step']}")
    print(f"{options.out}: {read_manifest(options.out).num_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    run_command(main)
