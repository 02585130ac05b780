"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), applied to queries
and keys in one launch.

    (a, b) = (x[i], x[i + E/2])   →   (a · cos − b · sin,  b · cos + a · sin)
    angle  = position · theta^(−2i/E)

Pairing the two halves is Hugging Face's convention. Meta's original files pair neighbours, which
differs by a permutation of the rows of the query and key weights. The rotation is orthogonal, so
backward rotates the gradient back by the same angles, and x need not be saved.

Bytes per element of q and k in bfloat16: 4, in forward and in backward, and 4 / (heads of q and k)
for the float32 cosines and sines. These are read once per token for all heads, because one program
rotates all heads of one token (or of several tokens, if the heads are few).

The rotation is done in place where that is safe. Without gradients (evaluation, generation) q and k
are overwritten, because the caller has just computed them. With gradients they are not: selective
checkpointing may keep q, the output of a matrix product, and an incoming gradient in backward may
be shared with another branch.
"""

from typing import Any

import torch
from torch import Tensor

from model.kernels.backend import (
    accumulator,
    cdiv,
    jit,
    next_power_of_2,
    rows_at_once,
    tl,
    use_triton,
    warps_for,
)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    """Rotate q [S, B, H, E] and k [S, B, K, E] by cos, sin [S, B or 1, 1, E/2]; results in q's
    dtype. Without gradients q and k may be overwritten."""
    if torch.is_grad_enabled() or not use_triton(q, kernels):
        return Rotate.apply(q, k, cos, sin, kernels)
    torch.ops.lattice.rotate_(q, k, cos, sin)
    return q, k


class Rotate(torch.autograd.Function):
    """Saves only the angles."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        if use_triton(q, kernels):
            return torch.ops.lattice.rotate(q, k, cos, sin, False)
        return _turn(q, cos, sin, 1), _turn(k, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if use_triton(dq, ctx.kernels):
            return *torch.ops.lattice.rotate(dq, dk, cos, sin, True), None, None, None
        return _turn(dq, cos, sin, -1), _turn(dk, cos, sin, -1), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [S, B, H, E/2] each
    turned_first = (first * cos).addcmul_(second, sin, value=-direction)
    turned_second = (second * cos).addcmul_(first, sin, value=direction)
    # Rounded before they are joined. A cast at the end that does nothing would return the tensor of
    # the operation before, and torch 2.11 then compiles `Rotate` to gradients of zero
    # (https://github.com/pytorch/pytorch/issues/180642).
    return torch.cat((turned_first.to(x.dtype), turned_second.to(x.dtype)), dim=-1)


@jit
def load_angles(COS, SIN, s, b, i, stride_s, stride_b, inside, ACC: tl.constexpr):
    """The cosines and sines of tokens at s, b of [S, B]."""
    angles = s * stride_s + b * stride_b + i
    cos = tl.load(COS + angles, mask=inside, other=0.0).to(ACC)
    sin = tl.load(SIN + angles, mask=inside, other=0.0).to(ACC)
    return cos, sin


def strides(cos: Tensor) -> tuple[int, int]:
    """Of S and B, for `load_angles`."""
    return cos.stride(0), cos.stride(1) if cos.shape[1] > 1 else 0


@jit
def _turn_heads(
    X, OUT, there, cos, sin, x_stride_h, out_stride_h, num_heads,
    HEADS: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of some tokens. X and OUT [TOKENS, 1, 1] point to the tokens' first heads;
    `there` masks the tokens that exist."""
    # attention's gradients may have heads S · E apart: the last may begin after 2³¹ elements
    heads = tl.arange(0, HEADS)[None, :, None].to(tl.int64)
    i = tl.arange(0, PADDED)[None, None, :]
    inside = there & (heads < num_heads) & (i < HALF)
    a = tl.load(X + heads * x_stride_h + i, mask=inside, other=0.0).to(ACC)
    b = tl.load(X + heads * x_stride_h + HALF + i, mask=inside, other=0.0).to(ACC)
    tl.store(
        OUT + heads * out_stride_h + i, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=inside
    )
    tl.store(
        OUT + heads * out_stride_h + HALF + i,
        (b * cos + a * sin).to(OUT.dtype.element_ty),
        mask=inside,
    )


@jit
def _rotate_kernel(
    Q, K, Q_OUT, K_OUT, COS, SIN, tokens, batch, q_heads, k_heads, cos_stride_s, cos_stride_b,
    q_stride_s, q_stride_b, q_stride_h, k_stride_s, k_stride_b, k_stride_h,
    q_out_stride_s, q_out_stride_b, q_out_stride_h, k_out_stride_s, k_out_stride_b, k_out_stride_h,
    BACK: tl.constexpr, TOKENS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    there = token < tokens
    s, b = token // batch, token % batch
    i = tl.arange(0, PADDED)[None, None, :]
    inside = there & (i < HALF)
    cos, sin = load_angles(COS, SIN, s, b, i, cos_stride_s, cos_stride_b, inside, ACC)
    if BACK:
        sin = -sin
    q, q_out = Q + s * q_stride_s + b * q_stride_b, Q_OUT + s * q_out_stride_s + b * q_out_stride_b
    k, k_out = K + s * k_stride_s + b * k_stride_b, K_OUT + s * k_out_stride_s + b * k_out_stride_b
    _turn_heads(q, q_out, there, cos, sin, q_stride_h, q_out_stride_h, q_heads,
                Q_HEADS, HALF, ACC, PADDED)  # fmt: skip
    _turn_heads(k, k_out, there, cos, sin, k_stride_h, k_out_stride_h, k_heads,
                K_HEADS, HALF, ACC, PADDED)  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, back: bool
) -> None:
    tokens, (q_heads, head_dim), k_heads = q.shape[0] * q.shape[1], q.shape[2:], k.shape[2]
    if not tokens:
        return
    padded, q_padded, k_padded = map(next_power_of_2, (head_dim // 2, q_heads, k_heads))
    at_once = rows_at_once(2 * q_padded * padded)
    _rotate_kernel[(cdiv(tokens, at_once),)](
        q, k, q_out, k_out, cos, sin, tokens, q.shape[1], q_heads, k_heads,
        *strides(cos), *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
        BACK=back, TOKENS=at_once, Q_HEADS=q_padded, K_HEADS=k_padded, HALF=head_dim // 2,
        PADDED=padded,
        # as many threads as there are 16-byte accesses in the smaller tile (usually that of k);
        # for q each thread then handles several heads
        num_warps=warps_for(at_once * 2 * min(q_padded, k_padded) * padded),
        ACC=accumulator(q.dtype),
    )  # fmt: skip


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy if its last stride is not 1; the kernel accepts any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("lattice::rotate", mutates_args=())
def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    _launch(readable(q), readable(k), q_out, k_out, cos.contiguous(), sin.contiguous(), back)
    return q_out, k_out


@_rotate.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("lattice::rotate_", mutates_args=("q", "k"))
def _rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    assert q.stride(-1) == k.stride(-1) == 1, "rotating in place needs contiguous heads"
    _launch(q, k, q, k, cos.contiguous(), sin.contiguous(), False)
