"""Compares kernels of attention: torch's own choice, cuDNN, flash attention 2 and 3, and documents.

    python -m benchmarks.gpu_attention             part of `make bench-gpu PART=open`

One sequence of 8192 tokens, 32 query heads, 8 key/value heads of 128, in bfloat16, through
model/mask.py as in training. FLOPs are counted for the part of the square that a token sees, twice
a product and sum: 2 · S² · E · H forward, and 2.5 times that backward (5 products instead of 2).
The outputs are compared with those of torch's own choice.
"""

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_operations import draw
from benchmarks.gpu_programs import Attention, attention_kernel
from benchmarks.gpu_rows import Measurement, exit_status, options, parse, run_all
from benchmarks.gpu_timing import DEVICE, ON_GPU, Clock, Work, peak_flops
from costs.recorder import BACKWARD_OF_FORWARD
from model.documents import find_documents
from model.mask import Mask, make_mask
from tools.command import run_command

BOUND = 0.02  # relative difference between two kernels in bfloat16
SIZES = {False: (8192, 32, 8, 128, 2048), True: (32, 4, 2, 16, 8)}  # S, H, K, E, document
KERNELS: tuple[Attention, ...] = ("auto", "cudnn", "flash 2", "flash 3")


def inputs(tiny: bool) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, each [S, 1, heads, E]."""
    length, heads, kv_heads, width, _ = SIZES[tiny]
    torch.manual_seed(0)
    return [draw(length, 1, count, width) for count in (heads, kv_heads, kv_heads, heads)]


def measure(kernel: Attention, documents: bool, tiny: bool) -> dict[str, Any]:
    length, heads, _, width, document = SIZES[tiny]
    *qkv, dy = inputs(tiny)
    mask, seen = Mask(), length**2 / 2
    if documents:
        tokens = torch.ones(1, length, dtype=torch.int64)
        tokens[:, ::document] = 0
        positions, (found_in,) = find_documents(tokens, 0, DEVICE, [range(length)])
        mask = make_mask(positions, found_in, None, torch.bfloat16, width)
        seen = length * document / 2
    expected = mask(*qkv)
    clock = Clock(samples=2 if tiny else 20, warm_up=1 if tiny else 3)
    with attention_kernel(kernel):
        found = mask(*qkv)
        forward = clock.milliseconds(Work(lambda: qkv, lambda given: mask(*given)))

        def prepared() -> tuple:
            leaves = [t.detach().requires_grad_() for t in qkv]
            return mask(*leaves), leaves, dy

        backward = clock.milliseconds(Work(prepared, lambda state: torch.autograd.grad(*state)))
        choice = "varlen" if documents and ON_GPU else backend_of(qkv)
    off = ((found - expected).float().norm() / expected.float().norm()).item()
    flops = 4 * seen * width * heads
    both = (1 + BACKWARD_OF_FORWARD) * flops / (forward["median"] + backward["median"]) * 1e3
    peak = None if tiny else peak_flops()
    return {
        "kernel": choice,
        "forward_milliseconds": forward,
        "backward_milliseconds": backward,
        "flops_per_second": both,
        "fraction_of_peak": both / peak if peak else None,
        "off": off,
        "right": off <= BOUND,
    }


def backend_of(qkv: list[torch.Tensor]) -> str:
    """The name of torch's backend for causal attention over these."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in qkv)
    number = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return torch.nn.attention.SDPBackend(number).name


def describe(row: dict[str, Any]) -> str:
    forward, backward = (row[f"{w}_milliseconds"]["median"] for w in ("forward", "backward"))
    said = (
        f"{row['name']:36}{row['kernel']:24}{forward:9.3f} ms forward {backward:9.3f} ms backward"
    )
    return f"{said}{row['flops_per_second'] / 1e12:8.0f} TFLOP/s"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=60), arguments)
    rows = [
        Measurement(
            f"attention, {kernel}", 6, partial(measure, kernel, False, parsed.tiny),
            ours=kernel == "auto",
        )
        for kernel in KERNELS
    ]  # fmt: skip
    rows.append(Measurement("attention, documents", 6, partial(measure, "auto", True, parsed.tiny)))
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
