"""From tokens to the rows of their experts and back. Each token t has k rows, one for each expert
that it has chosen. They lie apart, at places[t·k + j], because rows are sorted by expert.

    spread   rows[places[t·k + j]] = x[t]                     sum   y[t] = Σⱼ rows[places[t·k + j]]

Each is the gradient of the other. Bytes per element of the rows in bfloat16: 2 + 2 / k, because a
token is read (written) once. As a gather, spread would be 4; as a gather and a sum, sum 6 + 2 / k.
"""

from typing import Any

import torch
from torch import Tensor

from model.kernels.backend import accumulator, cdiv, jit, next_power_of_2, tl, use_triton, warps_for

BLOCK = 2048  # elements at once, of one token


def spread_rows(x: Tensor, order: Tensor, places: Tensor, k: int, kernels: str) -> Tensor:
    """Copy x [T, D] to the rows [T·k, D] of its tokens, which `places` [T·k] orders by tokens, and
    `order`, its inverse, by rows."""
    if use_triton(x, kernels):
        return torch.ops.lattice.spread_rows(x, places, k)
    return x.index_select(0, order // k)


def sum_rows(x: Tensor, places: Tensor, k: int, kernels: str) -> Tensor:
    """Map rows x [T·k, D], which `places` [T·k] orders by tokens, to y [T, D]. Each sum is in the
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


@jit
def _spread(X, PLACES, Y, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(X + token * width + column, mask=inside)
    for j in tl.static_range(K):
        place = tl.load(PLACES + token * K + j)
        tl.store(Y + place * width + column, x, mask=inside)


def _launch(kernel: Any, x: Tensor, places: Tensor, y: Tensor, k: int, **constants: Any) -> Tensor:
    """One program for each token and block of columns."""
    tokens, width = len(places) // k, x.shape[1]
    block = min(BLOCK, next_power_of_2(width))
    if tokens:
        kernel[(tokens, cdiv(width, block))](
            x.contiguous(), places, y, width, K=k, BLOCK=block, num_warps=warps_for(block),
            **constants,
        )  # fmt: skip
    return y


@torch.library.custom_op("lattice::sum_rows", mutates_args=())
def _sum_rows(x: Tensor, places: Tensor, k: int) -> Tensor:
    y = x.new_empty((len(x) // k, x.shape[1]))
    return _launch(_sum, x, places, y, k, ACC=accumulator(x.dtype))


@_sum_rows.register_fake
def _(x: Tensor, places: Tensor, k: int) -> Tensor:
    return x.new_empty((len(x) // k, x.shape[1]))


@torch.library.custom_op("lattice::spread_rows", mutates_args=())
def _spread_rows(x: Tensor, places: Tensor, k: int) -> Tensor:
    return _launch(_spread, x, places, x.new_empty((len(places), x.shape[1])), k)


@_spread_rows.register_fake
def _(x: Tensor, places: Tensor, k: int) -> Tensor:
    return x.new_empty((len(places), x.shape[1]))
