"""The sum of squares of many gradients, for the norm that gradient clipping uses.

    Σ_i  Σ x_i² / copies_i        over all gradients i of a rank; copies_i: how many ranks hold
                                  the same gradient

| launch                | reads             | writes            | bytes per element (float32) |
|-----------------------|-------------------|-------------------|-----------------------------|
| squares of each block | gradients         | 8 bytes per block | 4                           |
| their sum             | 8 bytes per block | one number        | 0.001                       |

All arithmetic is in float64, in which the square of a float32 is exact and cannot overflow or
underflow. (Sums of squares in the gradients' own dtype would depend on how tensors are sharded.)
Float64 costs no time on GPUs that run it at half the rate of float32: at 4.8 TB/s, each of 132
multiprocessors receives 5 elements per cycle, and can convert 16.

The order of additions is fixed, without atomic additions, so the result is the same bit for bit
every time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.kernels.backend import jit, tl, use_triton
from model.kernels.multi_tensor import find, pointer, prepare, triton_type

BLOCK = 8192  # 32 elements per thread


@torch.no_grad()
def square_sum(gradients: Sequence[Tensor], copies: Sequence[int], kernels: str) -> Tensor:
    """Sum the squares of gradients of any shapes on one device, each gradient's sum divided by its
    `copies`. Returns a float64 scalar on that device, without synchronizing the host.

    Args:
        gradients: at least one.
        copies: how many ranks hold the same gradient, for each.
        kernels: auto, triton or torch.
    """
    if use_triton(gradients[0], kernels):
        return torch.ops.lattice.square_sum([g.contiguous() for g in gradients], list(copies))
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient, count in zip(gradients, copies, strict=True):
        # dtype=float64 accumulates in float64 without a float64 copy of the gradient.
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / count
    return total


@jit
def _squares(
    TABLE, PLACES, PARTIAL, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    row, start, left = find(TABLE, PLACES, 3, BLOCK)
    x = pointer(row, 1, start, DTYPE, ALIGNED)
    copies = tl.load(row + 2).to(tl.float64)
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:  # no mask: a mask that may end anywhere would rule out 16-byte accesses
        part = tl.load(x + offsets).to(tl.float64)
    else:
        part = tl.load(x + offsets, mask=offsets < left, other=0.0).to(tl.float64)
    tl.store(PARTIAL + tl.program_id(0), tl.sum(part * part, 0) / copies)


@jit
def _sum(PARTIAL, TOTAL, count, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, count, BLOCK):
        total += tl.load(PARTIAL + start + offsets, mask=start + offsets < count, other=0.0)
    tl.store(TOTAL, tl.sum(total, 0))


@torch.library.custom_op("lattice::square_sum", mutates_args=())
def _square_sum(gradients: list[Tensor], copies: list[int]) -> Tensor:
    launch = prepare([gradients], [copies], BLOCK)
    (count,) = launch.grid
    partial = torch.empty(count, dtype=torch.float64, device=gradients[0].device)
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    if count:
        _squares[launch.grid](
            launch.table, launch.places, partial, DTYPE=triton_type(gradients[0].dtype),
            ALIGNED=launch.aligned, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _sum[(1,)](partial, total, count, BLOCK=4096, num_warps=16)
    return total


@_square_sum.register_fake
def _(gradients: list[Tensor], copies: list[int]) -> Tensor:
    return gradients[0].new_empty((), dtype=torch.float64)
