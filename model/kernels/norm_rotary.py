"""The norms of queries and keys (`model.qk_norm`), each followed by its rotation, in one pass.

    n = x · rstd · w        rstd = 1 / sqrt(mean(x²) + eps), for each head (rms_norm.py)
    y = n, rotated          (rotary.py)

Bytes per element of x in bfloat16: forward 4 (read x, write y), backward 6 (read dy and x, write
dx); as two operations 8 and 10. Added to that, for each token, are E float32 cosines and sines.
rstd is not kept: backward computes it again from x. Nor is n ever rounded.

q and k are a launch each. A program has all heads of one token (or of several, if the heads are
few). In backward it goes through many tokens, and keeps its part of the weight's gradient in
registers until the end.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from model.kernels.backend import (
    accumulator,
    cdiv,
    exact,
    jit,
    next_power_of_2,
    programs_for,
    rows_at_once,
    tl,
    use_triton,
    warps_for,
)
from model.kernels.rms_norm import rms_norm
from model.kernels.rotary import load_angles, readable, rotate, strides
from parallel.weight_gradient import WeightGradient


def norm_rotate(
    q: Tensor,
    k: Tensor,
    norms: Iterable[tuple[Tensor, WeightGradient]],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q [S, B, H, E] and k [S, B, K, E], by the weight [E] of the norm of each
    (given with its gradient) and by cos, sin [S, B or 1, 1, E/2]."""
    of_q, of_k = norms
    if use_triton(q, kernels):
        a, b = (NormRotate.apply(x, w, eps, cos, sin, to) for x, (w, to) in ((q, of_q), (k, of_k)))
        return a, b
    q, k = (rms_norm(x, w, eps, kernels, to) for x, (w, to) in ((q, of_q), (k, of_k)))
    return rotate(q, k, cos, sin, kernels)


