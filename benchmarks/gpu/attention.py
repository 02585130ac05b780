"""What one GPU can say about kernels of attention: the rows of `make bench-gpu PART=open`, beside
whole steps with each of them (model.py)."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.operations import draw
from benchmarks.gpu.programs import ATTENTION_KERNELS, AUTO, attention_kernels
from benchmarks.gpu.timing import DEVICE, ON_GPU, Clock, Work, rate
from costs.events import BACKWARD_OF_FORWARD
from model.documents import find_documents
from model.kernels.attention import by_torch
from model.kernels.attention_choice import Call, choose_for_steps, device_of
from model.mask import Mask, make_mask

pytestmark = pytest.mark.usefixtures("fresh")

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


def mask_of(kernel: str, documents: bool) -> tuple[Mask, str]:
    """The mask that a run with this `model.attention_kernel` has, with documents or without, and
    the chosen kernel."""
    length, _, _, width, document = SIZES
    tokens = torch.ones(1, length, dtype=torch.int64)
    if documents:
        tokens[:, ::document] = 0
    positions, found = find_documents(tokens, 0, DEVICE, [range(length)])
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
