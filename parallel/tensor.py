"""Tensor parallelism, written by hand: each matrix is cut over the tp axis, and few, visible
collectives join the parts.

    x ──all-gather──┬─ column-parallel q, k, v ─ attention ─ row-parallel output ──reduce-scatter─ y
     (whole sequence)    [each rank: its heads]               [partial sums]     (1/tp of it again)

A column-parallel weight [F, D] keeps F/tp rows per rank, so each rank computes F/tp of the outputs;
a row-parallel weight [D, F] keeps F/tp columns, so each rank computes a partial sum of all outputs.
One after the other they need one communication going in and one coming out (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, section 3). With sequence parallelism the activations outside such
a pair (norms, the residual stream) are split along the sequence, and all-reduce becomes
reduce-scatter + all-gather: the same bytes, 1/tp of the memory (Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from parallel.collectives import (
    reduce_over_tp,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from parallel.deferred import (
    Destination,
    EmbeddingGradient,
    LinearGradients,
    LinearProducts,
    WeightGradientQueue,
    embedding_gradient,
)
from parallel.layer import Layer, Pieces, TensorParallel
from parallel.parameter import EMBEDDING, MATRIX, Normal, WeightSpec


class ColumnParallelFunction(torch.autograd.Function):
    """Column-parallel products of one input, which is gathered (or copied) once for all of them.

    With sequence parallelism (Korthikanti et al., g); Fᵢ is the local width of output i:

    | pass         | computes       | local shapes              | communication over tp       |
    |--------------|----------------|---------------------------|-----------------------------|
    | forward      | yᵢ = x · wᵢᵀ   | [S/tp, B, D] → [S, B, Fᵢ] | all-gather x: S·B·D         |
    | input grad.  | dx = Σ dyᵢ·wᵢ  | [S, B, Fᵢ] → [S/tp, B, D] | reduce-scatter dx: S·B·D,   |
    |              |                |                           | behind the weight gradients |
    | weight grad. | dwᵢ = dyᵢᵀ · x | → [Fᵢ, D]                 | all-gather x again: S·B·D,  |
    |              |                |                           | behind the input gradient   |

    Gathering x twice is what lets each rank keep only its S/tp slice between forward and backward.
    Without (Shoeybi et al., f): x is whole on every rank already; forward moves nothing, and dx is
    all-reduced, S·B·D, behind the weight gradient. Where a queue defers (parallel/deferred.py) the
    last row of the table happens later, in a job.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: TensorParallel,
        matmuls: Sequence[LinearProducts],
        queue: WeightGradientQueue | None,
        destinations: Sequence[Destination],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.matmuls, ctx.queue, ctx.destinations = tp, matmuls, queue, destinations
        ctx.save_for_backward(x, *weights)
        if tp.sequence_parallel:
            x = start_all_gather(x, tp.group).wait()  # [S, B, D]
        return tuple(m.forward(x, weight) for m, weight in zip(matmuls, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, sequence_parallel = ctx.tp.group, ctx.tp.sequence_parallel
        deferring = ctx.queue is not None and ctx.queue.is_deferring
        if sequence_parallel and not deferring:
            gathering_x = start_all_gather(x, group)
        dx = None
        for matmul, dy, weight in zip(ctx.matmuls, dys, weights, strict=True):
            dx = matmul.input_gradient(dy, weight, into=dx)
        assert dx is not None
        if sequence_parallel and not deferring:
            x = gathering_x.wait()
        start = start_reduce_scatter if sequence_parallel else start_all_reduce_
        reducing_dx = start(dx, group)
        dws: list[Tensor | None]
        if deferring:
            gather_x = group if sequence_parallel else None
            ctx.queue.add(LinearGradients(x, dys, ctx.destinations, gather_x=gather_x))
            dws = [None] * len(dys)
        else:
            dws = [m.weight_gradient(dy, x) for m, dy in zip(ctx.matmuls, dys, strict=True)]
        return reducing_dx.wait(), None, None, None, None, *dws


class RowParallelFunction(torch.autograd.Function):
    """The partial product of one row-parallel weight; the caller reduces it over tp.

    | pass         | computes     | local shapes              | communication |
    |--------------|--------------|---------------------------|---------------|
    | forward      | y = x · wᵀ   | [S, B, F/tp] → [S, B, D]  | none here     |
    | input grad.  | dx = dy · w  | [S, B, D] → [S, B, F/tp]  | none here     |
    | weight grad. | dw = dyᵀ · x | → [D, F/tp]               | none          |

    A deferred weight gradient gathers dy again with sequence parallelism: S·B·D over tp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: TensorParallel,
        matmul: LinearProducts,
        queue: WeightGradientQueue | None,
        destinations: Sequence[Destination],
        weight: Tensor,
    ) -> Tensor:
        ctx.tp, ctx.matmul, ctx.queue, ctx.destinations = tp, matmul, queue, destinations
        ctx.save_for_backward(x, weight)
        return matmul.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        tp, dw = ctx.tp, None
        if ctx.queue is None or not ctx.queue.is_deferring:
            dw = ctx.matmul.weight_gradient(dy, x)
        elif tp.sequence_parallel and tp.size > 1:
            # The reduce-scatter's backward gathered dy. Waiting, the job keeps this rank's part,
            # and gathers it again.
            mine = dy.chunk(tp.size)[tp.rank].clone()
            ctx.queue.add(LinearGradients(x, (mine,), ctx.destinations, gather_dys=tp.group))
        else:
            ctx.queue.add(LinearGradients(x, (dy,), ctx.destinations))
        return ctx.matmul.input_gradient(dy, weight), None, None, None, None, dw


class ColumnParallelLinear(Layer):
    """weight [out, in], output rows cut over tp between `pieces` of the output. `column_parallel`
    computes several of these that read one input.

    Where there are fewer pieces than tp ranks (key/value heads), the whole weight is on every rank,
    and ranks in groups of tp / pieces compute the same slice of the output. Each rank's gradient
    covers its slice and the queries it served: a partial sum (parallel/partial.py).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        pieces: Pieces,
        tp: TensorParallel,
        matmul: LinearProducts,
        initial: Normal,
        copy_of: str | None = None,
    ) -> None:
        super().__init__(tp)
        self.matmul = matmul
        pieces.check(tp.size)
        shared = pieces.count < tp.size
        self.rows = None  # of this rank's part, which it computes with; None: all
        if shared:
            width, piece = out_features // pieces.count, pieces.of(tp.size, tp.rank)
            self.rows = slice(piece.start * width, piece.stop * width)
        weight = WeightSpec(
            shape=(out_features, in_features),
            placement=Replicate() if shared else Shard(0),
            initial=initial,
            group=MATRIX,
            gradient_is_partial=shared,
            copy_of=copy_of,
        )
        self.add_weight(weight)

    def local_weight(self) -> Tensor:
        """[out/tp, in]; where ranks share pieces, the one piece [out/pieces, in] of this rank"""
        weight = super().local_weight()
        return weight if self.rows is None else weight[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        """x [S/tp, B, in] (or [S, B, in] without sequence parallelism) → [S, B, out/tp]"""
        return column_parallel(x, self)[0]


def column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """x [S/tp, B, in] (or [S, B, in] without sequence parallelism) → one [S, B, out/tp] per layer,
    with one gather of x."""
    weights = [layer.local_weight() for layer in layers]
    matmuls = [layer.matmul for layer in layers]
    queue, destinations = layers[0].queue, []
    if queue is not None:
        destinations = [Destination(layer.weight, layer.rows, layer.matmul) for layer in layers]
    y = ColumnParallelFunction.apply(x, layers[0].tp, matmuls, queue, destinations, *weights)
    return tuple(y)


class RowParallelLinear(Layer):
    """weight [out, in], input columns cut over tp: x [S, B, in/tp] → [S/tp, B, out], summed over tp
    on the way."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        matmul: LinearProducts,
        initial: Normal,
    ) -> None:
        super().__init__(tp)
        self.matmul = matmul
        weight = WeightSpec(
            shape=(out_features, in_features),
            placement=Shard(1),
            initial=initial,
            group=MATRIX,
            gradient_is_partial=False,
        )
        self.add_weight(weight)

    def forward(self, x: Tensor) -> Tensor:
        tp, matmul, queue = self.tp, self.matmul, self.queue
        destinations = [] if queue is None else [Destination(self.weight, None, matmul)]
        partial = RowParallelFunction.apply(x, tp, matmul, queue, destinations, self.local_weight())
        return reduce_over_tp(partial, tp.group, tp.sequence_parallel)


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a weight [V/tp, D]: rows [S, B] → [S, B, D]. Its only gradient is the weight's, here
    or in a job."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        queue: WeightGradientQueue | None,
        destination: Destination | None,
        weight: Tensor,
    ) -> Tensor:
        ctx.queue, ctx.destination, ctx.num_rows = queue, destination, weight.shape[0]
        ctx.save_for_backward(rows)
        return functional.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if ctx.queue is not None and ctx.queue.is_deferring:
            ctx.queue.add(EmbeddingGradient(dy, rows, ctx.destination))
            return None, None, None, None
        return None, None, None, embedding_gradient(dy, rows, ctx.num_rows)


class VocabParallelEmbedding(Layer):
    """weight [V, D], rows cut over tp, unevenly where tp does not divide V: tokens [S, B] →
    [S/tp, B, D].

    Each rank looks up the tokens whose rows it holds and puts zeros elsewhere; the sum over tp is
    the embedding.
    """

    def __init__(self, rows: Pieces, dim: int, tp: TensorParallel, initial: Normal) -> None:
        super().__init__(tp)
        rows.check(tp.size)
        self.rows = rows.of(tp.size, tp.rank)
        weight = WeightSpec(
            shape=(rows.count, dim),
            placement=Shard(0),
            initial=initial,
            group=EMBEDDING,
            gradient_is_partial=False,
        )
        self.add_weight(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        queue = self.queue
        destination = None if queue is None else Destination(self.weight)
        elsewhere = (tokens < self.rows.start) | (tokens >= self.rows.stop)
        rows = (tokens - self.rows.start).masked_fill(elsewhere, 0)
        local = EmbeddingFunction.apply(rows, queue, destination, self.local_weight())
        partial = local.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_over_tp(partial, self.tp.group, self.tp.sequence_parallel)