class NormRotate(torch.autograd.Function):
    """Of one tensor, by the kernels. The weight's gradient goes to its sum."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        gradient: WeightGradient,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.eps, ctx.gradient = eps, gradient
        return torch.ops.lattice.norm_rotate(x, weight, eps, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin = ctx.saved_tensors
        wide = ctx.gradient.adds
        dx, dw = torch.ops.lattice.norm_rotate_backward(dy, x, weight, ctx.eps, cos, sin, wide)
        return dx, ctx.gradient.add(dw), None, None, None, None


@jit
def _normal(
    X, at, inside, EPS: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """The halves of heads, each head divided by its root mean square, and the factor."""
    a = tl.load(X + at, mask=inside, other=0.0).to(ACC)
    b = tl.load(X + at + HALF, mask=inside, other=0.0).to(ACC)
    square = tl.sum(a * a + b * b, 2, keep_dims=True)
    rstd = 1.0 / tl.sqrt(square / (2 * HALF) + tl.full((), EPS, ACC))
    return a * rstd, b * rstd, rstd


@jit
def _forward(
    X, W, Y, COS, SIN, tokens, batch, heads, cos_stride_s, cos_stride_b, EPS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head, i = tl.arange(0, HEADS)[None, :, None], tl.arange(0, PADDED)[None, None, :]
    turns = (token < tokens) & (i < HALF)
    inside = turns & (head < heads)
    at = (token * heads + head) * (2 * HALF) + i
    s, b = token // batch, token % batch
    cos, sin = load_angles(COS, SIN, s, b, i, cos_stride_s, cos_stride_b, turns, ACC)
    a, b, _ = _normal(X, at, inside, EPS, HALF, ACC)
    a *= tl.load(W + i, mask=i < HALF, other=0.0).to(ACC)
    b *= tl.load(W + HALF + i, mask=i < HALF, other=0.0).to(ACC)
    tl.store(Y + at, (a * cos - b * sin).to(Y.dtype.element_ty), mask=inside)
    tl.store(Y + at + HALF, (b * cos + a * sin).to(Y.dtype.element_ty), mask=inside)


@jit
def _backward(
    DY, X, W, DX, DW, COS, SIN, tokens, tokens_each, batch, heads, dy_stride_s, dy_stride_b,
    dy_stride_h, cos_stride_s, cos_stride_b, EPS: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS)[None, :, None], tl.arange(0, PADDED)[None, None, :]
    wa = tl.load(W + i, mask=i < HALF, other=0.0).to(ACC)
    wb = tl.load(W + HALF + i, mask=i < HALF, other=0.0).to(ACC)
    dwa, dwb = tl.zeros((HEADS, PADDED), ACC), tl.zeros((HEADS, PADDED), ACC)
    end = tl.minimum((program + 1) * tokens_each, tokens)
    for first in range(program * tokens_each, end, TOKENS):
        token = first + tl.arange(0, TOKENS)[:, None, None]
        turns = (token < tokens) & (i < HALF)
        inside = turns & (head < heads)
        s, b = token // batch, token % batch
        cos, sin = load_angles(COS, SIN, s, b, i, cos_stride_s, cos_stride_b, turns, ACC)
        # attention's gradients may have heads S · E apart: the last may begin after 2³¹ elements
        there = s * dy_stride_s + b * dy_stride_b + head.to(tl.int64) * dy_stride_h + i
        turned_a = tl.load(DY + there, mask=inside, other=0.0).to(ACC)
        turned_b = tl.load(DY + there + HALF, mask=inside, other=0.0).to(ACC)
        da, db = turned_a * cos + turned_b * sin, turned_b * cos - turned_a * sin
        at = (token * heads + head) * (2 * HALF) + i
        na, nb, rstd = _normal(X, at, inside, EPS, HALF, ACC)
        dwa += tl.sum(da * na, 0)
        dwb += tl.sum(db * nb, 0)
        da, db = da * wa * rstd, db * wb * rstd
        mean = tl.sum(da * na + db * nb, 2, keep_dims=True) / (2 * HALF)
        tl.store(DX + at, (da - na * mean).to(DX.dtype.element_ty), mask=inside)
        tl.store(DX + at + HALF, (db - nb * mean).to(DX.dtype.element_ty), mask=inside)
    i = tl.arange(0, PADDED)
    tl.store(DW + program * 2 * HALF + i, tl.sum(dwa, 0), mask=i < HALF)
    tl.store(DW + program * 2 * HALF + HALF + i, tl.sum(dwb, 0), mask=i < HALF)


def _tile(x: Tensor, eps: float) -> tuple[int, int, dict[str, Any]]:
    """The number of tokens, those of one tile, and what both kernels take last."""
    s, b, heads, width = x.shape
    padded, half = next_power_of_2(heads), next_power_of_2(width // 2)
    at_once = rows_at_once(2 * padded * half)
    return s * b, at_once, {
        "EPS": eps, "TOKENS": at_once, "HEADS": padded, "HALF": width // 2, "PADDED": half,
        "ACC": accumulator(x.dtype), "num_warps": warps_for(at_once * 2 * padded * half),
    }  # fmt: skip


@torch.library.custom_op("lattice::norm_rotate", mutates_args=())
def _norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    y = x.new_empty(x.shape)
    tokens, at_once, constants = _tile(x, eps)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    if tokens:
        _forward[(cdiv(tokens, at_once),)](
            x, weight, y, cos, sin, tokens, x.shape[1], x.shape[2], *strides(cos), **constants
        )
    return y


@_norm_rotate.register_fake
def _(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("lattice::norm_rotate_backward", mutates_args=())
def _norm_rotate_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, wide: bool
) -> tuple[Tensor, Tensor]:
    """dx and dw. `wide`: dw is not rounded to the weight's dtype."""
    dx, dy = x.new_empty(x.shape), readable(dy)
    tokens, at_once, constants = _tile(x, eps)
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    programs, tokens_each = programs_for(x, tokens, at_once, constants["num_warps"])
    dw = x.new_empty((programs, x.shape[3]), dtype=exact(x.dtype))
    if tokens:
        _backward[(programs,)](
            dy, x, weight, dx, dw, cos, sin, tokens, tokens_each, x.shape[1], x.shape[2],
            *dy.stride()[:3], *strides(cos), **constants,
        )  # fmt: skip
    dw = dw.sum(0)
    return dx, dw if wide else dw.to(weight.dtype)


@_norm_rotate_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, wide: bool
) -> tuple[Tensor, Tensor]:
    dtype = exact(x.dtype) if wide else weight.dtype
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=dtype)
