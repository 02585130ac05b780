"""Compares kernels of attention: those of `model.attention_kernel`, and torch's own choice.

    python -m benchmarks.gpu_attention             part of `make bench-gpu PART=open`

One sequence of 8192 tokens, 32 query heads, 8 key/value heads of 128, in bfloat16, through
model/mask.py as in training. FLOPs are counted for the part of the square that a token sees, twice
a product and sum: 2 · S² · E · H forward, and 2.5 times that backward (5 products instead of 2).
The outputs are compared with those of torch's `scaled_dot_product_attention`, called once for each
document. A kernel that cannot run here is not measured, and its row says why.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_operations import draw
from benchmarks.gpu_programs import ATTENTION_KERNELS, AUTO, attention_kernels
from benchmarks.gpu_rows import Measurement, exit_status, options, parse, run_all
from benchmarks.gpu_timing import DEVICE, Clock, Work, peak_flops
from costs.events import BACKWARD_OF_FORWARD
from model.documents import find_documents
from model.kernels.attention import by_torch
from model.kernels.attention_choice import Call, choose_for_steps, device_of
from model.mask import Mask, make_mask
from tools.command import run_command

BOUND = 0.02  # relative difference between two kernels in bfloat16
SIZES = {False: (8192, 32, 8, 128, 2048), True: (32, 4, 2, 16, 8)}  # S, H, K, E, document
TORCH = "scaled_dot_product_attention"  # torch's own choice, for comparison
BY_TORCH = Mask(dense=by_torch)


def inputs(tiny: bool) -> list[Tensor]:
    """q, k, v and the gradient of the output, each [S, 1, heads, E]."""
    length, heads, kv_heads, width, _ = SIZES[tiny]
    torch.manual_seed(0)
    return [draw(length, 1, count, width) for count in (heads, kv_heads, kv_heads, heads)]


def mask_of(kernel: str, documents: bool, tiny: bool, device: str = DEVICE) -> tuple[Mask, str]:
    """The mask that a run with this `model.attention_kernel` has, with documents or without, and
    the chosen kernel."""
    length, _, _, width, document = SIZES[tiny]
    tokens = torch.ones(1, length, dtype=torch.int64)
    if documents:
        tokens[:, ::document] = 0
    positions, found = find_documents(tokens, 0, device, [range(length)])
    of_queries = found[0] if documents else None
    mask = make_mask(positions, of_queries, None, torch.bfloat16, width, kernel)
    call = Call(torch.bfloat16, width, width, length, documents, deterministic=False)
    return mask, str(choose_for_steps(device_of(positions), call, kernel))


def measure(kernel: str, documents: bool, tiny: bool) -> dict[str, Any]:
    """Times one kernel: a value of `model.attention_kernel`, or TORCH."""
    length, heads, _, width, document = SIZES[tiny]
    *qkv, dy = inputs(tiny)
    seen = document if documents else length  # tokens of one document
    parts = zip(*(t.split(seen) for t in qkv), strict=True)
    expected = torch.cat([BY_TORCH(*part) for part in parts])
    clock = Clock(samples=2 if tiny else 20, warm_up=1 if tiny else 3)
    with attention_kernels():
        if kernel == TORCH:
            mask, chosen = BY_TORCH, backend_of(qkv)
        else:
            mask, chosen = mask_of(kernel, documents, tiny)
        found = mask(*qkv)
        forward = clock.milliseconds(Work(lambda: qkv, lambda given: mask(*given)))

        def prepared() -> tuple:
            leaves = [t.detach().requires_grad_() for t in qkv]
            return mask(*leaves), leaves, dy

        backward = clock.milliseconds(Work(prepared, lambda state: torch.autograd.grad(*state)))
    off = ((found - expected).float().norm() / expected.float().norm()).item()
    flops = 4 * (length * seen / 2) * width * heads
    both = (1 + BACKWARD_OF_FORWARD) * flops / (forward["median"] + backward["median"]) * 1e3
    peak = None if tiny else peak_flops()
    return {
        "kernel": chosen,
        "forward_milliseconds": forward,
        "backward_milliseconds": backward,
        "flops_per_second": both,
        "fraction_of_peak": both / peak if peak else None,
        "off": off,
        "right": off <= BOUND,
    }


def backend_of(qkv: list[Tensor]) -> str:
    """The name of torch's backend for causal attention over these."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv)
    number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return torch.nn.attention.SDPBackend(number).name


def describe(row: dict[str, Any]) -> str:
    forward, backward = (row[f"{w}_milliseconds"]["median"] for w in ("forward", "backward"))
    said = f"{row['name']:40}{forward:9.3f} ms forward {backward:9.3f} ms backward"
    return f"{said}{row['flops_per_second'] / 1e12:8.0f} TFLOP/s  {row['kernel']}"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=60), arguments)
    rows = [
        Measurement(
            f"attention, {kernel}", 6, partial(measure, kernel, False, parsed.tiny),
            ours=kernel != TORCH,
        )
        for kernel in (*ATTENTION_KERNELS, TORCH)
    ]  # fmt: skip
    rows.append(Measurement("attention, documents", 6, partial(measure, AUTO, True, parsed.tiny)))
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
