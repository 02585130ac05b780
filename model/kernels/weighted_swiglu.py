"""SwiGLU of an expert's rows, each times its weight by the router: y = w · silu(g) · u.

    dg = w · dy · u · (σ + silu · (1 − σ))     du = w · dy · silu     dw = Σ dy · silu · u, by row

Multiplied here and not after the last product, the weight's gradient needs no result of an expert.

The kernel's dg and du are the halves of one [R, 2·F], so that dx can be one product
(parallel/tensor.py).

Bytes per element in bfloat16: forward 6 (read g and u, write y), backward 10 (read dy, g, u; write
dg, du), as without weights. In separate operations it would be 18 and 32: products with w are in
float32, and are rounded in an operation of their own.
"""

from typing import Any

import torch
from torch import Tensor

from model.kernels.backend import accumulator, cdiv, jit, next_power_of_2, tl, use_triton, warps_for
from model.kernels.swiglu import swiglu, swiglu_gradients

BLOCK = 2048  # elements at once, of one row


def weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor, kernels: str) -> Tensor:
    """Compute w · silu(gate) · up of gate, up [R, F] and weights [R] (float32 or wider)."""
    return WeightedSwiGLU.apply(gate, up, weights, kernels)


class WeightedSwiGLU(torch.autograd.Function):
    """Saves only its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.kernels = kernels
        if use_triton(gate, kernels):
            return torch.ops.lattice.weighted_swiglu(gate, up, weights)
        return (swiglu(gate, up, kernels) * weights.unsqueeze(1)).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        gate, up, weights = ctx.saved_tensors
        if use_triton(gate, ctx.kernels):
            both, dweights = torch.ops.lattice.weighted_swiglu_backward(dy, gate, up, weights)
            return *both.chunk(2, 1), dweights, None
        dweights = (dy.to(weights.dtype) * swiglu(gate, up, ctx.kernels)).sum(1)
        dh = (dy * weights.unsqueeze(1)).to(dy.dtype)
        return *swiglu_gradients(dh, gate, up), dweights, None


@jit
def _forward(G, U, W, Y, width, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i, inside = row * width + column, column < width
    g = tl.load(G + i, mask=inside, other=0.0).to(ACC)
    u = tl.load(U + i, mask=inside, other=0.0).to(ACC)
    w = tl.load(W + row).to(ACC)
    tl.store(Y + i, (g / (1.0 + tl.exp(-g)) * u * w).to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(DY, G, U, W, DGU, DW, width, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    DG = DGU + row * 2 * width
    DU = DG + width
    w = tl.load(W + row).to(ACC)
    dw = tl.zeros((BLOCK,), ACC)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        i, inside = row * width + column, column < width
        dy = tl.load(DY + i, mask=inside, other=0.0).to(ACC)
        g = tl.load(G + i, mask=inside, other=0.0).to(ACC)
        u = tl.load(U + i, mask=inside, other=0.0).to(ACC)
        sigma = 1.0 / (1.0 + tl.exp(-g))
        silu = g * sigma
        dw += dy * silu * u
        dy *= w
        dg = dy * u * (sigma + silu * (1.0 - sigma))
        tl.store(DG + column, dg.to(DGU.dtype.element_ty), mask=inside)
        tl.store(DU + column, (dy * silu).to(DGU.dtype.element_ty), mask=inside)
    tl.store(DW + row, tl.sum(dw, 0))


@torch.library.custom_op("lattice::weighted_swiglu", mutates_args=())
def _weighted_swiglu(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    gate, up, weights = gate.contiguous(), up.contiguous(), weights.contiguous()
    y = gate.new_empty(gate.shape)
    rows, width = gate.shape
    block = min(BLOCK, next_power_of_2(width))
    if rows:
        _forward[(rows, cdiv(width, block))](
            gate, up, weights, y, width, ACC=accumulator(gate.dtype), BLOCK=block,
            num_warps=warps_for(block),
        )  # fmt: skip
    return y


@_weighted_swiglu.register_fake
def _(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lattice::weighted_swiglu_backward", mutates_args=())
def _weighted_swiglu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    dy, gate, up, weights = (t.contiguous() for t in (dy, gate, up, weights))
    rows, width = gate.shape
    both, dweights = gate.new_empty((rows, 2 * width)), weights.new_empty(weights.shape)
    block = min(BLOCK, next_power_of_2(width))
    if rows:
        _backward[(rows,)](
            dy, gate, up, weights, both, dweights, width, ACC=accumulator(gate.dtype),
            BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
    return both, dweights


@_weighted_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = gate.shape
    return gate.new_empty((rows, 2 * width)), weights.new_empty(weights.shape)
