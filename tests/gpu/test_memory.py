"""The peak memory of training on a GPU compared with the plan and with the rehearsal.

The rehearsal (tools/rehearse) runs the same step on tensors without data, and the planner
(tools/plan) adds up the recorded costs of the layers; both in another process, which needs no GPU.
Measured is `torch.cuda.max_memory_allocated` over two steps, from before the model is built. One
H200 was 0.2 % away at most (docs/plan_accuracy.md).
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.programs import SMALL, WIDE, Variant, build, config_of, sizes
from benchmarks.gpu.timing import ON_GPU
from settings.config import Config
from settings.load import dump_config
from tests import ROOT
from tools.rehearse.rank import rows as batch_of

BOUND = 0.01
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
    command = [sys.executable, "-m", "tools.rehearse", str(path), "--rank", "0", "--gpus", "1"]
    without_gpu = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "--json", str(result)], cwd=ROOT, env=without_gpu, check=True)
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


def compare(peak: int | None, report: dict[str, Any]) -> dict[str, Any]:
    rehearsed, planned = report["peak_memory_bytes"], report["planned"]["peak_memory_bytes"]
    row = {"measured_bytes": peak, "rehearsed_bytes": rehearsed, "planned_bytes": planned}
    if peak is not None:
        row |= {"over_rehearsed": peak / rehearsed, "over_planned": peak / planned}
    return {**row, "peak_in": report["peak_in"]}


def assert_as_rehearsed(row: dict[str, Any]) -> None:
    for name in ("over_rehearsed", "over_planned"):
        assert abs(row.get(name, 1.0) - 1) <= BOUND, name


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("key", "variant"), [pytest.param(*row, id=f"{row[0]}, {row[1].name}") for row in ROWS]
)
def test_the_peak_is_that_of_the_rehearsal(
    tmp_path: Path, key: str, variant: Variant, record: Any
) -> None:
    size = sizes()[key]
    if key == WIDE and ON_GPU:
        size = replace(size, model=replace(size.model, num_layers=LAYERS))
    config = config_of(size, variant)
    row = compare(measured_peak(config), predicted(config, tmp_path))
    record(row)
    assert_as_rehearsed(row)


@pytest.mark.parametrize("factor", [1.011, 0.989])
def test_memory_that_differs_from_the_rehearsal_is_found(factor: float) -> None:
    report = {"peak_memory_bytes": 10_000, "peak_in": "F0.0",
              "planned": {"peak_memory_bytes": 10_001}}  # fmt: skip
    assert_as_rehearsed(compare(10_090, report))
    with pytest.raises(AssertionError, match="over_rehearsed"):
        assert_as_rehearsed(compare(int(10_000 * factor), report))
