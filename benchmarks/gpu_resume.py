"""Checks that a run on the GPU that is saved and resumed ends with the same bits.

    python -m benchmarks.gpu_resume                part of `make bench-gpu PART=right`

train.py itself runs in other processes: six steps with a checkpoint after the third, then a second
run that resumes from that checkpoint. With train.deterministic, the losses of the last three steps
and every byte of the tensors of the last checkpoint must be equal. Without it, the row says by how
much the losses differ: flash attention adds up gradients in any order.

The exit status is 1 if they are not equal.
"""

import hashlib
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu_process import run_python
from benchmarks.gpu_rows import Measurement, exit_status, options, parse, run_all
from tools.command import run_command

HALF, WHOLE = 3, 6  # steps
DIVERGENCE = 2**-8  # relative, of a loss, where bits may differ


def train(folder: Path, data: Path, **sections: dict[str, Any]) -> dict[int, float]:
    """Runs train.py in `folder`; returns the loss of each step."""
    from tests.runs import losses, write_config

    folder.mkdir()
    config = write_config(folder, data, **sections)
    run_python("train.py", config, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    return losses(folder)


def tensors(folder: Path) -> dict[str, str]:
    """The sha256 of each tensor of a run's last checkpoint, by name. (A file may hold them in any
    order.)"""
    last = folder / "run" / "checkpoints" / f"step-{WHOLE:08d}"
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()
        for file in sorted(last.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def resume(deterministic: bool, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from tests.data_samples import prepared  # needs SentencePiece

    with tempfile.TemporaryDirectory() as temporary:
        data = prepared(Path(temporary) / "data")
        base = {
            **settings,
            "train": {"dtype": "bfloat16", "steps": WHOLE, "deterministic": deterministic},
        }
        whole, resumed = (Path(temporary) / name for name in ("whole", "resumed"))
        expected = train(whole, data, **base, checkpoint={"interval": HALF, "keep_last": 3})
        start = whole / "run" / "checkpoints" / f"step-{HALF:08d}"
        again = {"interval": HALF, "resume": str(start)}
        found = train(resumed, data, **base, checkpoint=again)
        off = max(abs(found[step] / expected[step] - 1) for step in range(HALF + 1, WHOLE + 1))
        same = tensors(whole) == tensors(resumed) and bool(tensors(whole))
    row = {"loss_off": off, "same_bytes": same, "steps": sorted(found)}
    right = off == 0 and same if deterministic else off <= DIVERGENCE
    return {**row, "right": right and row["steps"] == list(range(HALF + 1, WHOLE + 1))}


def describe(row: dict[str, Any]) -> str:
    bits = "the same bytes" if row["same_bytes"] else "other bytes"
    return f"{row['name']:46}losses {row['loss_off']:.1e} off, checkpoints with {bits}"


ROWS = {
    "resume, deterministic": (True, {}),
    "resume, deterministic, pure_bfloat16": (True, {"optimizer": {"pure_bfloat16": True}}),
    "resume, not deterministic": (False, {}),
}


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=120), arguments)
    rows = [Measurement(name, 40, partial(resume, *given)) for name, given in ROWS.items()]
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
