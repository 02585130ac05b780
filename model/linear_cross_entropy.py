"""The head's projection onto the vocabulary and cross-entropy in one operation, piece by piece, so
that at most 2 GiB of logits are in memory.

    for each piece of the tokens:
        x      ◄─ all-gather over tp ─ this rank's slices of the sequence         [n·tp, B, D]
        z      =  x · wᵀ                                                           [n·tp·B, V/tp]
        loss  ◄─ all-gather over tp ─ three numbers per token (cross_entropy.py)
        z      ←  gradient of the loss, over the logits
        dx     =  z · w ─ reduce-scatter over tp ─► this rank's slices             [n, B, D]
        dw    +=  zᵀ · x                         in float32

The gradient of cross-entropy can be computed as soon as the normaliser is known. So forward
computes both gradients; in a run that sums them over micro-batches it adds dw to the sum. Nothing
may follow the loss: backward asserts that the incoming gradient is 1, and hands over what forward
has computed. (On one device and with the whole vocabulary: Liger-Kernel, Hsu et al. 2024,
https://arxiv.org/abs/2410.10989, section 3.2; Wijmans et al. 2024,
https://arxiv.org/abs/2411.09009.)

With sequence parallelism a piece is taken from every rank's part of the sequence at once, so that
with several pieces the whole input is never gathered either. A piece's gather overlaps with the
products of the previous piece, its reduce-scatter with its own dw and the next piece's logits. (Of
a single piece, only the gather overlaps with nothing. More pieces would hide it, but each reads and
writes dw once more.) Without sequence parallelism every rank has the whole sequence, and dx is
all-reduced.

| pass     | local shapes                     | communication over tp, sequence parallel (else)    |
|----------|----------------------------------|----------------------------------------------------|
| forward  | [S/tp, B, D] → scalar            | all-gather S·B·D (none); 3·S·B per rank;           |
|          |                                  | reduce-scatter (all-reduce) S·B·D                  |
| backward | scalar → [S/tp, B, D], [V/tp, D] | none                                               |

The price: without such a sum (parallel/weight_gradient.py) the head holds dw between a
micro-batch's forward and backward, and a schedule with many forwards in flight on the last stage
(gpipe, breadth_first) one for each. And where a schedule splits backward, the head has no product
left for W, and its time counts as F. (Without a sum dw is nevertheless handed over in W, so that
all gradients of a micro-batch are complete at the same time.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from model.kernels.backend import cdiv, exact
from model.kernels.cross_entropy import (
    Normaliser,
    gradient_over_logits_,
    merge,
    statistics,
    token_losses,
)
from parallel.collectives import ONE_RANK, Pending, by_rank, start_all_gather, start_reduce_
from parallel.layer import TensorParallel
from parallel.weight_gradient import TO_AUTOGRAD, LinearProducts, WeightGradient

# The size of one piece's logits. On a GPU it is large enough that reading and writing the float32
# sum dw once per piece costs little in comparison, and that usual sequences are one piece (at
# V = 128k, 8192 tokens). Then, if micro-batches are not summed, dw needs no float32 sum, which at
# D = 4096 is as large. On a CPU a piece fits into a core's cache.
PIECE_BYTES = {"cuda": 1 << 31, "cpu": 1 << 22}


class LinearCrossEntropy(torch.autograd.Function):
    """The operation that the top of this file describes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        first_row: int,
        tp: TensorParallel,
        matmul: LinearProducts,
        z_loss: float,
        kernels: str,
        piece_tokens: int,
        gradient: WeightGradient,
    ) -> Tensor:
        ctx.gradient = gradient
        # a sum in bfloat16 would be rounded once per piece
        in_sum = gradient.adds and gradient.dtype == exact(x.dtype)
        is_one = targets.numel() <= piece_tokens
        dw_dtype = weight.dtype if is_one and not gradient.adds else exact(x.dtype)
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        loss = x.new_zeros((), dtype=exact(x.dtype))
        dxs: list[Tensor] = []
        reducing: Pending | None = None  # the previous piece's dx
        dw: Tensor | None = None
        for piece, piece_targets in pieces_of(x, targets, tp, piece_tokens):
            y = piece_targets.flatten()
            rows = piece.flatten(0, 1)  # [n·tp·B, D]
            z = matmul.forward(rows, weight)
            row = normaliser(z, y, first_row, tp.group, kernels)
            loss += token_losses(row, y, z_loss).sum()
            if wants_dx or wants_dw:
                gradient_over_logits_(z, y, row, scale, first_row, z_loss, kernels)
            if wants_dx:
                dx = matmul.input_gradient(z, weight).view_as(piece)
                if reducing is not None:
                    dxs.append(reducing.wait())  # frees the unreduced dx of that piece
                reducing = start_reduce_(dx, tp.group, tp.sequence_parallel)
            if wants_dw and in_sum:
                gradient.add_product(matmul, z, rows)
            elif wants_dw:
                dw = matmul.add_weight_gradient(z, rows, into=dw, dtype=dw_dtype)
            del z  # before the next piece's logits are allocated
        if reducing is not None:
            dxs.append(reducing.wait())
        ctx.dx = None if not wants_dx else dxs[0] if is_one else torch.cat(dxs)
        ctx.dw = dw if dw is None or gradient.adds else dw.to(weight.dtype)
        ctx.is_first = True
        return loss * scale

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.is_first, "the gradients were handed over in the first call of backward"
        (dx, dw), ctx.dx, ctx.dw, ctx.is_first = (ctx.dx, ctx.dw), None, None, False
        torch._assert_async(dloss == 1, "nothing may follow the loss: use `scale`")
        if dw is not None:  # to the sum itself: autograd would round it to bfloat16
            dw = ctx.gradient.add(dw)
        return dx, dw, *[None] * 9


