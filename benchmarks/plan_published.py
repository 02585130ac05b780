"""Compares the planner's MFU with the published figures of other systems, to which its constants
were not fitted.

    python -m benchmarks.plan_published

Every row uses the constants of hardware.py, except those that a publication states for its own
machines or kernels (memory and network bandwidth, cuDNN's attention). A row of
benchmarks/published_rows.py, or of published_experts.py for mixtures of experts, is planned as
Lattice would run it, with the same dimensions, layout, batch and recomputation. If the published
system does different work, the column `apart` names the difference; the file of results has more
detail, and the source and settings of every row. No row is left out because its error is large.

A feed-forward without a gate, 4·D wide, is planned as a gated one of 8/3·D, which has the same
operations and the same bytes. MFU is in the convention of the publication, with Lattice's
operations per token: attention `full` is the whole square, and `causal` is half of it. Published
tokens per second are converted to MFU in this way; published MFU is used unchanged.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_megatron, published_experts, published_rows
from benchmarks.published_rows import MEGATRON, NEMO, SC21, Model, Row
from costs.summary import flops_per_token
from tools.command import run_command
from tools.plan.hardware import find_device
from tools.plan.search import Found
from training.config import Config
from training.load_config import load_config

BASE = Path(__file__).parent.parent / "configs" / "llama3_70b.yaml"
ROWS = [*published_rows.ROWS, *published_experts.ROWS]
RESULTS = Path(__file__).parent / "results" / "plan_published.json"


def plan(row: Row) -> Found:
    if row.system is MEGATRON:
        m, size = row.model, (row.tp, row.pp, row.gpus, row.batch)
        return plan_megatron.best(
            plan_megatron.Row(row.model_name, m.num_heads, m.dim, m.num_layers, *size, 0.0)
        )
    rates: dict[str, Any] = dict(row.system.rates)
    device = replace(find_device(row.system.device), **rates)
    return Found(config_of(row), row.gpus, device)


def config_of(row: Row) -> Config:
    """The configuration of a row. Settings not in the row are those of llama3_70b.yaml, such as
    sequence parallelism over tp."""
    system, dp = row.system, row.gpus // (row.tp * row.cp * row.pp)
    replicas = dp if system.zero_stage == 0 else row.replicas
    keys: dict[str, Any] = {f"model.{key}": value for key, value in dimensions(row.model).items()}
    keys |= {
        "parallel.ep": row.ep,
        "parallel.tp": row.tp,
        "parallel.cp": row.cp,
        "parallel.pp": row.pp,
        "parallel.dp_replicate": replicas,
        "parallel.dp_shard": dp // replicas,
        "parallel.zero_stage": system.zero_stage,
        "parallel.reduce_dtype": system.reduce_dtype,
        "parallel.schedule": "1f1b" if row.stages == 1 else "interleaved_1f1b",
        "parallel.stages_per_rank": row.stages,
        "parallel.tp_pieces": 1,
        "parallel.layers_per_stage": layers_of(row),
        "parallel.sequence_parallel": system is not SC21,
        "train.seq_len": row.seq_len or system.seq_len,
        "train.global_batch_size": row.batch,
        "train.micro_batch_size": row.micro_batch,
        "train.activation_checkpointing": row.recomputed,
    }
    return load_config(str(BASE), [f"{key}={value}" for key, value in keys.items()])


def dimensions(model: Model) -> dict[str, Any]:
    """The keys of the section `model.`; experts only if the model has them."""
    keys = {key: value for key, value in model._asdict().items() if value is not None}
    if model.num_experts:
        return keys | {"feed_forward": "experts"}
    return {key: value for key, value in keys.items() if "expert" not in key}


def layers_of(row: Row) -> str:
    """The number of layers of each stage. If they cannot be split evenly, the first and last
    stages, which have the embedding and the head, get one layer less."""
    stages = row.pp * row.stages
    each = (row.model.num_layers + 2) // stages
    if row.model.num_layers % stages == 0:
        return "null"
    return str([each - 1] + [each] * (stages - 2) + [each - 1])


def compare(row: Row) -> dict[str, Any]:
    """The published and the planned speed of a row, with its settings. A row with context
    parallelism has a second error: as if it had none, with otherwise the same settings."""
    figures = _compare(row)
    if row.cp > 1:
        figures["error_points_without_cp"] = _compare(row._replace(cp=1))["error_points"]
    return figures


def _compare(row: Row) -> dict[str, Any]:
    one, system = plan(row), row.system
    parallel, train = one.config.parallel, one.config.train
    flops = flops_per_token(
        one.config.model, train.seq_len, whole_attention=system.attention == "full"
    )
    whole = one.device.peak_flops / flops  # tokens per second at an MFU of 100%
    published, predicted = (
        row.tokens or row.mfu / 100 * whole,
        one.time.tokens_per_second / row.gpus,
    )
    return {
        "system": system.name,
        "model": row.model_name,
        "source": system.source,
        "dimensions": dimensions(row.model),
        "device": system.device,
        "rates": system.rates,
        "gpus": row.gpus,
        "tp": row.tp,
        "cp": row.cp,
        "pp": row.pp,
        "ep": row.ep,
        "stages_per_rank": parallel.stages_per_rank,
        "dp_shard": parallel.dp_shard,
        "dp_replicate": parallel.dp_replicate,
        "zero_stage": parallel.zero_stage,
        "seq_len": train.seq_len,
        "global_batch_size": train.global_batch_size,
        "micro_batch_size": train.micro_batch_size,
        "activation_checkpointing": train.activation_checkpointing,
        "mfu_convention": f"{system.attention} attention; "
        f"of {one.device.peak_flops / 1e12:.0f} TFLOP/s",
        "given_as": "tokens" if row.tokens else "mfu",
        "published_tokens_per_second_and_gpu": published,
        "predicted_tokens_per_second_and_gpu": predicted,
        "published_mfu": published / whole,
        "predicted_mfu": predicted / whole,
        "error_points": 100 * (predicted - published) / whole,
        "apart": row.apart,
        "differs": system.differs,
        "unverified": system.unverified,
    }


def summary(table: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each group of rows: their number, the mean and the largest error in points, and the
    signed mean error. Mixtures of experts are groups of their own."""
    experts = [row for row in table if "num_experts" in row["dimensions"]]
    table = [row for row in table if row not in experts]
    alike = [row for row in table if not row["apart"]]
    with_cp = [row for row in alike if row["cp"] > 1]
    # Without cp, Llama 3's row would have one micro-batch for 16 pipeline stages.
    of_nemo = [row for row in with_cp if row["system"] == NEMO.name]
    without_cp = [row | {"error_points": row["error_points_without_cp"]} for row in of_nemo]
    groups = {
        "all": table,
        "comparable": alike,
        "    of these, H100": [row for row in alike if row["device"] == "h100"],
        "    of these, A100": [row for row in alike if row["device"] == "a100"],
        "    of these, every setting verified": [row for row in alike if not row["unverified"]],
        "    of these, with context parallelism": with_cp,
        "        of these, NeMo's": of_nemo,
        "        NeMo's, planned without it": without_cp,
        "not comparable": [row for row in table if row["apart"]],
        "experts, comparable": [row for row in experts if not row["apart"]],
        "experts, not comparable": [row for row in experts if row["apart"]],
    }
    result = {}
    for name, rows in groups.items():
        points = [row["error_points"] for row in rows]
        far = [abs(one) for one in points]
        bias = sum(points) / len(points)
        result[name] = {
            "rows": len(rows),
            "mean": sum(far) / len(far),
            "largest": max(far),
            "bias": bias,
        }
    return result


def main() -> int:
    table = [compare(row) for row in ROWS]
    print(
        "system            model    GPUs  tp pp  v  published  predicted   error  "
        "apart in (*: settings not all verified)"
    )
    for row in table:
        print(
            f"{row['system']:16s}{'*' if row['unverified'] else ' '} {row['model']:5s} "
            f"{row['gpus']:7d} {row['tp']:3d} {row['pp']:2d} {row['stages_per_rank']:2d} "
            f"{row['published_mfu']:10.1%} {row['predicted_mfu']:10.1%} "
            f"{row['error_points']:+7.1f}  {row['apart']}"
        )
    groups = summary(table)
    print(f"\n{'':36s}rows   mean  largest  mean, signed")
    for name, one in groups.items():
        print(
            f"{name:36s}{one['rows']:4.0f} {one['mean']:6.2f} {one['largest']:8.2f} "
            f"{one['bias']:+14.2f}"
        )
    RESULTS.write_text(
        json.dumps({"summary": groups, "rows": table}, indent=1, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    return 0


if __name__ == "__main__":
    run_command(main)
