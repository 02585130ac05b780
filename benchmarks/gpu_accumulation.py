"""Compares two ways to sum the weight gradients of micro-batches in float32.

    python -m benchmarks.gpu_accumulation          part of `make bench-gpu PART=open`

    apart      a product in bfloat16, then a sum into float32: what FSDP2 does
    together   the product adds its float32 result to the sum: Matmul.add_weight_gradient
               (cuBLAS reads bfloat16 and writes float32)
    product    only the product, whose result is in bfloat16: nothing is summed

Shapes are those of a block of an 8-billion model, 8192 tokens. The last row adds up a block, and
converts the difference to points of MFU of the whole model at the estimated MFU. Errors are
relative to float64, of one gradient; `together` must have at most that of `apart`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_estimates import MFU_SELECTIVE
from benchmarks.gpu_operations import draw
from benchmarks.gpu_programs import WIDE, mfu_points, sizes
from benchmarks.gpu_rows import Measurement, exit_status, options, parse, run_all
from benchmarks.gpu_timing import DEVICE, Clock, Work, peak_flops
from costs.summary import flops_per_token
from model.matmul import Matmul
from tools.command import run_command

LAYERS = 32  # of the 8-billion model
WAYS = ("apart", "together", "product")
BLOCK = "weight gradients of a block"


def shapes(tiny: bool) -> dict[str, tuple[int, int, int]]:
    """Name → outputs, inputs, and how many weights of a block have this shape."""
    model = sizes(tiny)[WIDE].model
    d, f = model.dim, model.ffn_dim
    kv = model.head_dim * model.num_kv_heads
    return {
        "query, output": (model.attention_width, d, 2),
        "key, value": (kv, d, 2),
        "gate, up": (f, d, 2),
        "down": (d, f, 1),
    }


def run(way: str, dy: Tensor, x: Tensor, total: Tensor) -> None:
    if way == "together":
        Matmul().add_weight_gradient(dy, x, total, torch.float32)
    else:
        product = dy.t() @ x
        if way == "apart":
            total.add_(product)


def measure(shape: tuple[int, int, int], tokens: int, clock: Clock) -> dict[str, Any]:
    rows, columns, number = shape
    dy, x = draw(tokens, rows), draw(tokens, columns)
    total = torch.zeros(rows, columns, device=DEVICE)
    exact = dy[:, :256].double().t() @ x.double()
    errors, times = {}, {}
    for way in WAYS:
        total.zero_()
        run(way, dy, x, total)
        errors[way] = ((total[:256].double() - exact).norm() / exact.norm()).item()
        times[way] = clock.milliseconds(
            Work(lambda: None, lambda _, way=way: run(way, dy, x, total))
        )
    row = {f"{way}_milliseconds": times[way]["median"] for way in WAYS}
    right = errors["together"] <= max(errors["apart"], 1e-6)
    return {
        **row,
        "number": number,
        "errors": {w: errors[w] for w in ("apart", "together")},
        "right": right,
    }


def whole_block(report_rows: list[dict[str, Any]], tokens: int, tiny: bool) -> dict[str, Any]:
    """Adds up the rows of the shapes."""
    total = {
        way: sum(row[f"{way}_milliseconds"] * row["number"] for row in report_rows) for way in WAYS
    }
    saved = LAYERS * (total["apart"] - total["together"]) / 1e3
    row = {f"{way}_milliseconds": total[way] for way in WAYS}
    peak = None if tiny else peak_flops()
    if peak is None:
        return row
    size = sizes(tiny)[WIDE]
    each = flops_per_token(replace(size.model, num_layers=LAYERS), size.seq_len)
    return {**row, "points": mfu_points(each, saved, tokens, MFU_SELECTIVE, peak)}


def describe(row: dict[str, Any]) -> str:
    return f"{row['name']:46}" + "".join(f"{w} {row[f'{w}_milliseconds']:8.3f} ms  " for w in WAYS)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=40), arguments)
    tokens = sizes(parsed.tiny)[WIDE].seq_len
    clock = Clock(samples=2 if parsed.tiny else 20)
    found: list[dict[str, Any]] = []

    def kept(shape: tuple[int, int, int]) -> dict[str, Any]:
        found.append(measure(shape, tokens, clock))
        return found[-1]

    rows = [
        Measurement(f"weight gradient, {name}", 4, partial(kept, shape))
        for name, shape in shapes(parsed.tiny).items()
    ]
    rows.append(Measurement(BLOCK, 0, lambda: whole_block(found, tokens, parsed.tiny)))
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
