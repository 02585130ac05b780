"""Compares a run of benchmarks/elastic_drill.py with an undisturbed one: rows, losses, weights."""

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runtime.checkpoints.run_folder import complete_checkpoints
from tests.runs import global_state


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """Step → the line of metrics.jsonl."""
    found = {}
    if (run / "metrics.jsonl").exists():
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # it is being written
                one = json.loads(line)
                found[one["step"]] = one
    return found


def rows_of(folder: Path) -> dict[tuple[int, int], str]:
    """(step, place in the global batch) → the row that the step was trained on last."""
    lines = [
        json.loads(line)
        for file in (folder / "rows").glob("*.jsonl")
        for line in file.read_text().splitlines()
        if line.endswith("}")
    ]
    found = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        for place, row in enumerate(line["rows"], line["first"]):
            found[line["step"], place] = row
    return found


def state_of(config: Path, run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint, whole, read by one process."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        single = ["parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "parallel.layouts=[]"]
        newest = complete_checkpoints(run / "checkpoints")[-1]
        return global_state([str(config), *single], str(newest))
    finally:
        dist.destroy_process_group()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest element."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) if a.numel() else 0.0


def compare(drilled: Path, alone: Path) -> dict[str, Any]:
    """What differs between a drilled run and the undisturbed one, in two folders of `make_run`."""
    found, expected = metrics(drilled / "run"), metrics(alone / "run")
    rows, honest = rows_of(drilled), rows_of(alone)
    worst = {
        key: max(abs(found[step][key] / line[key] - 1) for step, line in expected.items())
        for key in ("loss", "grad_norm")
    }
    states = [state_of(folder / "config.yaml", folder / "run") for folder in (drilled, alone)]
    assert states[0].keys() == states[1].keys()
    return {
        "steps": len(found),
        "rows": len(rows),
        "rows_equal": rows == honest,
        "rows_distinct": len(set(rows.values())),
        "tokens_equal": all(found[s]["tokens"] == line["tokens"] for s, line in expected.items()),
        "worst_relative_difference": worst
        | {"state": max(difference(t, states[1][name]) for name, t in states[0].items())},
    }
