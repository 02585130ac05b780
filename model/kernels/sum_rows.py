"""The sum of each token's rows: y[t] = Σⱼ x[places[t·k + j]], for the k results of its experts,
which lie apart because rows are sorted by expert.

Bytes per element of x in bfloat16: 2 + 2 / k (read each row once, write the sums). As a gather and
a sum it would be 6 + 2 / k.
"""

import torch
from torch import Tensor

from model.kernels.backend import accumulator, cdiv, jit, next_power_of_2, tl, use_triton, warps_for

BLOCK = 2048  # elements at once, of one token


def sum_rows(x: Tensor, places: Tensor, k: int, kernels: str) -> Tensor:
    """Map x [T·k, D], whose rows `places` [T·k] orders by tokens, to y [T, D]. Each sum is in the
    order of its rows, in float32 at least."""
    if use_triton(x, kernels):
        return torch.ops.lattice.sum_rows(x, places, k)
    return x.index_select(0, places).unflatten(0, (-1, k)).sum(1)


@jit
def _sum(X, PLACES, Y, width, K: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), ACC)
    for j in tl.static_range(K):
        place = tl.load(PLACES + token * K + j)
        total += tl.load(X + place * width + column, mask=inside, other=0.0).to(ACC)
    tl.store(Y + token * width + column, total.to(Y.dtype.element_ty), mask=inside)


@torch.library.custom_op("lattice::sum_rows", mutates_args=())
def _sum_rows(x: Tensor, places: Tensor, k: int) -> Tensor:
    x, width = x.contiguous(), x.shape[1]
    y = x.new_empty((len(x) // k, width))
    block = min(BLOCK, next_power_of_2(width))
    if len(y):
        _sum[(len(y), cdiv(width, block))](
            x, places, y, width, K=k, ACC=accumulator(x.dtype), BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip
    return y


@_sum_rows.register_fake
def _(x: Tensor, places: Tensor, k: int) -> Tensor:
    return x.new_empty((len(x) // k, x.shape[1]))
