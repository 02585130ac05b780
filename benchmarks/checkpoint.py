"""Measures the cost of saving a checkpoint: `python -m benchmarks.checkpoint`

One process saves a model of some hundred megabytes, with its optimizer moments, several times,
alternately in the background and synchronously. In the same rounds, the same bytes are copied once
in memory, and written by `dd` with fsync. The results are ratios: how long training waits for a
background save, as a multiple of the plain copy; and how fast a save writes, as a fraction of dd's
speed. The first save of a run also allocates the memory for the copy; it is reported separately.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.about import about
from parallel.axes import MeshSizes
from parallel.mesh import build_mesh
from runtime.checkpoints.lease import Lease
from runtime.checkpoints.save import Saver
from tools.command import CommandParser, run_command
from training.build import build_stages
from training.load_config import load_config
from training.step import TrainStep

ROOT = Path(__file__).parent.parent
OVERRIDES = ["model.dim=512", "model.ffn_dim=1536", "model.num_layers=6", "model.vocab_size=8192"]
ALONE = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1"]


def seconds(action) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def dd(path: Path, size: int) -> float:
    """Seconds to write `size` bytes durably."""
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={size >> 20}", "conv=fsync"]
    return seconds(lambda: subprocess.run(command, check=True, capture_output=True))


def measure(rounds: int, folder: Path) -> dict:
    with Lease(folder / "run", "cpu") as lease:
        return measure_saves(rounds, folder, lease)


def measure_saves(rounds: int, folder: Path, lease: Lease) -> dict:
    config = load_config(
        str(ROOT / "configs/laptop.yaml"), [*OVERRIDES, *ALONE, f"run.dir={folder / 'run'}"]
    )
    mesh = build_mesh(MeshSizes(), "cpu", config.model.has_experts)
    train = TrainStep(config, mesh, build_stages(config, mesh))
    saver = Saver(train, ROOT / "README.md", lease)
    source = [tensor.to_local() for tensor in saver.tensors.values()]
    target = [torch.empty_like(tensor).fill_(0) for tensor in source]
    size = sum(tensor.nbytes for tensor in source)
    at_once = replace(config, checkpoint=replace(config.checkpoint, async_save=False))
    state = {"next_sample": 0, "skipped": []}
    rows = []
    step = 0
    with contextlib.redirect_stdout(io.StringIO()):
        first = seconds(lambda: saver.save(0, 0, state))
        saver.close()
        for _ in range(rounds):
            copied = seconds(lambda: [t.copy_(s) for t, s in zip(target, source, strict=True)])
            row = {"copy": copied}
            for name, chosen in (("background", config), ("at_once", at_once)):
                train.config = chosen
                step += 1
                row[name] = seconds(lambda step=step: saver.save(step, 0, state))
                saver.close()
            events = [
                json.loads(line)
                for line in (folder / "run" / "events.jsonl").read_text().splitlines()
            ]
            row["write"] = events[-1]["write_seconds"]
            row["dd"] = dd(folder / "plain", size)
            rows.append(row)

    def median(ratio) -> float:
        return statistics.median(ratio(row) for row in rows)

    return {
        "bytes": size,
        "rounds": rounds,
        "first_stall_over_copy": first / median(lambda row: row["copy"]),
        "stall_over_copy": median(lambda row: row["background"] / row["copy"]),
        "stall_over_save_at_once": median(lambda row: row["background"] / row["at_once"]),
        "write_speed_over_dd": median(lambda row: row["dd"] / row["write"]),
        "rows": rows,
    }


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/checkpoint.json")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.rounds, Path(folder))
    result = {**about(), **result}
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
