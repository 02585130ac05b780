"""RMSNorm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), with or without the addition
of the residual in the same pass.

    s = x + r        (the residual stream; without r, s = x)
    y = s · rstd · w         rstd = 1 / sqrt(mean(s²) + eps), one number per row

    dw = Σ_rows dy · s · rstd
    ds = rstd · (dy·w − s · rstd · mean(dy·w · s·rstd))
       (+ the gradient of s from its other uses)

The backward of the sum costs nothing: the gradients of x and r are both ds.

| operation          | reads                | writes       | bytes per element of x in bfloat16 |
|--------------------|----------------------|--------------|------------------------------------|
| rms_norm           | x                    | y            | 4                                  |
| its backward       | dy, x                | dx           | 6                                  |
| (s in other uses)  | dy, ds, x            | dx           | 8 (unfused: 12)                    |
| add_rms_norm       | x, r                 | s, y         | 8 (unfused, sum then norm: 10)     |
| its backward       | dy, ds, s            | dx           | 8 (unfused: 12)                    |

The weight, rstd, and the weight gradient's partial sums (one row per program) are small in
comparison.

One program normalises one row, or as many narrow rows as fill a tile of 4096 elements, and holds
its tile in registers. In backward a program works through many tiles, and keeps its part of the
weight gradient in registers until the end. This needs no atomic additions, so the result is the
same bit for bit every time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.backend import (
    accumulator,
    cdiv,
    exact,
    jit,
    next_power_of_2,
    programs_for,
    rows_at_once,
    rows_of,
    tl,
    use_triton,
    warps_for,
)
from parallel.weight_gradient import TO_AUTOGRAD, WeightGradient


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, kernels: str, gradient: WeightGradient = TO_AUTOGRAD
) -> Tensor:
    """Normalise x [..., D] with weight [D]; y has the shape of x. `kernels` is auto, triton or
    torch; `gradient` is the weight's (parallel/weight_gradient.py)."""
    if use_triton(x, kernels):
        return RMSNormFunction.apply(x, None, weight, eps, gradient)[0]
    wide = WideWeight.apply(weight, gradient)
    return functional.rms_norm(x.to(wide.dtype), (x.shape[-1],), wide, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    kernels: str,
    gradient: WeightGradient = TO_AUTOGRAD,
) -> tuple[Tensor, Tensor]:
    """x, residual [..., D], weight [D] → (y, s): the normalised sum, and the sum, for its other
    uses: backward adds their gradient in the same pass. The sum is rounded to x's dtype before it
    is normalised."""
    if use_triton(x, kernels):
        return RMSNormFunction.apply(x, residual, weight, eps, gradient)
    s = x if residual is None else x + residual
    return rms_norm(s, weight, eps, kernels, gradient), s


class RMSNormFunction(torch.autograd.Function):
    """(y, s) by the kernels. The weight's gradient goes to its sum: autograd would round it to the
    weight's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.adds = gradient, residual is not None
        y, s, rstd = torch.ops.lattice.rms_norm(x, residual, weight, eps)
        s = x.view_as(x) if residual is None else s
        ctx.save_for_backward(s, weight, rstd)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Any, ...]:
        if dy is None:
            return ds, ds if ctx.adds else None, None, None, None
        wide = ctx.gradient.adds
        dx, dw = torch.ops.lattice.rms_norm_backward(dy, ds, *ctx.saved_tensors, wide)
        return dx, dx if ctx.adds else None, ctx.gradient.add(dw), None, None


class WideWeight(torch.autograd.Function):
    """A weight in at least float32, for PyTorch's operations; its gradient goes to its sum."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: WeightGradient) -> Tensor:
        ctx.gradient = gradient
        return weight.to(exact(weight.dtype)) if weight.requires_grad else weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, None]:
        return ctx.gradient.add(dw), None