def normaliser(
    logits: Tensor, targets: Tensor, first_row: int, group: ProcessGroup, kernels: str
) -> Normaliser:
    """Compute the statistics over the whole vocabulary from this rank's logits [T, V/tp], with one
    all-gather of [3, T]."""
    mine = statistics(logits, targets, first_row, kernels)
    return merge(start_all_gather(mine, group).wait().unflatten(0, (-1, 3)))


def pieces_of(
    x: Tensor, targets: Tensor, tp: TensorParallel, piece_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of x and of the targets, [n·tp, B, D] and [n·tp, B], and gather each while the
    caller works on the previous one.

    x is [S/tp, B, D] with sequence parallelism; else it is [S, B, D] and a piece [n, B, D]. targets
    are always [S, B].
    """
    gather_over = tp.group if tp.sequence_parallel else ONE_RANK
    held = targets.unsqueeze(0)  # [tp, S/tp, B]: the targets of what each rank holds
    if gather_over.size() > 1:
        held = by_rank(targets, tp.size, tp.pieces)
    height = max(1, cdiv(x.shape[0], max(1, cdiv(targets.numel(), piece_tokens))))
    starts = range(0, x.shape[0], height)
    started = (start_all_gather(x[at : at + height], gather_over) for at in starts)
    following = next(started)
    for at in starts:
        gathering, following = following, next(started, following)  # none after the last
        yield gathering.wait(), held[:, at : at + height].flatten(0, 1)


def tokens_of_piece(
    x: Tensor, vocab_size: int, group: ProcessGroup, piece_bytes: int | None = None
) -> int:
    """How many tokens' logits take piece_bytes (None: the default for the device) on the widest
    rank of `group`."""
    piece_bytes = piece_bytes or PIECE_BYTES.get(x.device.type, PIECE_BYTES["cuda"])
    return max(1, piece_bytes // (cdiv(vocab_size, group.size()) * x.element_size()))


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    first_row: int,
    tp: TensorParallel,
    *,
    matmul: LinearProducts,
    vocab_size: int,
    z_loss: float = 0.0,
    kernels: str = "auto",
    piece_bytes: int | None = None,
    gradient: WeightGradient = TO_AUTOGRAD,
) -> Tensor:
    """Compute scale · Σ over target tokens of the cross-entropy of x · weightᵀ: a scalar in float32
    (float64), the same on all tp ranks.

    Args:
        x: [S/tp, B, D] with sequence parallelism, else [S, B, D].
        weight: [V/tp, D], this rank's rows of the vocabulary, of which `first_row` is the first.
        targets: [S, B] int64 token ids of the whole vocabulary, or `IGNORE`.
        scale: a scalar tensor, `Batch.loss_scale`.
        vocab_size: V. All ranks divide the tokens alike, by the bytes of the widest rank's logits.
        piece_bytes: bytes of one piece's logits; None: the default for the device.
    """
    piece_tokens = tokens_of_piece(x, vocab_size, tp.group, piece_bytes)
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    return LinearCrossEntropy.apply(
        x, weight, targets, scale, first_row, tp, matmul, z_loss, kernels, piece_tokens, gradient
    )  # fmt: skip
