"""Compares the peak memory of training on a GPU with the plan and with the rehearsal.

    python -m benchmarks.gpu_memory                part of `make bench-gpu PART=right`

The rehearsal (tools/rehearse) runs the same step on tensors without data, and the planner
(tools/plan) adds up the recorded costs of the layers; both in another process, which needs no GPU.
Measured is `torch.cuda.max_memory_allocated` over two steps, from before the model is built. The
bound is 5 % of the rehearsal, because the rehearsal does not see what operators allocate and free
inside themselves (docs/plan_accuracy.md).

The exit status is 1 if a measured peak is farther off.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_process import run_python, without_gpu
from benchmarks.gpu_programs import (
    SMALL,
    WIDE,
    Size,
    Variant,
    build,
    config_of,
    measurements,
    sizes,
)
from benchmarks.gpu_rows import exit_status, options, parse, run_training
from benchmarks.gpu_timing import ON_GPU
from tools.command import run_command
from tools.rehearse.rank import rows as batch_of
from training.config import Config
from training.load_config import dump_config

BOUND = 0.05
LAYERS = 4  # of the wide model: enough to tell what a layer takes
ROWS = [
    (WIDE, Variant()),
    (WIDE, Variant(checkpointing="selective")),
    (WIDE, Variant(checkpointing="full")),
    (WIDE, Variant(bfloat16=True)),
    (WIDE, Variant(zero_stage=0)),
    (WIDE, Variant(zero_stage=3)),
    (SMALL, Variant()),
    (SMALL, Variant(checkpointing="selective")),
]


def predicted(config: Config, folder: Path) -> dict[str, Any]:
    """The report of `python -m tools.rehearse`, with the plan."""
    path, result = folder / "config.yaml", folder / "report.json"
    path.write_text(dump_config(config), encoding="utf-8")
    asked = [str(path), "--rank", "0", "--gpus", "1", "--json", str(result)]
    run_python("-m", "tools.rehearse", *asked, environment=without_gpu())
    return json.loads(result.read_text(encoding="utf-8"))


def measured_peak(config: Config) -> int | None:
    """The peak of two steps in bytes; None without a GPU."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    train = build(config)
    batch = batch_of(config, train.mesh)
    for step in range(2):
        train(step, *batch)
    return torch.cuda.max_memory_allocated() - before if ON_GPU else None


def measure(size: Size, variant: Variant) -> dict[str, Any]:
    config = config_of(size, variant)
    with tempfile.TemporaryDirectory() as folder:
        report = predicted(config, Path(folder))
    peak, rehearsed = measured_peak(config), report["peak_memory_bytes"]
    row = {
        "rehearsed_bytes": rehearsed,
        "planned_bytes": report["planned"]["peak_memory_bytes"],
        "measured_bytes": peak,
        "peak_in": report["peak_in"],
        "memory": report["memory"],
    }
    if peak is None:
        return row
    row |= {"over_rehearsed": peak / rehearsed, "over_planned": peak / row["planned_bytes"]}
    return {**row, "right": abs(row["over_rehearsed"] - 1) <= BOUND}


def describe(row: dict[str, Any]) -> str:
    said = f"{row['name']:46}rehearsed {row['rehearsed_bytes'] / 1e9:8.3f} GB, "
    said += f"planned {row['planned_bytes'] / 1e9:8.3f} GB"
    if row["measured_bytes"] is None:
        return said
    return f"{said}, measured {row['measured_bytes'] / 1e9:8.3f} GB = {row['over_rehearsed']:.3f} ×"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=150), arguments)
    shapes = sizes(parsed.tiny)
    if not parsed.tiny:
        wide = shapes[WIDE]
        shapes[WIDE] = replace(wide, model=replace(wide.model, num_layers=LAYERS))
    rows = measurements("memory", ROWS, shapes, 20, measure)
    return exit_status(run_training(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