@jit
def _forward(
    X, R, W, Y, S, RSTD, x_stride, r_stride, rows, width, EPS: tl.constexpr,
    ADD: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < width)
    s = tl.load(X + row * x_stride + columns, mask=inside, other=0.0).to(ACC)
    if ADD:
        s += tl.load(R + row * r_stride + columns, mask=inside, other=0.0).to(ACC)
        rounded = s.to(S.dtype.element_ty)
        tl.store(S + row * width + columns, rounded, mask=inside)
        s = rounded.to(ACC)  # normalise the rounded sum, which is the one that backward reads
    w = tl.load(W + columns, mask=columns < width, other=0.0).to(ACC)
    rstd = 1.0 / tl.sqrt(tl.sum(s * s, 1, keep_dims=True) / width + tl.full((), EPS, ACC))
    tl.store(RSTD + row, rstd, mask=row < rows)
    tl.store(Y + row * width + columns, (s * rstd * w).to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(
    DY, DS, S, W, RSTD, DX, DW, dy_stride, ds_stride, s_stride, rows, rows_each, width,
    ADD: tl.constexpr, ACC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros((ROWS, BLOCK), ACC)
    for first in range(program * rows_each, tl.minimum((program + 1) * rows_each, rows), ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (columns < width)
        normal = tl.load(S + row * s_stride + columns, mask=inside, other=0.0).to(ACC)
        dy = tl.load(DY + row * dy_stride + columns, mask=inside, other=0.0).to(ACC)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        normal = normal * rstd
        dw += dy * normal
        # loaded each time: rows of 16,384 leave no registers to keep it in
        w = tl.load(W + columns, mask=columns < width, other=0.0).to(ACC)
        dy = dy * w * rstd
        dx = dy - normal * (tl.sum(dy * normal, 1, keep_dims=True) / width)
        if ADD:
            dx += tl.load(DS + row * ds_stride + columns, mask=inside, other=0.0).to(ACC)
        tl.store(DX + row * width + columns, dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(DW + program * width + columns, tl.sum(dw, 0, keep_dims=True), mask=columns < width)


@torch.library.custom_op("lattice::rms_norm", mutates_args=())
def _rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, s and rstd. Without a residual s is empty: it is x."""
    shape, width = x.shape, x.shape[-1]
    x = rows_of(x)
    r = x if residual is None else rows_of(residual)
    y = x.new_empty(x.shape)
    s = x.new_empty(0 if residual is None else x.shape)
    rstd = x.new_empty(x.shape[0], dtype=exact(x.dtype))
    block = next_power_of_2(width)
    at_once = rows_at_once(block)
    if rows := x.shape[0]:
        _forward[(cdiv(rows, at_once),)](
            x, r, weight, y, y if residual is None else s, rstd, x.stride(0), r.stride(0), rows,
            width, EPS=eps, ADD=residual is not None, ACC=accumulator(x.dtype), ROWS=at_once,
            BLOCK=block, num_warps=warps_for(at_once * block),
        )  # fmt: skip
    return y.view(shape), s if residual is None else s.view(shape), rstd


@_rms_norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=exact(x.dtype))
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape), rstd


@torch.library.custom_op("lattice::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, rstd: Tensor, wide: bool
) -> tuple[Tensor, Tensor]:
    """dx and dw. `wide`: dw is not rounded to the weight's dtype."""
    shape, width = s.shape, s.shape[-1]
    dy, s = rows_of(dy), rows_of(s)
    residual = dy if ds is None else rows_of(ds)
    rows = s.shape[0]
    dx = s.new_empty(s.shape)
    block = next_power_of_2(width)
    at_once = rows_at_once(block)
    warps = warps_for(at_once * block)
    programs, rows_each = programs_for(s, rows, at_once, warps)
    dw = s.new_empty((programs, width), dtype=exact(s.dtype))
    if rows:
        _backward[(programs,)](
            dy, residual, s, weight, rstd, dx, dw, dy.stride(0), residual.stride(0), s.stride(0),
            rows, rows_each, width, ADD=ds is not None, ACC=accumulator(s.dtype), ROWS=at_once,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    dw = dw.sum(0)
    return dx.view(shape), dw if wide else dw.to(weight.dtype)


@_rms_norm_backward.register_fake
def _(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, rstd: Tensor, wide: bool
) -> tuple[Tensor, Tensor]:
    dtype = exact(s.dtype) if wide else weight.dtype
    return s.new_empty(s.shape), weight.new_empty(weight.shape, dtype=dtype)
