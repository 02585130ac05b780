"""Measures the cost of saving a checkpoint: `python -m benchmarks.checkpoint`

One process saves a model of some hundred megabytes, with its optimizer moments, several times,
alternately in the background and synchronously. In the same rounds, the same bytes are copied once
in memory, and written by `dd` with fsync. The results are ratios: how long training waits for a
background save, as a multiple of the plain copy; and how fast a save writes, as a fraction of dd's
speed. The first save of a run also allocates the memory for the copy; it is reported separately.
"""

import contextlib
import io
import itertools
import os
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare import ROOT, alternate, parser, ratio, timed, write
from benchmarks.train_cpu import ALONE, build
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.save import Saver
from runtime.log.events import read_events
from runtime.log.run_log import RunLog
from runtime.trainer_state import DataState
from settings.load import load_config
from tools.command import run_command

SIZES = ["model.dim=512", "model.ffn_dim=1536", "model.num_layers=6", "model.vocab_size=8192"]


def measure(rounds: int, folder: Path, lease: Lease) -> dict[str, Any]:
    keys = [*SIZES, *ALONE, f"run.dir={folder / 'run'}"]
    config = load_config(str(ROOT / "configs/laptop.yaml"), keys)
    train = build(config)
    saver = Saver(train, ROOT / "README.md", lease, RunLog(config))
    source = [tensor.to_local() for tensor in saver.tensors.values()]
    target = [torch.empty_like(tensor).fill_(0) for tensor in source]
    size, steps = sum(tensor.nbytes for tensor in source), itertools.count()

    def copy() -> float:
        return timed(lambda: [t.copy_(s) for t, s in zip(target, source, strict=True)]).seconds

    def dd() -> float:
        command = ["dd", "if=/dev/zero", f"of={folder / 'plain'}", "bs=1M", f"count={size >> 20}",
                   "conv=fsync"]  # fmt: skip
        return timed(lambda: subprocess.run(command, check=True, capture_output=True)).seconds

    def save(in_background: bool = True) -> tuple[float, float]:
        """The seconds that training waits, and those from the copy to the commit."""
        train.config = replace(
            config, checkpoint=replace(config.checkpoint, async_save=in_background)
        )
        state = DataState(checksum="none", next_sample=0, skipped=[])
        waited = timed(lambda: saver.save(next(steps), 0, state)).seconds
        saver.close()
        return waited, read_events(folder / "run")[-1]["write_seconds"]

    with contextlib.redirect_stdout(io.StringIO()):
        first, _ = save()
        saves = {"background": save, "at once": lambda: save(in_background=False)}
        found = alternate({"copy": copy, **saves, "dd": dd}, rounds)
    copies, dds = found["copy"], found["dd"]
    background, at_once = ([waited for waited, _ in found[name]] for name in saves)
    return {
        "bytes": size,
        "rounds": rounds,
        "first_stall_over_copy": first / statistics.median(copies),
        "stall_over_copy": ratio(background, copies),
        "stall_over_save_at_once": ratio(background, at_once),
        "write_speed_over_dd": ratio(dds, [write for _, write in found["at once"]]),
    }


def main() -> None:
    options = parser("checkpoint", __doc__, rounds=7)
    options.add_argument("--folder", type=Path, help="where to write (default: temporary files)")
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with (
        tempfile.TemporaryDirectory(dir=chosen.folder) as folder,
        Lease(Path(folder) / "run", "cpu") as lease,
    ):
        results = measure(chosen.rounds, Path(folder), lease)
    write(chosen.json, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
