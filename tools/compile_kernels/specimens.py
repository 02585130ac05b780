"""Calls of every operation with Triton kernels, one for each way it is compiled, in sizes that
occur in training.

tools/compile_kernels compiles what these calls launch. (Tests make the same calls, of other sizes,
and count the bytes that kernels move.) A kernel is compiled anew for each dtype, block size (which
depends on the width of a row) and alignment (whether addresses, strides and sizes are multiples of
16). So there are also rows of odd width, for which 16-byte accesses are impossible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from model.kernels.adamw import Location, Rates, adamw
from model.kernels.bit_hash import hash_of
from model.kernels.cross_entropy import gradient_over_logits_, merge, statistics
from model.kernels.gradient_norm import square_sum
from model.kernels.grouped_matmul import add_grouped_weight_gradient
from model.kernels.norm_rotary import norm_rotate
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.swiglu import swiglu
from model.kernels.token_rows import spread_rows, sum_rows
from model.kernels.weighted_swiglu import weighted_swiglu
from parallel.weight_gradient import TO_AUTOGRAD

TOKENS = 64
ROWS = 4096  # of a weight [ROWS, 17]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Specimen:
    """A call, and the expectations for the kernels that it launches."""

    name: str
    launch: Callable[[], Any]
    # tensors are aligned, so all accesses must be of 16 bytes (except single numbers, or one per
    # row)
    wide: bool = True
    # exceptions: accesses whose source line, or the line of a call site, contains one of these
    # texts
    narrow: tuple[str, ...] = ()


def _ones(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def _backward(y: Tensor | tuple[Tensor, ...], *inputs: Tensor) -> None:
    outputs = (y,) if isinstance(y, Tensor) else y
    torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])


def norm(width: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _ones(TOKENS, width, dtype=dtype), _ones(width, dtype=dtype)
    _backward(rms_norm(x, weight, 1e-5, "triton"), x, weight)


def norm_of_sum(width: int, dtype: torch.dtype = BF16) -> None:
    x, residual = (_ones(TOKENS, width, dtype=dtype) for _ in range(2))
    weight = _ones(width, dtype=dtype)
    _backward(add_rms_norm(x, residual, weight, 1e-5, "triton"), x, residual, weight)


def rotary(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = BF16) -> None:
    q, k = (_ones(TOKENS, 1, count, head_dim, dtype=dtype) for count in (heads, kv_heads))
    cos, sin = torch.ones(2, TOKENS, 1, 1, head_dim // 2)
    _backward(rotate(q, k, cos, sin, "triton"), q, k)
    with torch.no_grad():
        rotate(q.detach(), k.detach(), cos, sin, "triton")


def norm_and_rotary(heads: int, head_dim: int, dtype: torch.dtype = BF16) -> None:
    x, w = _ones(TOKENS, 1, heads, head_dim, dtype=dtype), _ones(head_dim, dtype=dtype)
    cos, sin = torch.ones(2, TOKENS, 1, 1, head_dim // 2).unbind()
    y, _ = norm_rotate(x, x[:0], 2 * [(w, TO_AUTOGRAD)], 1e-6, cos, sin, "triton")
    _backward(y, x, w)


def gate(width: int, dtype: torch.dtype = BF16) -> None:
    gate, up = _ones(TOKENS, width, dtype=dtype), _ones(TOKENS, width, dtype=dtype)
    _backward(swiglu(gate, up, "triton"), gate, up)


def weighted_gate(width: int, dtype: torch.dtype = BF16) -> None:
    gate, up = _ones(TOKENS, width, dtype=dtype), _ones(TOKENS, width, dtype=dtype)
    weights = _ones(TOKENS, dtype=FP32)
    _backward(weighted_swiglu(gate, up, weights, "triton"), gate, up, weights)


def experts(n: int, m: int, dtype: torch.dtype, beta: int) -> None:
    x, dy, into = _ones(TOKENS, n), _ones(TOKENS, m), torch.ones(4, m, n, dtype=dtype)
    ends = torch.tensor([TOKENS - 7, TOKENS - 7, TOKENS - 1, TOKENS], dtype=torch.int32)
    add_grouped_weight_gradient(into, dy.detach(), x.detach(), ends, beta, "triton")


def rows(width: int, dtype: torch.dtype = BF16) -> None:
    places = torch.arange(TOKENS)
    y = sum_rows(torch.ones(TOKENS, width, dtype=dtype), places, 8, "triton")
    spread_rows(y, places, places, 8, "triton")


def loss(vocabulary: int, dtype: torch.dtype = BF16) -> None:
    logits, targets = torch.ones(TOKENS, vocabulary, dtype=dtype), vocabulary + torch.arange(TOKENS)
    row = merge(statistics(logits, targets, vocabulary, "triton").unsqueeze(0))
    gradient_over_logits_(logits, targets, row, torch.ones(()), vocabulary, 1e-4, "triton")


def gradients(dtype: torch.dtype, shift: int = 0) -> None:
    first, second = torch.ones(ROWS * 17 + shift, dtype=dtype), torch.ones(ROWS, dtype=dtype)
    square_sum([first[shift:], second], [1, 8], "triton")


def hash_bits(dtype: torch.dtype, shift: int = 0) -> None:
    hash_of([torch.ones(ROWS * 17 + shift).to(dtype)[shift:]], "triton")


def update(dtype: torch.dtype) -> None:
    p, g, m, v = (
        [torch.ones(ROWS, 17, dtype=dtype), torch.ones(ROWS, dtype=dtype)] for _ in range(4)
    )
    locations = [Location(1, 0, 17, 17), Location(2, 0, ROWS, ROWS)]
    count, norm = torch.zeros(()), torch.ones((), dtype=torch.float64)
    rates = Rates(1e-3, (0.9, 0.95), 1e-8, 1.0)
    adamw(p, g, m, v, [0.1, 0.0], locations, count, norm, rates, "triton")


ANGLES = ("COS + angles", "SIN + angles")  # 64 numbers per token, read by more threads than that
# With a single head of k per rank, k has fewer 16-byte accesses than a warp has threads: with 16
# heads of q (two tokens at once), and on AMD, whose warps have 64 threads, also with 8 heads of q
# (four tokens). Threads then move 8 bytes of k at a time. k is only 1/17 or 1/9 of the bytes; q is
# moved 16 bytes at a time.
ONE_OF_K = (*ANGLES, "_turn_heads(k, k_out")
PLACES = ("place * width + column, x",)  # AMD: a place is loaded as a vector, between two stores
HEAD = (*ANGLES, "W + ", "DW + program")  # and weights, of which there is one for all heads
TAIL = ("mask=offsets < left", "left, False, SCALARS")  # a tensor's last block may end anywhere
SQUARES = (*TAIL, "PARTIAL + start")  # and the partial sums, 8 bytes per block
HASH = ("mask=offsets <", "TOTAL")  # the last block; one atomic addition per block


def _each(name: str, call: Callable[..., None], *given: Any, **expected: Any) -> list[Specimen]:
    """A specimen for each tuple of arguments, which complete its name."""
    names = [" ".join(map(str, (name, *each))).replace("torch.", "") for each in given]
    calls = [partial(call, *each) for each in given]
    return [Specimen(*each, **expected) for each in zip(names, calls, strict=True)]


SPECIMENS = [
    # four rows at once: more threads than weights
    *_each("rms_norm", norm, (1024,), narrow=("W + columns",)),
    # the width of a head; 32 rows at once, likewise
    *_each("rms_norm", norm, (128,), narrow=("W + columns", "DW + program")),
    *_each("rms_norm", norm, (4096,), (8192,), (16384,), (8192, FP32)),
    *_each("rms_norm", norm, (1023,), wide=False),
    *_each("add_rms_norm", norm_of_sum, (4096,), (8192,), (16384,), (8192, FP32)),
    *_each("rotary", rotary, (32, 8, 128), (64, 8, 128), (12, 4, 96), narrow=ANGLES),
    *_each("rotary", rotary, (4, 1, 128, FP32), narrow=ANGLES),
    # 70 and 405 billion at tp 8
    *_each("rotary", rotary, (8, 1, 128), (16, 1, 128), narrow=ONE_OF_K),
    *_each("norm and rotary", norm_and_rotary, (32, 128), (4, 128), (32, 128, FP32), narrow=HEAD),
    *_each("swiglu", gate, (14336,), (14336, FP32)),
    *_each("weighted_swiglu", weighted_gate, (14336,), (768,), (14336, FP32)),
    *_each("experts' weights", experts, *product([2048], [768], (FP32, BF16), (0, 1))),
    *_each("rows", rows, (2048,), (2048, FP32), narrow=PLACES),
    *_each("cross-entropy", loss, (128256,), (16032,), (16032, FP32)),
    *_each("cross-entropy", loss, (50257,), wide=False),
    *_each("square_sum", gradients, (FP32,), (BF16,), narrow=SQUARES),
    *_each("square_sum, unaligned", gradients, (FP32, 1), wide=False),
    *_each("hash", hash_bits, (torch.float8_e4m3fn,), (BF16,), (FP32,), narrow=HASH),
    *_each("hash, unaligned", hash_bits, (FP32, 1), wide=False),
    *_each("adamw", update, (FP32,), (BF16,), narrow=TAIL),
]

# For GPUs without bfloat16. (There the gradient of experts' weights is a loop over them.)
OF_FLOAT16 = [
    *_each("rms_norm", norm, (4096, FP16)),
    *_each("add_rms_norm", norm_of_sum, (4096, FP16)),
    *_each("rotary", rotary, (32, 8, 128, FP16), narrow=ANGLES),
    *_each("norm and rotary", norm_and_rotary, (32, 128, FP16), narrow=HEAD),
    *_each("swiglu", gate, (14336, FP16)),
    *_each("weighted_swiglu", weighted_gate, (768, FP16)),
    *_each("rows", rows, (2048, FP16), narrow=PLACES),
    *_each("cross-entropy", loss, (128256, FP16)),
    *_each("square_sum", gradients, (FP32,), narrow=SQUARES),
    *_each("hash", hash_bits, (FP32,), narrow=HASH),
    *_each("adamw", update, (FP32,), narrow=TAIL),
]
