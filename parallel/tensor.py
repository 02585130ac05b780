"""Tensor parallelism, written by hand: each matrix is cut over the tp axis, and the cuts meet in
few, visible collectives.

    x ──all-gather──┬─ column-parallel q, k, v ── attention ── row-parallel output ──reduce-scatter── y
     (whole sequence)     [each rank: its heads]                 [partial sums]         (1/tp of the sequence)

A column-parallel weight [F, D] keeps F/tp rows per rank, so each rank computes F/tp of the outputs;
a row-parallel weight [D, F] keeps F/tp columns, so each rank computes a partial sum of all outputs.
One after the other they need one communication going in and one coming out (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, section 3). With sequence parallelism the activations between them
are split along the sequence, and all-reduce becomes reduce-scatter + all-gather: the same bytes,
1/tp of the memory (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

Weights are DTensors that carry their placement on tp: FSDP2 shards them further, checkpoints store
the global tensor, and the gradient norm knows what is a replica. The mathematics works on the local
tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from parallel.collectives import (
    reduce_over_tp,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from parallel.parameter import Normal, Weight, add_weight
from parallel.placement import chunk_range
from parallel.weight import (
    Destination,
    EmbeddingGradient,
    Matmul,
    WeightGradientJob,
    WeightGradientQueue,
    embedding_gradient,
    local_weight,
)


class ColumnParallelFunction(torch.autograd.Function):
    """Several column-parallel products of one input, which is gathered (or copied) once for all of
    them.

    With sequence parallelism (Korthikanti et al., g-bar); F is the sum of the outputs' local
    widths:

    | pass         | computes       | local shapes               | communication                               |
    |--------------|----------------|----------------------------|---------------------------------------------|
    | forward      | yᵢ = x · wᵢᵀ   | [S/tp, B, D] → [S, B, Fᵢ]  | all-gather x: S·B·D over tp                 |
    | input grad.  | dx = Σ dyᵢ·wᵢ  | [S, B, Fᵢ] → [S/tp, B, D]  | reduce-scatter dx: S·B·D, behind weight gr. |
    | weight grad. | dwᵢ = dyᵢᵀ · x | → [Fᵢ, D]                  | all-gather x again: S·B·D, behind input gr. |

    Gathering x twice is what lets each rank keep only its S/tp slice of it between forward and
    backward. Without (Shoeybi et al., f): x is whole on every rank already; forward moves nothing,
    and dx is all-reduced, S·B·D, behind the weight gradient. Where `queue` defers
    (parallel/weight.py) the last row of the table happens later, in a job.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        sequence_parallel: bool,
        queue: WeightGradientQueue | None,
        destinations: Sequence[Destination],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel, ctx.queue, ctx.destinations = (
            group,
            sequence_parallel,
            queue,
            destinations,
        )
        ctx.save_for_backward(x, *weights)
        if sequence_parallel:
            x = start_all_gather(x, group).wait()  # [S, B, D]
        return tuple(Matmul.forward(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group = ctx.group
        later = ctx.queue is not None and ctx.queue.is_deferring
        if ctx.sequence_parallel and not later:
            gathering_x = start_all_gather(x, group)
        dx = None
        for dy, weight in zip(dys, weights, strict=True):
            dx = Matmul.input_gradient(dy, weight, into=dx)
        assert dx is not None
        if ctx.sequence_parallel and not later:
            x = gathering_x.wait()
        reducing_dx = (
            start_reduce_scatter(dx, group)
            if ctx.sequence_parallel
            else start_all_reduce_(dx, group)
        )
        dws: list[Tensor | None]
        if later:
            gather_x = group if ctx.sequence_parallel else None
            ctx.queue.add(WeightGradientJob(x, dys, ctx.destinations, gather_x=gather_x))
            dws = [None] * len(dys)
        else:
            dws = [Matmul.weight_gradient(dy, x) for dy in dys]
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
        group: ProcessGroup,
        sequence_parallel: bool,
        queue: WeightGradientQueue | None,
        destinations: Sequence[Destination],
        weight: Tensor,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel, ctx.queue, ctx.destinations = (
            group,
            sequence_parallel,
            queue,
            destinations,
        )
        ctx.save_for_backward(x, weight)
        return Matmul.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dw = None
        if ctx.queue is None or not ctx.queue.is_deferring:
            dw = Matmul.weight_gradient(dy, x)
        elif ctx.sequence_parallel and ctx.group.size() > 1:
            # The reduce-scatter's backward gathered dy. Waiting, the job keeps this rank's part,
            # and gathers it again.
            mine = dy.chunk(ctx.group.size())[ctx.group.rank()].clone()
            ctx.queue.add(WeightGradientJob(x, (mine,), ctx.destinations, gather_dys=ctx.group))
        else:
            ctx.queue.add(WeightGradientJob(x, (dy,), ctx.destinations))
        return Matmul.input_gradient(dy, weight), None, None, None, None, dw


class ColumnParallelLinear(nn.Module):
    """weight [out, in], output rows cut over tp. No forward of its own: `column_parallel` computes
    several that read one input.

    `shards` may be less than tp (key/value heads fewer than tp ranks): then the whole weight is on
    every rank, and ranks in groups of tp / shards compute the same slice of the output. Each rank's
    gradient covers its slice and the queries it served: a partial sum (parallel/partial.py).
    """

    weight: nn.Parameter
    # set by `share_queue` where a schedule splits backward
    weight_gradient_queue: WeightGradientQueue | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: DeviceMesh,
        initial: Normal,
        shards: int | None = None,
        copy_of: str | None = None,
    ) -> None:
        super().__init__()
        ranks = tp.size()
        self.shards = min(shards or ranks, ranks)
        shared = self.shards < ranks
        width, index = out_features // self.shards, tp.get_local_rank() * self.shards // ranks
        self.rows = slice(index * width, (index + 1) * width) if shared else None
        weight = Weight(
            shape=(out_features, in_features),
            placement=Replicate() if shared else Shard(0),
            initial=initial,
            decays=True,
            gradient_is_partial=shared,
            copy_of=copy_of,
        )
        add_weight(self, weight, tp)

    def local_weight(self) -> Tensor:
        """[out / shards, in]"""
        weight = local_weight(self.weight, self.weight_gradient_queue)
        return weight if self.rows is None else weight[self.rows]


def column_parallel(
    x: Tensor, layers: list[ColumnParallelLinear], group: ProcessGroup, sequence_parallel: bool
) -> list[Tensor]:
    """x [S/tp, B, D] (or [S, B, D] without sequence parallelism) → one [S, B, out/tp] per layer,
    with one gather of x."""
    weights = [layer.local_weight() for layer in layers]
    queue = layers[0].weight_gradient_queue
    destinations = (
        () if queue is None else tuple(Destination(layer.weight, layer.rows) for layer in layers)
    )
    return list(
        ColumnParallelFunction.apply(x, group, sequence_parallel, queue, destinations, *weights)
    )


class RowParallelLinear(nn.Module):
    """weight [out, in], input columns cut over tp: x [S, B, in/tp] → [S/tp, B, out], summed over tp
    on the way."""

    weight: nn.Parameter
    weight_gradient_queue: WeightGradientQueue | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: DeviceMesh,
        sequence_parallel: bool,
        initial: Normal,
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        shape = (out_features, in_features)
        weight = Weight(
            shape=shape, placement=Shard(1), initial=initial, decays=True, gradient_is_partial=False
        )
        add_weight(self, weight, tp)

    def forward(self, x: Tensor) -> Tensor:
        queue = self.weight_gradient_queue
        destinations = () if queue is None else (Destination(self.weight, None),)
        weight = local_weight(self.weight, queue)
        partial = RowParallelFunction.apply(
            x, self.group, self.sequence_parallel, queue, destinations, weight
        )
        return reduce_over_tp(partial, self.group, self.sequence_parallel)


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a weight [V/tp, D]: rows [S, B] → [S, B, D]. Its one gradient is the weight's, here
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
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        if ctx.queue is not None and ctx.queue.is_deferring:
            ctx.queue.add(EmbeddingGradient(dy, rows, ctx.destination))
            return None, None, None, None
        return None, None, None, embedding_gradient(dy, rows, ctx.num_rows)


class VocabParallelEmbedding(nn.Module):
    """weight [V, D], rows cut over tp, unevenly where tp does not divide V: tokens [S, B] → [S/tp,
    B, D].

    Each rank looks up the tokens whose rows it holds and puts zeros elsewhere; the sum over tp is
    the embedding.
    """

    weight: nn.Parameter
    weight_gradient_queue: WeightGradientQueue | None = None

    def __init__(
        self, vocab_size: int, dim: int, tp: DeviceMesh, sequence_parallel: bool, initial: Normal
    ) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.rows = chunk_range(vocab_size, tp.size(), tp.get_local_rank())
        shape = (vocab_size, dim)
        weight = Weight(
            shape=shape, placement=Shard(0), initial=initial, decays=True, gradient_is_partial=False
        )
        add_weight(self, weight, tp)

    def forward(self, tokens: Tensor) -> Tensor:
        queue = self.weight_gradient_queue
        destination = None if queue is None else Destination(self.weight, None)
        elsewhere = (tokens < self.rows.start) | (tokens >= self.rows.stop)
        rows = (tokens - self.rows.start).masked_fill(elsewhere, 0)
        local = EmbeddingFunction.apply(rows, queue, destination, local_weight(self.weight, queue))
        return reduce_over_tp(
            local.masked_fill(elsewhere.unsqueeze(-1), 0), self.group, self.sequence_parallel
        )
