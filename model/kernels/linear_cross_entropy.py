"""Projection onto the vocabulary and cross-entropy in one operation, in pieces: the logits are
never whole in memory.

    for each piece of the tokens:
        x      ◄─ all-gather over tp ─ this rank's slices of the sequence         [n·tp, B, D]
        z      =  x · wᵀ                                                           [n·tp·B, V/tp]
        loss  ◄─ all-gather over tp ─ three numbers per token (cross_entropy.py)
        z      ←  gradient of the loss, over the logits
        dw    +=  zᵀ · x                         in float32
        dx     =  z · w ─ reduce-scatter over tp ─► this rank's slices             [n, B, D]

The gradient of cross-entropy is known as soon as the normaliser is, so forward computes both
gradients, and backward hands them on, times the gradient that arrives (1, unless something comes
after the loss). The same three matrix products as with whole logits, at a fraction of the memory;
without gradients (evaluation) only the first. (The idea, on one device and with the whole
vocabulary: Liger-Kernel, Hsu et al. 2024, https://arxiv.org/abs/2410.10989, section 3.2; Wijmans et
al. 2024, https://arxiv.org/abs/2411.09009.)

With sequence parallelism a piece is cut from every rank's part of the sequence at once, so that of
many pieces the whole input is never gathered either; a piece's gather runs behind the products of
the one before, its reduce-scatter behind those of the one after. (Cut over many ranks the logits
may be one piece. More would hide more, but each reads and writes dw once again.) Without, every
rank has the whole sequence, and dx is all-reduced.

| pass     | local shapes                     | communication over tp, sequence parallel (else)    |
|----------|----------------------------------|----------------------------------------------------|
| forward  | [S/tp, B, D] → scalar            | all-gather S·B·D (none); 3·S·B per rank;           |
|          |                                  | reduce-scatter (all-reduce) S·B·D                  |
| backward | scalar → [S/tp, B, D], [V/tp, D] | none                                               |

What it costs: between a micro-batch's forward and backward its head holds dw, in the weight's
dtype, where whole logits would be held otherwise: V/tp · D numbers instead of V/tp · T. A schedule
with many forwards in flight on the last stage (gpipe, breadth_first) holds as many. And where a
schedule splits backward, the head's weight gradient is ready in forward: its part of W is empty
(parallel/layer.py adds it there all the same, so that a micro-batch's gradients are complete at
one moment), and its time belongs to F.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from model.kernels.backend import cdiv, exact
from model.kernels.cross_entropy import gradient_over_logits_, normaliser, token_losses
from parallel.collectives import Pending, start_all_gather, start_all_reduce_, start_reduce_scatter
from parallel.deferred import LinearProducts

# Of one piece's logits. On a GPU it is what the float32 sum dw, read and written once per piece, is
# small beside (at V = 128k and D = 4096 a piece is 4096 tokens); on a CPU it is what a core's cache
# holds.
PIECE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}


class LinearCrossEntropy(torch.autograd.Function):
    """See the top of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: Tensor,
        first_row: int,
        group: ProcessGroup,
        sequence_parallel: bool,
        matmul: LinearProducts,
        z_loss: float,
        kernels: str,
        piece_tokens: int,
    ) -> Tensor:
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        loss = x.new_zeros((), dtype=exact(x.dtype))
        dxs: list[Tensor] = []
        reducing: Pending | None = None  # the last piece's dx
        dw: Tensor | None = None
        pieces = _pieces(x, targets, group if sequence_parallel else None, piece_tokens)
        for piece, piece_targets in pieces:
            y = piece_targets.flatten()
            rows = piece.flatten(0, 1)  # [n·tp·B, D]
            z = matmul.forward(rows, weight)
            row = normaliser(z, y, first_row, group, kernels)
            loss += token_losses(row, y, z_loss).sum()
            if wants_dx or wants_dw:
                gradient_over_logits_(z, y, row, scale, first_row, z_loss, kernels)
            if wants_dx:
                dx = matmul.input_gradient(z, weight).view_as(piece)
                if reducing is not None:
                    dxs.append(reducing.wait())  # lets go of that piece's whole dx
                reducing = (
                    start_reduce_scatter(dx, group)
                    if sequence_parallel
                    else start_all_reduce_(dx, group)
                )
            if wants_dw:
                dw = matmul.add_weight_gradient(z, rows, into=dw, dtype=exact(x.dtype))
            del z  # before the next piece's
        if reducing is not None:
            dxs.append(reducing.wait())
        ctx.dx = torch.cat(dxs) if wants_dx else None
        ctx.dw = dw.to(weight.dtype) if dw is not None else None
        return loss * scale

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        (dx, dw), ctx.dx, ctx.dw = (ctx.dx, ctx.dw), None, None
        assert dx is not None or dw is not None, (
            "the gradients were handed on already: a second backward has none"
        )
        for gradient in (dx, dw):
            if gradient is not None:
                gradient.mul_(dloss)  # ours alone until now
        return dx, dw, *[None] * 9


def _pieces(
    x: Tensor, targets: Tensor, gather_over: ProcessGroup | None, piece_tokens: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the tokens and their targets, [n·tp, B, D] and [n·tp, B], each gathered while the
    one before is worked on.

    x is [S/tp, B, D] where it is gathered over tp, else [S, B, D] and a piece [n, B, D]; targets
    are [S, B] always.
    """
    ranks = gather_over.size() if gather_over is not None else 1
    by_rank = targets.unflatten(0, (ranks, -1))  # [tp, S/tp, B]
    height = max(1, cdiv(x.shape[0], max(1, cdiv(targets.numel(), piece_tokens))))
    starts = range(0, x.shape[0], height)

    def start(at: int) -> Pending:
        piece = x[at : at + height]
        return Pending(piece, None) if gather_over is None else start_all_gather(piece, gather_over)

    following = start(0)
    for at in starts:
        gathering, following = (
            following,
            start(at + height) if at + height < x.shape[0] else following,
        )
        yield gathering.wait(), by_rank[:, at : at + height].flatten(0, 1)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    first_row: int,
    group: ProcessGroup,
    sequence_parallel: bool,
    *,
    matmul: LinearProducts,
    vocab_size: int,
    z_loss: float = 0.0,
    kernels: str = "auto",
    piece_bytes: int | None = None,
) -> Tensor:
    """scale · Σ over target tokens of the cross-entropy of x · weightᵀ: a scalar in float32
    (float64), on all tp ranks alike.

    Args:
        x: [S/tp, B, D] with sequence parallelism, else [S, B, D].
        weight: [V/tp, D], this rank's rows of the vocabulary, of which `first_row` is the first.
        targets: [S, B] int64 token ids of the whole vocabulary, or `IGNORE`.
        scale: a scalar tensor, known before the gradient is: 1 / number of target tokens of the
            global batch.
        group: the tp group.
        matmul: the products.
        vocab_size: V. All ranks cut the tokens alike, by the bytes of the widest rank's logits.
        z_loss, kernels: as in cross_entropy.py.
        piece_bytes: of the logits that exist at one time; None: what suits the device.
    """
    piece_bytes = piece_bytes or PIECE_BYTES.get(x.device.type, PIECE_BYTES["cuda"])
    piece_tokens = max(1, piece_bytes // (cdiv(vocab_size, group.size()) * x.element_size()))
    if not torch.is_grad_enabled():
        x, weight = x.detach(), weight.detach()
    return LinearCrossEntropy.apply(
        x,
        weight,
        targets,
        scale,
        first_row,
        group,
        sequence_parallel,
        matmul,
        z_loss,
        kernels,
        piece_tokens,
    )
