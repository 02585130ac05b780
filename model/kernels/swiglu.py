"""SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202): y = silu(g) · u, silu(g) = g · σ(g).

    dg = dy · u · (σ + silu · (1 − σ))          du = dy · silu

Bytes per element in bfloat16: forward 6 (read g and u, write y), backward 10 (read dy, g, u; write
dg, du). Only g and u are saved; backward recomputes σ.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.backend import accumulator, cdiv, jit, tl, use_triton

BLOCK = 2048  # elements per program: two 16-byte loads of each tensor for each of 128 threads


def swiglu(gate: Tensor, up: Tensor, kernels: str) -> Tensor:
    """Compute silu(gate) · up of gate, up [..., F]."""
    return SwiGLU.apply(gate, up, kernels)


def swiglu_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, from that of the PyTorch implementation's result."""
    return torch.ops.aten.silu_backward(dy * up, gate), dy * functional.silu(gate)


class SwiGLU(torch.autograd.Function):
    """Saves only its inputs. Plain autograd would save silu(g) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        if use_triton(gate, kernels):
            return torch.ops.lattice.swiglu(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if use_triton(gate, ctx.kernels):
            return *torch.ops.lattice.swiglu_backward(dy, gate, up), None
        return *swiglu_gradients(dy, gate, up), None


@jit
def _forward(G, U, Y, n, ACC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    g = tl.load(G + i, mask=inside, other=0.0).to(ACC)
    u = tl.load(U + i, mask=inside, other=0.0).to(ACC)
    tl.store(Y + i, (g / (1.0 + tl.exp(-g)) * u).to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(DY, G, U, DG, DU, n, ACC: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    dy = tl.load(DY + i, mask=inside, other=0.0).to(ACC)
    g = tl.load(G + i, mask=inside, other=0.0).to(ACC)
    u = tl.load(U + i, mask=inside, other=0.0).to(ACC)
    sigma = 1.0 / (1.0 + tl.exp(-g))
    silu = g * sigma
    tl.store(DG + i, (dy * u * (sigma + silu * (1.0 - sigma))).to(DG.dtype.element_ty), mask=inside)
    tl.store(DU + i, (dy * silu).to(DU.dtype.element_ty), mask=inside)


@torch.library.custom_op("lattice::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape)
    if n := gate.numel():
        _forward[(cdiv(n, BLOCK),)](
            gate, up, y, n, ACC=accumulator(gate.dtype), BLOCK=BLOCK, num_warps=4
        )
    return y


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lattice::swiglu_backward", mutates_args=())
def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    if n := gate.numel():
        _backward[(cdiv(n, BLOCK),)](
            dy, gate, up, dgate, dup, n, ACC=accumulator(gate.dtype), BLOCK=BLOCK, num_warps=4
        )  # fmt: skip
    return dgate, dup


@_swiglu_backward.register_fake
def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)
