"""Calls of every operation with Triton kernels, one for each way it is compiled, in sizes that
occur in training.

tools/compile_kernels compiles what these calls launch. Tensors are not initialised, because nothing
computes with them. A kernel is compiled anew for each dtype, block size (which depends on the width
of a row) and alignment (whether addresses, strides and sizes are multiples of 16). So there are
also rows of odd width, for which 16-byte accesses are impossible.
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
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.sum_rows import sum_rows
from model.kernels.swiglu import swiglu
from model.kernels.weighted_swiglu import weighted_swiglu

TOKENS = 64
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


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def _backward(y: Tensor | tuple[Tensor, ...], *inputs: Tensor) -> None:
    outputs = (y,) if isinstance(y, Tensor) else y
    torch.autograd.grad(outputs, inputs, [torch.empty_like(output) for output in outputs])


def _norm(width: int, dtype: torch.dtype = BF16) -> None:
    x, weight = _empty(TOKENS, width, dtype=dtype), _empty(width, dtype=dtype)
    _backward(rms_norm(x, weight, 1e-5, "triton"), x, weight)


def _norm_of_sum(width: int, dtype: torch.dtype = BF16) -> None:
    x, residual = (_empty(TOKENS, width, dtype=dtype) for _ in range(2))
    weight = _empty(width, dtype=dtype)
    _backward(add_rms_norm(x, residual, weight, 1e-5, "triton"), x, residual, weight)


def _rotary(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = BF16) -> None:
    q, k = (_empty(TOKENS, 1, count, head_dim, dtype=dtype) for count in (heads, kv_heads))
    cos, sin = torch.empty(2, TOKENS, 1, 1, head_dim // 2)
    _backward(rotate(q, k, cos, sin, "triton"), q, k)
    with torch.no_grad():
        rotate(q.detach(), k.detach(), cos, sin, "triton")


def _gate(width: int, dtype: torch.dtype = BF16) -> None:
    gate, up = _empty(TOKENS, width, dtype=dtype), _empty(TOKENS, width, dtype=dtype)
    _backward(swiglu(gate, up, "triton"), gate, up)


def _weighted_gate(width: int, dtype: torch.dtype = BF16) -> None:
    gate, up = _empty(TOKENS, width, dtype=dtype), _empty(TOKENS, width, dtype=dtype)
    weights = _empty(TOKENS, dtype=FP32)
    _backward(weighted_swiglu(gate, up, weights, "triton"), gate, up, weights)


def _experts(n: int, m: int, dtype: torch.dtype, beta: int) -> None:
    x, dy, into = _empty(TOKENS, n), _empty(TOKENS, m), torch.empty(4, m, n, dtype=dtype)
    ends = torch.empty(4, dtype=torch.int32)
    add_grouped_weight_gradient(into, dy.detach(), x.detach(), ends, beta, "triton")


def _rows(width: int, dtype: torch.dtype = BF16) -> None:
    places = torch.empty(TOKENS, dtype=torch.int64)
    sum_rows(torch.empty(TOKENS, width, dtype=dtype), places, 8, "triton")


def _loss(vocabulary: int, dtype: torch.dtype = BF16) -> None:
    logits = torch.empty(TOKENS, vocabulary, dtype=dtype)
    targets = torch.zeros(TOKENS, dtype=torch.int64)
    row = merge(statistics(logits, targets, vocabulary, "triton").unsqueeze(0))
    gradient_over_logits_(logits, targets, row, torch.ones(()), vocabulary, 1e-4, "triton")


def _gradients(dtype: torch.dtype, shift: int = 0) -> None:
    first, second = torch.empty(4096 * 17 + shift, dtype=dtype), torch.empty(4096, dtype=dtype)
    square_sum([first[shift:], second], [1, 8], "triton")


def _hash(dtype: torch.dtype, shift: int = 0) -> None:
    hash_of([torch.empty(4096 * 17 + shift, dtype=dtype)[shift:]], "triton")


def _update(dtype: torch.dtype) -> None:
    p, g, m, v = (
        [torch.empty(4096, 17, dtype=dtype), torch.empty(4096, dtype=dtype)] for _ in range(4)
    )
    locations = [Location(1, 0, 17, 17), Location(2, 0, 4096, 4096)]
    count, norm = torch.zeros(()), torch.ones((), dtype=torch.float64)
    rates = Rates(1e-3, (0.9, 0.95), 1e-8, 1.0)
    adamw(p, g, m, v, [0.1, 0.0], locations, count, norm, rates, "triton")


ANGLES = ("COS + angles", "SIN + angles")  # 64 numbers per token, read by more threads than that
# With a single head of k per rank, k has fewer 16-byte accesses than a warp has threads: with 16
# heads of q (two tokens at once), and on AMD, whose warps have 64 threads, also with 8 heads of q
# (four tokens). Threads then move 8 bytes of k at a time. k is only 1/17 or 1/9 of the bytes; q is
# moved 16 bytes at a time.
ONE_OF_K = (*ANGLES, "_turn_heads(k, k_out")
TAIL = ("mask=offsets < left", "left, False, SCALARS")  # a tensor's last block may end anywhere
SQUARES = (*TAIL, "PARTIAL + start")  # and the partial sums, 8 bytes per block
HASH = ("mask=offsets <", "TOTAL")  # the last block; one atomic addition per block

SPECIMENS = [
    # four rows at once: more threads than weights
    Specimen("rms_norm 1024", lambda: _norm(1024), narrow=("W + columns",)),
    # the width of a head; 32 rows at once, likewise
    Specimen("rms_norm 128", lambda: _norm(128), narrow=("W + columns", "DW + program")),
    *(Specimen(f"rms_norm {width}", partial(_norm, width)) for width in (4096, 8192, 16384)),
    *(
        Specimen(f"add_rms_norm {width}", partial(_norm_of_sum, width))
        for width in (4096, 8192, 16384)
    ),
    Specimen("rms_norm 8192 float32", lambda: _norm(8192, FP32)),
    Specimen("add_rms_norm 8192 float32", lambda: _norm_of_sum(8192, FP32)),
    Specimen("rms_norm 1023", lambda: _norm(1023), wide=False),
    Specimen("rotary 32 + 8 heads of 128", lambda: _rotary(32, 8, 128), narrow=ANGLES),
    Specimen("rotary 64 + 8 heads of 128", lambda: _rotary(64, 8, 128), narrow=ANGLES),
    # 70 billion at tp 8
    Specimen("rotary 8 + 1 heads of 128", lambda: _rotary(8, 1, 128), narrow=ONE_OF_K),
    # 405 billion at tp 8
    Specimen("rotary 16 + 1 heads of 128", lambda: _rotary(16, 1, 128), narrow=ONE_OF_K),
    Specimen("rotary 4 + 1 heads of 128 float32", lambda: _rotary(4, 1, 128, FP32), narrow=ANGLES),
    Specimen("rotary 12 + 4 heads of 96", lambda: _rotary(12, 4, 96), narrow=ANGLES),
    Specimen("swiglu 14336", lambda: _gate(14336)),
    Specimen("swiglu 14336 float32", lambda: _gate(14336, FP32)),
    *(
        Specimen(f"weighted_swiglu {width}", partial(_weighted_gate, width))
        for width in (14336, 768)
    ),
    Specimen("weighted_swiglu 14336 float32", lambda: _weighted_gate(14336, FP32)),
    *(
        Specimen(
            f"experts' weights 2048 × 768, {dtype}, beta {beta}",
            partial(_experts, 2048, 768, dtype, beta),
        )
        for dtype, beta in product((FP32, BF16), (0, 1))
    ),
    Specimen("rows 2048", lambda: _rows(2048)),
    Specimen("rows 2048 float32", lambda: _rows(2048, FP32)),
    Specimen("cross-entropy 128256", lambda: _loss(128256)),
    Specimen("cross-entropy 16032", lambda: _loss(16032)),
    Specimen("cross-entropy 16032 float32", lambda: _loss(16032, FP32)),
    Specimen("cross-entropy 50257", lambda: _loss(50257), wide=False),
    Specimen("square_sum float32", lambda: _gradients(FP32), narrow=SQUARES),
    Specimen("square_sum bfloat16", lambda: _gradients(BF16), narrow=SQUARES),
    Specimen("square_sum unaligned", lambda: _gradients(FP32, shift=1), wide=False),
    *(
        Specimen(f"hash, numbers of {dtype.itemsize} bytes", partial(_hash, dtype), narrow=HASH)
        for dtype in (torch.float8_e4m3fn, BF16, FP32)
    ),
    Specimen("hash unaligned", lambda: _hash(FP32, shift=1), wide=False),
    Specimen("adamw float32", lambda: _update(FP32), narrow=TAIL),
    Specimen("adamw bfloat16", lambda: _update(BF16), narrow=TAIL),
]

# For GPUs without bfloat16. (There the gradient of experts' weights is a loop over them.)
OF_FLOAT16 = [
    Specimen("rms_norm 4096 float16", lambda: _norm(4096, FP16)),
    Specimen("add_rms_norm 4096 float16", lambda: _norm_of_sum(4096, FP16)),
    Specimen("rotary 32 + 8 heads of 128 float16", lambda: _rotary(32, 8, 128, FP16),
             narrow=ANGLES),
    Specimen("swiglu 14336 float16", lambda: _gate(14336, FP16)),
    Specimen("weighted_swiglu 768 float16", lambda: _weighted_gate(768, FP16)),
    Specimen("rows 2048 float16", lambda: _rows(2048, FP16)),
    Specimen("cross-entropy 128256 float16", lambda: _loss(128256, FP16)),
    *(each for each in SPECIMENS if each.name in
      ("square_sum float32", "hash, numbers of 4 bytes", "adamw float32")),
]  # fmt: skip
