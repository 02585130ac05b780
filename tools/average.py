"""Averages the weights of checkpoints: `python -m tools.average RUN_OR_CHECKPOINT … --out DIR`

Each argument is a checkpoint of any layout, or a run folder, of which all complete checkpoints are
taken (--last N: the newest N of each run); they must be of one model with one tokenizer. Each
counts once. (checkpoint.keep_last and keep_every say which ones a run keeps.)

--out becomes a checkpoint with only weights, which tools.evaluate, generate, export and verify
read, and checkpoint.load_weights_only; its average.json lists what it was made of. Averaging the
last checkpoints of a run replaces a part of the learning rate's decay (Izmailov et al. 2018,
https://arxiv.org/abs/1803.05407; of language models: Sanyal et al. 2023,
https://arxiv.org/abs/2306.03241).

The mean is x₀ + Σ (x − x₀) / n in float64, so identical checkpoints give the same bits; the result
has the checkpoints' dtype. In memory are the tensors of one file to be written (at most FILE_BYTES,
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
FILE_BYTES = 1_000_000_000
KEY = "RUN_OR_CHECKPOINT"
OF_THE_RUN = ("seq_len", "seed", "model")  # of trainer.json; that of the newest is kept


def find(named: Sequence[Path], last: int | None) -> list[CheckpointReader]:
    """The checkpoints to average, oldest first. Raises UserError."""
    found: dict[Path, Path] = {}
    for folder in named:
        newest = checkpoints_of(folder, KEY)[-(last or 0) :]  # -0: all
        found |= {each.resolve(): each for each in newest}
    first, *others = found.values()
    if not others:
        raise UserError(KEY, str(first), "there is only this one", "name two or more checkpoints")
    readers = [CheckpointReader(each, KEY) for each in found.values()]
    readers.sort(key=lambda reader: reader.trainer.step)
    expected = facts(readers[0])
    for reader in readers[1:]:
        about = facts(reader)
        for name in expected | about:
            wanted, value = expected.get(name), about.get(name)
            if value != wanted:
                why = f"its {name}={value!r} differs from {wanted!r} in {readers[0].folder}"
                remedy = "average checkpoints of one model, dtype and tokenizer"
                raise UserError(KEY, str(reader.folder), why, remedy)
    return readers


def facts(reader: CheckpointReader) -> dict[str, Any]:
    """What checkpoints must have in common: their model, tensors and tokenizer."""
    model = {key: value for key, value, _ in keys_of(reader.model)}
    files = tokenizer_files(reader.folder).items()
    return model | reader.tensors | {name: fingerprint(path) for name, path in files}


def average(readers: Sequence[CheckpointReader], name: str) -> Tensor:
    """One averaged tensor, in its own dtype."""
    dtype, shape = readers[0].tensors[name]
    whole = torch.empty(shape, dtype=DTYPES[dtype])
    height = max(1, NUMBERS_AT_ONCE // math.prod(shape[1:]))
    for start in range(0, shape[0], height):
        rows = range(start, min(start + height, shape[0]))
        region = [rows, *map(range, shape[1:])]
        first, *others = (reader.region(name, region).double() for reader in readers)
        change = torch.zeros_like(first)
        for other in others:
            change += (other - first) / len(readers)
        # where nothing changes the bits stay, also those of −0
        whole[start : rows.stop] = torch.where(change == 0, first, first + change)
    return whole


@reports_errors
def main(arguments: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m tools.average", description=__doc__)
    parser.option("checkpoints", Path, KEY, "checkpoints, or run folders", nargs="+")
    parser.required("--out", Path, "DIR", "the checkpoint to write, which must not exist yet")
    parser.option("--last", int, "N", "of each run only the newest N (default: all)")
    options = parser.parse_args(arguments)
    at_least(1, last=options.last)
    refuse_existing(options.out)
    readers = find(options.checkpoints, options.last)
    newest = readers[-1]
    sources = [
        {"path": str(each.folder), "step": each.trainer.step, "tokens": each.trainer.tokens}
        for each in readers
    ]
    about = json.dumps({"checkpoints": sources}, indent=1).encode()
    files = {name: path.read_bytes() for name, path in tokenizer_files(newest.folder).items()}
    write_weights(
        options.out,
        newest.tensors,
        lambda name: average(readers, name),
        files | {"average.json": about},
        {
            **{key: getattr(newest.trainer, key) for key in OF_THE_RUN},
            "data": {"checksum": "averaged", "next_sample": 0, "skipped": []},
        },
        FILE_BYTES,
        f"averaging {len(readers)} checkpoints",
    )
    for source in sources:
        print(f"{source['path']}, step {source['step']}")
    print(f"{options.out}: {read_manifest(options.out).num_bytes:,} bytes")


if __name__ == "__main__":
    run_command(main)
