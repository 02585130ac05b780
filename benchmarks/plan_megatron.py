"""Compares the planner's MFU with Megatron-LM's published weak scaling on H100s.

    python -m benchmarks.plan_megatron

All rows use the same hardware constants (hardware.py). Settings that the publication does not state
are chosen by the same rule for all rows: the fastest configuration that fits in 80 GB, with
micro-batches of 1, 2, 4 or 8 sequences and any number of virtual stages up to 8 that divides the
layers; without recomputation if any such configuration fits. The models are ours: a gated
feed-forward of 8/3 of the width, and as many key/value heads as query heads. Megatron-LM counts
attention as the whole square, and so does the column compared.
"""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

from errors import UserError
from tools.command import run_command
from tools.plan.hardware import find_device
from tools.plan.layout import Layout
from tools.plan.search import Found
from training.config import Config
from training.load_config import load_config

BASE = Path(__file__).parent.parent / "configs" / "llama3_70b.yaml"
RESULTS = Path(__file__).parent / "results" / "plan_megatron.json"
MEAN_LIMIT, LARGEST_LIMIT = 3.0, 6.0  # points of MFU


class Row(NamedTuple):
    """A published figure; all are for bf16, sequence 4096, vocabulary 131,072, data-parallel 48."""

    name: str
    heads: int
    hidden: int
    layers: int
    tp: int
    pp: int
    gpus: int
    batch: int
    teraflops: float  # per second and GPU


ROWS = [
    Row("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
    Row("16B", 48, 6144, 32, 4, 1, 192, 192, 489.1),
    Row("70B", 64, 8192, 84, 8, 2, 768, 384, 419.7),
    Row("177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8),
    Row("462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9),
]


def best(row: Row) -> Found:
    """The configuration chosen by the rule."""
    device = find_device("h100")
    room = device.room
    stages = [v for v in range(1, 9) if v == 1 or (row.pp > 1 and row.layers % (row.pp * v) == 0)]
    for mode in ("none", "selective", "full"):
        found = []
        for size, v in itertools.product((1, 2, 4, 8), stages):
            config = config_of(row, size, v, mode)
            try:
                layout = Layout(config, row.gpus, 0)
                if config.num_microbatches(layout.sizes.dp) and layout.schedule:
                    found.append(Found(config, row.gpus, device))
            except UserError:  # a schedule that does not take this number of micro-batches
                continue
        for one in sorted(found, key=lambda one: one.seconds):
            if one.peak <= room:
                return one
    raise UserError("row", row.name, "does not fit 80 GB", "use more GPUs")


def config_of(row: Row, micro_batch_size: int, virtual_stages: int, checkpointing: str) -> Config:
    """The configuration of a row. Settings not in the row are those of llama3_70b.yaml: zero_stage
    1 and sequence parallelism, as in Megatron-LM."""
    keys = {
        "model.dim": row.hidden,
        "model.num_layers": row.layers,
        "model.num_heads": row.heads,
        "model.num_kv_heads": row.heads,
        "model.ffn_dim": round(8 / 3 * row.hidden / 64) * 64,
        "model.vocab_size": 131072,
        "parallel.tp": row.tp,
        "parallel.pp": row.pp,
        "parallel.dp_shard": row.gpus // (row.tp * row.pp),
        "parallel.schedule": "1f1b" if virtual_stages == 1 else "interleaved_1f1b",
        "parallel.stages_per_rank": virtual_stages,
        "parallel.tp_pieces": 1,
        "train.seq_len": 4096,
        "train.global_batch_size": row.batch,
        "train.micro_batch_size": micro_batch_size,
        "train.activation_checkpointing": checkpointing,
    }
    return load_config(str(BASE), [f"{key}={value}" for key, value in keys.items()])


def compare() -> list[dict[str, Any]]:
    table = []
    for row in ROWS:
        one = best(row)
        table.append(
            {
                "model": row.name,
                "published": row.teraflops * 1e12 / one.device.peak_flops,
                "predicted": one.time.mfu_full_attention,
                "predicted_causal": one.time.mfu,
                "micro_batch_size": one.config.train.micro_batch_size,
                "virtual_stages": one.config.parallel.stages_per_rank,
                "activation_checkpointing": one.config.train.activation_checkpointing,
                "step_seconds": one.seconds,
                "bubble_fraction": one.time.timeline.bubble_fraction,
                "peak_memory_bytes": one.peak,
            }
        )
    return table


def errors(table: list[dict[str, Any]]) -> tuple[float, float]:
    """The mean and the largest error, in points."""
    points = [100 * abs(row["predicted"] - row["published"]) for row in table]
    return sum(points) / len(points), max(points)


def main() -> int:
    table = compare()
    print(
        "model  published  predicted  (causal)  micro-batch  virtual stages  recomputed  bubble  "
        "peak GB"
    )
    for row in table:
        print(
            f"{row['model']:5s} {row['published']:10.1%} {row['predicted']:10.1%} "
            f"{row['predicted_causal']:9.1%} {row['micro_batch_size']:12d} "
            f"{row['virtual_stages']:15d}  {row['activation_checkpointing']:10s} "
            f"{row['bubble_fraction']:7.1%} {row['peak_memory_bytes'] / 1e9:8.1f}"
        )
    mean, largest = errors(table)
    print(
        f"error: {mean:.2f} points on average (aim: {MEAN_LIMIT:g}), {largest:.2f} at most "
        f"(aim: {LARGEST_LIMIT:g})"
    )
    RESULTS.write_text(
        json.dumps({"rows": table, "mean_error": mean, "largest_error": largest}, indent=1) + "\n",
        encoding="utf-8",
    )
    return 0 if mean <= MEAN_LIMIT and largest <= LARGEST_LIMIT else 1


if __name__ == "__main__":
    run_command(main)
