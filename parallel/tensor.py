"""Tensor parallelism, written by hand: each matrix is cut over the tp axis, and the cuts meet in few, visible collectives.

    x ──all-gather──┬─ column-parallel q, k, v ── attention ── row-parallel output ──reduce-scatter── y
     (whole sequence)     [each rank: its heads]                 [partial sums]         (1/tp of the sequence)

A column-parallel weight [F, D] keeps F/tp rows per rank, so each rank computes F/tp of the outputs; a row-parallel weight
[D, F] keeps F/tp columns, so each rank computes a partial sum of all outputs. One after the other they need one
communication going in and one coming out (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3). With
sequence parallelism the activations between them are split along the sequence, and all-reduce becomes
reduce-scatter + all-gather: the same bytes, 1/tp of the memory (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

Weights are DTensors that carry their placement on tp: FSDP2 shards them further, checkpoints store the global tensor, and
the gradient norm knows what is a replica. The mathematics works on the local tensors.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.collectives import (
    reduce_over_tp,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)
from parallel.placement import as_dtensor_like, chunk_range, parallel_parameter


class Matmul:
    """The three products of every parallel linear layer: the one place to change how they are computed."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]."""
        return F.linear(x, weight)

    @staticmethod
    def input_gradient(dy: Tensor, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` where given (several layers that read one input)."""
        if into is None:
            return dy @ weight
        into.view(-1, into.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return into

    @staticmethod
    def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""
        return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class ColumnParallelFunction(torch.autograd.Function):
    """Several column-parallel products of one input, which is gathered (or copied) once for all of them.

    With sequence parallelism (Korthikanti et al., g-bar); F is the sum of the outputs' local widths:

    | pass         | computes       | local shapes               | communication                               |
    |--------------|----------------|----------------------------|---------------------------------------------|
    | forward      | yᵢ = x · wᵢᵀ   | [S/tp, B, D] → [S, B, Fᵢ]  | all-gather x: S·B·D over tp                 |
    | input grad.  | dx = Σ dyᵢ·wᵢ  | [S, B, Fᵢ] → [S/tp, B, D]  | reduce-scatter dx: S·B·D, behind weight gr. |
    | weight grad. | dwᵢ = dyᵢᵀ · x | → [Fᵢ, D]                  | all-gather x again: S·B·D, behind input gr. |

    Gathering x twice is what lets each rank keep only its S/tp slice of it between forward and backward.
    Without (Shoeybi et al., f): x is whole on every rank already; forward moves nothing, and dx is all-reduced, S·B·D, behind
    the weight gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, sequence_parallel: bool, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.save_for_backward(x, *weights)
        if sequence_parallel:
            x = start_all_gather(x, group).wait()  # [S, B, D]
        return tuple(Matmul.forward(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group = ctx.group
        if ctx.sequence_parallel:
            gathering_x = start_all_gather(x, group)
        dx = None
        for dy, weight in zip(dys, weights, strict=True):
            dx = Matmul.input_gradient(dy, weight, into=dx)
        assert dx is not None
        if ctx.sequence_parallel:
            x = gathering_x.wait()
            reducing_dx = start_reduce_scatter(dx, group)
        else:
            reducing_dx = start_all_reduce_(dx, group)
        dws = [Matmul.weight_gradient(dy, x) for dy in dys]
        return reducing_dx.wait(), None, None, *dws


class RowParallelFunction(torch.autograd.Function):
    """The partial product of one row-parallel weight; the caller reduces it over tp.

    | pass         | computes     | local shapes              | communication |
    |--------------|--------------|---------------------------|---------------|
    | forward      | y = x · wᵀ   | [S, B, F/tp] → [S, B, D]  | none here     |
    | input grad.  | dx = dy · w  | [S, B, D] → [S, B, F/tp]  | none here     |
    | weight grad. | dw = dyᵀ · x | → [D, F/tp]               | none          |
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return Matmul.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return Matmul.input_gradient(dy, weight), Matmul.weight_gradient(dy, x)


class LocalWeight(torch.autograd.Function):
    """This rank's tensor of a DTensor weight; its gradient becomes the weight's, placed alike.

    `DTensor.to_local` does the same through the dispatcher, at several times the host time per weight and micro-batch. Here,
    where gradients stay in the weight between micro-batches (float32 computing), all but the first are added to the local
    tensor at once; where FSDP takes each away to sum it in a wider dtype (bfloat16), each is the first. What is added to was
    made by the first call of this backward, from a tensor that every caller has just made, so nobody else holds it.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight
        return weight.to_local()

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> DTensor | None:
        weight = ctx.weight
        if weight.grad is not None:
            weight.grad.to_local().add_(dw)
            return None
        return as_dtensor_like(dw, weight)


def local_weight(weight: nn.Parameter) -> Tensor:
    """This rank's tensor of a weight."""
    assert isinstance(weight, DTensor)
    if torch.compiler.is_compiling():
        return weight.to_local()  # the compiler knows this one, and pays its price once
    return LocalWeight.apply(weight)


class ColumnParallelLinear(nn.Module):
    """weight [out, in], output rows cut over tp. No forward of its own: `column_parallel` computes several that read one input.

    `shards` may be less than tp (key/value heads fewer than tp ranks): then the whole weight is on every rank, and ranks in
    groups of tp / shards compute the same slice of the output. Each rank's gradient covers its slice and the queries it
    served: a partial sum (parallel/partial.py).
    """

    def __init__(self, in_features: int, out_features: int, tp: DeviceMesh, shards: int | None = None) -> None:
        super().__init__()
        ranks = tp.size()
        self.shards = min(shards or ranks, ranks)
        self.gradient_is_partial = self.shards < ranks
        self.width = out_features // self.shards
        self.slice_index = tp.get_local_rank() * self.shards // ranks
        self.weight = parallel_parameter((out_features, in_features), tp, Replicate() if self.gradient_is_partial else Shard(0))

    def local_weight(self) -> Tensor:
        """[out / shards, in]"""
        weight = local_weight(self.weight)
        if not self.gradient_is_partial:
            return weight
        return weight[self.slice_index * self.width : (self.slice_index + 1) * self.width]


def column_parallel(
    x: Tensor, layers: list[ColumnParallelLinear], group: ProcessGroup, sequence_parallel: bool
) -> list[Tensor]:
    """x [S/tp, B, D] (or [S, B, D] without sequence parallelism) → one [S, B, out/tp] per layer, with one gather of x."""
    weights = [layer.local_weight() for layer in layers]
    return list(ColumnParallelFunction.apply(x, group, sequence_parallel, *weights))


class RowParallelLinear(nn.Module):
    """weight [out, in], input columns cut over tp: x [S, B, in/tp] → [S/tp, B, out], summed over tp on the way."""

    def __init__(self, in_features: int, out_features: int, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.weight = parallel_parameter((out_features, in_features), tp, Shard(1))

    def forward(self, x: Tensor) -> Tensor:
        partial = RowParallelFunction.apply(x, local_weight(self.weight))
        return reduce_over_tp(partial, self.group, self.sequence_parallel)


class VocabParallelEmbedding(nn.Module):
    """weight [V, D], rows cut over tp, unevenly where tp does not divide V: tokens [S, B] → [S/tp, B, D].

    Each rank looks up the tokens whose rows it holds and puts zeros elsewhere; the sum over tp is the embedding.
    """

    def __init__(self, vocab_size: int, dim: int, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.rows = chunk_range(vocab_size, tp.size(), tp.get_local_rank())
        self.weight = parallel_parameter((vocab_size, dim), tp, Shard(0))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_weight(self.weight)
        elsewhere = (tokens < self.rows.start) | (tokens >= self.rows.stop)
        local = F.embedding((tokens - self.rows.start).masked_fill(elsewhere, 0), weight)
        return reduce_over_tp(local.masked_fill(elsewhere.unsqueeze(-1), 0), self.group, self.sequence_parallel)
