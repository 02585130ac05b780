"""Three questions that one GPU can answer, of `make bench-gpu PART=open`: which kernel of attention
is faster; two ways to sum the weight gradients of micro-batches in float32; and what FSDP2 costs
over one rank. (The fourth is overlap.py.)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from benchmarks.gpu.operations import draw
from benchmarks.gpu.programs import (
    ATTENTION_KERNELS,
    AUTO,
    WIDE,
    Variant,
    attention_kernels,
    build,
    config_of,
    mfu_points,
    sizes,
)
from benchmarks.gpu.timing import DEVICE, ON_GPU, Clock, Work, rate
from costs.events import BACKWARD_OF_FORWARD
from model.documents import find_documents
from model.kernels.attention import by_torch
from model.kernels.attention_choice import Call, choose_for_steps, device_of
from model.mask import Mask, make_mask
from model.matmul import Matmul
from tools.rehearse.rank import rows as batch_of

pytestmark = pytest.mark.usefixtures("fresh")

# --- attention ------------------------------------------------------------------------------------
# One sequence of 8192 tokens, 32 query heads, 8 key/value heads of 128, in bfloat16, through
# model/mask.py as in training. FLOPs are counted for the part of the square that a token sees,
# twice a product and sum: 2 · S² · E · H forward, and 2.5 times that backward (5 products instead
# of 2). The outputs are compared with those of torch's `scaled_dot_product_attention`, called once
# for each document. A kernel that cannot run here is not measured, and its row says why.

BOUND = 0.02  # relative difference between two kernels in bfloat16
FULL, TINY = (8192, 32, 8, 128, 2048), (32, 4, 2, 16, 8)  # S, H, K, E, document
SIZES = FULL if ON_GPU else TINY
TORCH = "scaled_dot_product_attention"  # torch's own choice, for comparison
BY_TORCH = Mask(dense=by_torch)


def inputs() -> list[Tensor]:
    """q, k, v and the gradient of the output, each [S, 1, heads, E]."""
    length, heads, kv_heads, width, _ = SIZES
    torch.manual_seed(0)
    return [draw(length, 1, count, width) for count in (heads, kv_heads, kv_heads, heads)]


def mask_of(kernel: str, documents: bool, device: str = DEVICE) -> tuple[Mask, str]:
    """The mask that a run with this `model.attention_kernel` has, with documents or without, and
    the chosen kernel."""
    length, _, _, width, document = SIZES
    tokens = torch.ones(1, length, dtype=torch.int64)
    if documents:
        tokens[:, ::document] = 0
    positions, found = find_documents(tokens, 0, device, [range(length)])
    of_queries = found[0] if documents else None
    mask = make_mask(positions, of_queries, None, torch.bfloat16, width, kernel)
    call = Call(torch.bfloat16, width, length, documents, deterministic=False)
    return mask, str(choose_for_steps(device_of(positions), call, kernel))


@pytest.mark.parametrize(
    ("kernel", "documents"),
    [
        *(pytest.param(kernel, False, id=f"attention, {kernel}") for kernel in ATTENTION_KERNELS),
        pytest.param(TORCH, False, id=f"attention, {TORCH}", marks=pytest.mark.theirs),
        pytest.param(AUTO, True, id="attention, documents"),
    ],
)
def bench_attention(kernel: str, documents: bool, record: Any) -> None:
    """Times one kernel: a value of `model.attention_kernel`, or TORCH."""
    length, heads, _, width, document = SIZES
    *qkv, dy = inputs()
    seen = document if documents else length  # tokens of one document
    parts = zip(*(t.split(seen) for t in qkv), strict=True)
    expected = torch.cat([BY_TORCH(*part) for part in parts])
    clock = Clock(samples=20)
    with attention_kernels():
        if kernel == TORCH:
            mask, chosen = BY_TORCH, "torch's choice"
        else:
            mask, chosen = mask_of(kernel, documents)
        found = mask(*qkv)
        forward = clock.milliseconds(Work(lambda: qkv, lambda given: mask(*given)))

        def prepared() -> tuple:
            leaves = [t.detach().requires_grad_() for t in qkv]
            return mask(*leaves), leaves, dy

        backward = clock.milliseconds(Work(prepared, lambda state: torch.autograd.grad(*state)))
    off = ((found - expected).float().norm() / expected.float().norm()).item()
    both = {key: forward[key] + backward[key] for key in forward}
    flops = (1 + BACKWARD_OF_FORWARD) * 4 * (length * seen / 2) * width * heads
    times = {"milliseconds": both, "forward": forward, "backward": backward}
    record({"kernel": chosen, **times, **rate(flops, both), "off": off})
    assert off <= BOUND, f"off by {off:.2g}"


# --- accumulation ---------------------------------------------------------------------------------
#   apart      a product in bfloat16, then a sum into float32: what FSDP2 does
#   together   the product adds its float32 result to the sum: Matmul.add_weight_gradient
#              (cuBLAS reads bfloat16 and writes float32)
#   product    only the product, whose result is in bfloat16: nothing is summed
#
# Shapes are those of a block of an 8-billion model, 8192 tokens. The last row adds up a block, and
# converts the difference to points of MFU of the whole model. Errors are relative to float64, of
# one gradient; `together` must have at most that of `apart`.

LAYERS, MFU = 32, 0.575  # of the 8-billion model; the middle of the estimate for it
WAYS = ("apart", "together", "product")
SIZE = sizes()[WIDE]
D, F = SIZE.model.dim, SIZE.model.ffn_dim
KV = SIZE.model.head_dim * SIZE.model.num_kv_heads
# outputs, inputs, and how many weights of a block have this shape
SHAPES = {
    "query, output": (SIZE.model.attention_width, D, 2),
    "key, value": (KV, D, 2),
    "gate, up": (F, D, 2),
    "down": (D, F, 1),
}


def run(way: str, dy: Tensor, x: Tensor, total: Tensor) -> None:
    if way == "together":
        Matmul().add_weight_gradient(dy, x, total, torch.float32)
    else:
        gradient = dy.t() @ x
        if way == "apart":
            total.add_(gradient)


@pytest.mark.parametrize("name", SHAPES, ids="weight gradient, {}".format)
def bench_weight_gradient(name: str, record: Any) -> None:
    rows, columns, number = SHAPES[name]
    dy, x = draw(SIZE.seq_len, rows), draw(SIZE.seq_len, columns)
    total, clock = torch.zeros(rows, columns, device=DEVICE), Clock(samples=20)
    exact = dy[:, :256].double().t() @ x.double()
    errors, times = {}, {}
    for way in WAYS:
        total.zero_()
        run(way, dy, x, total)
        errors[way] = ((total[:256].double() - exact).norm() / exact.norm()).item()
        work = Work(lambda: None, lambda _, way=way: run(way, dy, x, total))
        times[f"{way}_milliseconds"] = clock.milliseconds(work)["median"]
    record({**times, "number": number, "errors": errors})
    assert errors["together"] <= max(errors["apart"], 1e-6), f"together: {errors}"


def bench_weight_gradients_of_a_block(found: dict[str, dict], record: Any) -> None:
    """Adds up the rows of the shapes."""
    rows = [found[f"weight gradient, {name}"] for name in SHAPES]
    names = [f"{way}_milliseconds" for way in WAYS]
    total = {name: sum(row[name] * row["number"] for row in rows) for name in names}
    saved = LAYERS * (total["apart_milliseconds"] - total["together_milliseconds"])
    whole = replace(SIZE, model=replace(SIZE.model, num_layers=LAYERS), microbatches=1)
    record({**total, "points": mfu_points(whole, saved, MFU)})


# --- FSDP over one rank ---------------------------------------------------------------------------
# Over one rank there is nothing to shard, and training runs without FSDP (parallel/whole.py). With
# FSDP the numbers are the same; FSDP adds a second copy of every weight, and passes every gradient
# through two buffers. Each row is a whole step of the wide model, as train.py runs it, or with FSDP
# forced on. The rows that compare give the difference in points of MFU of the step.

SETTINGS = {
    "": Variant(zero_stage=0),  # that of the estimate
    ", zero_stage 1": Variant(zero_stage=1),
    ", pure bfloat16": Variant(zero_stage=0, bfloat16=True),
}


FSDP: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    # stages are wrapped in FSDP although no rank shares their weights
    "with FSDP": partial(patch, "parallel.fsdp_units.shares_weights", lambda *_: True),
    "without FSDP": nullcontext,
}


@pytest.mark.parametrize(
    ("way", "setting"),
    [pytest.param(*each, id="step {}{}".format(*each)) for each in product(FSDP, SETTINGS)],
)
def bench_fsdp(way: str, setting: str, record: Any) -> None:
    """Builds a step in this way and times it."""
    with FSDP[way]():
        train = build(config_of(SIZE, SETTINGS[setting]))
    wrapped = [isinstance(stage, FSDPModule) for stage in train.stages.values()]
    assert wrapped == [way == "with FSDP"] * len(wrapped), f"the step is not {way}"
    batch, clock = batch_of(train.config, train.mesh), Clock(3, 2, flush=False)
    times = clock.milliseconds(Work(lambda: batch, lambda given: train(0, *given)))
    record({"milliseconds": times, "mfu": rate(SIZE.flops, times)["fraction_of_peak"]})


@pytest.mark.parametrize("setting", SETTINGS, ids="what FSDP adds over one rank{}".format)
def bench_fsdp_difference(setting: str, found: dict[str, dict], record: Any) -> None:
    """What the step with FSDP takes longer."""
    with_fsdp, without = (found[f"step {way}{setting}"] for way in FSDP)
    saved = with_fsdp["milliseconds"]["median"] - without["milliseconds"]["median"]
    points = mfu_points(SIZE, saved, with_fsdp["mfu"])
    record({"milliseconds": {"median": saved}, "points": points})
