"""Profiles two training steps at the 8-billion model's width: where the time of a step goes.

    python -m benchmarks.gpu_profile               part of `make bench-gpu PART=fast`

The table is that of run.profile (runtime/profiling/profile_summary.py, docs/profiling.md). A second
one adds up the kernels by what they do, as their names tell.
"""

import json
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

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
from runtime.profiling.profile import axes_of_groups
from runtime.profiling.profile_summary import describe as describe_summary
from runtime.profiling.profile_summary import events_of, read_trace, summarise
from tools.command import run_command
from tools.rehearse.rank import rows as batch_of

STEPS = 2
# The kind of a kernel is the first whose expression its name contains, in lower case.
KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|sdpa|cudnn_generated",
    "matrix products": r"gemm|nvjet|cutlass|xmma|cublas|matmul",
    "copies and fills": r"copy|fill|memset|cat_|chunk_cat",
    "optimizer": r"adam|square_sum|multi_tensor|foreach",
}


def kind_of(kernel: str) -> str:
    found = (kind for kind, words in KINDS.items() if re.search(words, kernel.lower()))
    return next(found, "everything else: norms, rotary, SwiGLU, loss")


def profiled(size: Size, variant: Variant) -> dict[str, Any]:
    config = config_of(size, variant)
    train = build(config)
    batch = batch_of(config, train.mesh)
    train(0, *batch)  # compiles kernels, takes memory
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * ON_GPU
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        synchronize()
        with profile(activities=activities) as profiler:
            about = {"rank": 0, "coordinates": train.mesh.coordinates(),
                     "axes": axes_of_groups(train.mesh)}  # fmt: skip
            profiler.add_metadata_json("lattice", json.dumps(about))
            for step in range(1, STEPS + 1):
                with record_function(f"step {step}"):
                    train(step, *batch)
                    if step == STEPS:
                        synchronize()
        profiler.export_chrome_trace(str(path))
        trace = read_trace(path)
    summary = summarise(trace)
    kinds: dict[str, float] = defaultdict(float)
    for event in events_of(trace):
        if event.category == "kernel":
            kinds[kind_of(event.name)] += (event.end - event.begin) / 1e6 / STEPS
    shares = {kind: seconds / summary["step_seconds"] for kind, seconds in kinds.items()}
    rows = sorted(shares.items(), key=lambda item: -item[1])
    by_kind = "\n".join(f"{share:>8.1%}  {kind}" for kind, share in rows)
    return {
        **summary,
        "idle_share": summary["idle"] / summary["step_seconds"],
        "shares": shares,
        "text": describe_summary(summary) + (f"\n\nkernels by kind\n{by_kind}" if rows else ""),
    }


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def describe(row: dict[str, Any]) -> str:
    return f"{row['name']}\n\n{row['text']}\n"


ROWS = [(WIDE, Variant(checkpointing="selective")), (SMALL, Variant())]


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=60), arguments)
    rows = measurements("profile", ROWS, sizes(parsed.tiny), 20, profiled)
    return exit_status(run_training(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
