"""Tensor parallelism, written by hand: each matrix is sharded over the tp axis, and a few explicit
collectives combine the parts.

    x ──all-gather──┬─ column-parallel q, k, v ─ attention ─ row-parallel output ──reduce-scatter─ y
     (whole sequence)    [each rank: its heads]               [partial sums]     (1/tp of sequence)

Each rank holds F/tp rows of a column-parallel weight [F, D], and computes F/tp of the outputs. It
holds F/tp columns of a row-parallel weight [D, F], and computes a partial sum of all outputs. A
column-parallel layer followed by a row-parallel one needs one communication at the input and one at
the output (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3). Sequence parallelism
splits the activations outside such a pair (norms, the residual stream) along the sequence, and
replaces each all-reduce by a reduce-scatter and an all-gather: these activations take 1/tp of the
memory (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Forward sends the same bytes;
backward gathers x again.

If the sequence is cut into pieces (`parallel.tp_pieces`; collectives.py states which positions a
rank then holds), the product of one piece runs while another is sent (Wang et al. 2023,
https://doi.org/10.1145/3567955.3567959). With four pieces, in forward:

    column   gather    0 1 2 3            row   product   0 1 2 3
             product     0 1 2 3                scatter     0 1 2 3
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

from parallel.asynchronous import Starts
from parallel.collectives import ONE_RANK, start_all_gather, start_reduce_
from parallel.kept import KeepsOutputs, KeptOutputs
from parallel.layer import Atoms, Layer, TensorParallel
from parallel.parameter import EMBEDDING, MATRIX, Group, Normal, WeightSpec
from parallel.weight_gradient import Job, LinearProducts, WeightGradient, add_products


class ColumnParallelFunction(torch.autograd.Function):
    """Multiply one input, gathered once, by one or more column-parallel weights.

    With sequence parallelism (g in Korthikanti et al.); Fᵢ is the local width of output i:

    | pass         | computes       | local shapes              | communication over tp       |
    |--------------|----------------|---------------------------|-----------------------------|
    | forward      | yᵢ = x · wᵢᵀ   | [S/tp, B, D] → [S, B, Fᵢ] | all-gather x: S·B·D,        |
    |              |                | piece by piece            | overlaps the previous piece |
    | input grad.  | dx = Σ dyᵢ·wᵢ  | [S, B, Fᵢ] → [S/tp, B, D] | reduce-scatter dx: S·B·D,   |
    |              |                |                           | overlaps weight gradients   |
    | weight grad. | dwᵢ = dyᵢᵀ · x | → [Fᵢ, D]                 | all-gather x again: S·B·D,  |
    |              |                |                           | overlaps input gradient     |

    Because backward gathers x again, each rank keeps only its S/tp slice of x until then.
    Without sequence parallelism (f in Shoeybi et al.) x is already whole on every rank: forward
    sends nothing, and backward all-reduces dx, S·B·D, overlapped with the weight gradients. If
    weight gradients are deferred (weight_gradient.py), the last row of the table runs later, as a
    job.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tp: TensorParallel,
        matmuls: Sequence[LinearProducts],
        gradients: Sequence[WeightGradient],
        kept: KeptOutputs | None,
        leave: Starts | None,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.tp, ctx.matmuls, ctx.gradients, ctx.leave = tp, matmuls, gradients, leave
        ctx.save_for_backward(x, *weights)

        def compute() -> tuple[Tensor, ...]:
            if tp.size == 1 or not tp.sequence_parallel:
                return tuple(m.forward(x, w) for m, w in zip(matmuls, weights, strict=True))
            gathering = start_all_gather(x, tp.group, tp.pieces)  # [S, B, D]
            s, b, _ = x.shape
            ys = tuple(x.new_empty((s * tp.size, b, w.shape[0])) for w in weights)
            parts = (y.chunk(tp.pieces) for y in ys)
            for piece, *outs in zip(gathering.pieces(), *parts, strict=True):  # outs: of each y
                for matmul, weight, out in zip(matmuls, weights, outs, strict=True):
                    matmul.forward(piece, weight, out=out)
            return ys

        return compute() if kept is None else kept.of(compute)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        group, sequence_parallel, pieces = ctx.tp.group, ctx.tp.sequence_parallel, ctx.tp.pieces
        deferred = ctx.gradients[0].is_deferred
        if sequence_parallel and not deferred:
            gathering_x = start_all_gather(x, group, pieces)
        dx = None
        products: Sequence[Product] = [*zip(ctx.matmuls, dys, weights, strict=True)]
        if sum(map(is_narrow, weights)) > 1:
            products = join_narrow(products)
        for matmul, dy, weight in products:
            dx = matmul.input_gradient(dy, weight, into=dx)
        assert dx is not None
        del products, dy, weight  # joined weights are copies
        if sequence_parallel and not deferred:
            x = gathering_x.wait()
        reducing_dx = start_reduce_(dx, group, sequence_parallel, pieces)
        if ctx.leave is not None:  # experts' dx travels on, also beside the weight gradients
            ctx.leave(dx)
        add = partial(add_products, ctx.gradients, ctx.matmuls)
        dws: list[Tensor | None] = [None] * len(dys)
        if deferred:
            gather_over = [group if sequence_parallel else ONE_RANK] + [ONE_RANK] * len(dys)
            ctx.gradients[0].defer(Job(add, (x.detach(), *dys), gather_over, pieces))
        else:
            dws = add(x, *dys)
        return reducing_dx.wait(), None, None, None, None, None, *dws


Product = tuple[LinearProducts, Tensor, Tensor]  # what computes dy [..., F] · weight [..., F, D]


def is_narrow(weight: Tensor) -> bool:
    """Whether a layer [F, D] or experts [X, F, D] have so few columns that adding a product to dx
    takes longer than copies that join them. (Several experts' sum is an operation of its own.)"""
    return (4 if weight.ndim == 2 or len(weight) == 1 else 2) * weight.shape[-2] < weight.shape[-1]


def join_narrow(products: Sequence[Product]) -> Sequence[Product]:
    """The same sum dx, with one product of the first one's object for all narrow layers (keys and
    values over tp), so that dx is passed over once. Their weights are copied for it, and their dy
    unless those lie side by side, as SwiGLU's of experts do."""
    (matmul, *_), dys, weights = zip(*[one for one in products if is_narrow(one[2])], strict=True)
    others = [one for one in products if not is_narrow(one[2])]
    return [*others, (matmul, side_by_side(dys), torch.cat(weights, -2))]


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Tensors [R, Fᵢ] as one [R, ΣFᵢ]: a copy, unless they are the parts of one already."""

    def place(part: Tensor) -> tuple[Any, ...]:
        return id(part._base), part.storage_offset(), part.shape, part.stride()

    whole, widths = parts[0]._base, [part.shape[-1] for part in parts]
    if whole is None or whole.shape[-1:] != (sum(widths),):
        return torch.cat([*parts], -1)
    is_whole = [*map(place, parts)] == [*map(place, whole.split(widths, -1))]
    return whole if is_whole else torch.cat([*parts], -1)


class KeepForBackward(torch.autograd.Function):
    """Keep the two factors of the product that follows, so that recomputation can end before it.

    Activation checkpointing recomputes a block until it has all tensors that the block's backward
    reads. A function's own tensors are recorded only after its forward, so if a block's last
    product kept its factors itself, it would be computed again, and reduced over tp, although
    nothing reads the result. This function has them as soon as they exist, and computes nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class RowParallelFunction(torch.autograd.Function):
    """Multiply by one row-parallel weight, and sum over tp (`row_parallel`).

    With sequence parallelism (g-bar in Korthikanti et al.):

    | pass         | computes       | local shapes                | communication over tp       |
    |--------------|----------------|-----------------------------|-----------------------------|
    | forward      | y = Σ x · wᵀ   | [S, B, F/tp] → [S/tp, B, D] | reduce-scatter y: S·B·D,    |
    |              |                | piece by piece              | overlaps the next piece     |
    | input grad.  | dx = dy · w    | [S/tp, B, D] → [S, B, F/tp] | all-gather dy: S·B·D,       |
    |              |                | piece by piece              | overlaps the previous piece |
    |              |                |                             | and, `early`, recomputation |
    | weight grad. | dw = dyᵀ · x   | → [D, F/tp]                 | none                        |

    A deferred weight gradient gathers dy again. Without sequence parallelism (g in Shoeybi et al.)
    forward all-reduces y, S·B·D, also piece by piece; dy is whole, so backward sends nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        node: Any,
        tp: TensorParallel,
        matmul: LinearProducts,
        gradient: WeightGradient,
        early: bool,
        weight: Tensor,
    ) -> Tensor:
        ctx.node, ctx.tp, ctx.matmul, ctx.gradient, ctx.early = node, tp, matmul, gradient, early
        if node is None:
            ctx.save_for_backward(x, weight)
        if tp.size == 1:
            return matmul.forward(x, weight)
        terms = x.new_empty((*x.shape[:-1], weight.shape[0]))  # [S, B, D], to be summed over tp
        y = torch.empty_like(terms[: len(x) // tp.size]) if tp.sequence_parallel else terms
        reducing = []
        for xi, part, yi in zip(*(t.chunk(tp.pieces) for t in (x, terms, y)), strict=True):
            matmul.forward(xi, weight, out=part)
            reducing.append(start_reduce_(part, tp.group, tp.sequence_parallel, out=yi))
        for each in reducing:
            each.wait()
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tp, matmul, dw, mine = ctx.tp, ctx.matmul, None, dy
        gathers = tp.size > 1 and tp.sequence_parallel
        start = partial(start_all_gather, dy, tp.group, tp.pieces)
        gathering_dy = start() if gathers and ctx.early else None
        x, weight = (ctx if ctx.node is None else ctx.node).saved_tensors  # may recompute the block
        if gathers:
            gathering_dy = gathering_dy or start()
            dx = dy.new_empty(x.shape)
            for piece, out in zip(gathering_dy.pieces(), dx.chunk(tp.pieces), strict=True):
                matmul.input_gradient(piece, weight, out=out)
            dy = gathering_dy.wait()  # [S, B, D]
        else:
            dx = matmul.input_gradient(dy, weight)
        add = partial(add_products, [ctx.gradient], [matmul])
        if not ctx.gradient.is_deferred:
            (dw,) = add(x, dy)
        else:
            # Until the job runs, it keeps only this rank's part of dy, which it then gathers again.
            gather_over = (ONE_RANK, tp.group if gathers else ONE_RANK)
            ctx.gradient.defer(Job(add, (x.detach(), mine), gather_over, tp.pieces))
        return dx, None, None, None, None, None, dw


class KeepingLayer(KeepsOutputs, Layer):
    """A linear layer of a block whose column-parallel outputs a recomputation may keep."""


class ParallelLinear(KeepingLayer):
    """The base of the two linear layers with weight [out, in] that tp shards. `matmul` computes
    their products."""

    def __init__(self, tp: TensorParallel, matmul: LinearProducts) -> None:
        super().__init__(tp)
        self.matmul = matmul

    def compute_with(self, matmul: LinearProducts) -> None:
        """Let this object compute the products from now on."""
        self.matmul = matmul


class ColumnParallelLinear(ParallelLinear):
    """A linear layer with weight [out, in], whose output rows are sharded over tp at the boundaries
    of `atoms`. `column_parallel` computes several such layers that read one input.

    If there are fewer atoms than tp ranks (key/value heads), every rank holds the whole weight,
    and each group of tp / atoms ranks computes the same slice of the output. A rank's gradient
    covers only this slice, and only the contribution of the rank's own query heads: it is a partial
    sum (parallel/partial.py).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        atoms: Atoms,
        tp: TensorParallel,
        matmul: LinearProducts,
        initial: Normal,
        copy_of: str | None = None,
        group: Group = MATRIX,
    ) -> None:
        super().__init__(tp, matmul)
        atoms.check(tp.size)
        shared = atoms.count < tp.size
        rows = None
        if shared:
            width, mine = out_features // atoms.count, atoms.of(tp.size, tp.rank)
            rows = slice(mine.start * width, mine.stop * width)
        shape, placement = (out_features, in_features), Replicate() if shared else Shard(0)
        weight = WeightSpec(
            shape, placement, initial, group, gradient_is_partial=shared, copy_of=copy_of
        )
        self.add_weight(weight, rows=rows)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [S/tp, B, in] (without sequence parallelism [S, B, in]) to [S, B, out/tp]."""
        return column_parallel(x, self)[0]


def column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Map x [S/tp, B, in] (without sequence parallelism [S, B, in]) to one [S, B, out/tp] for each
    of `layers`, gathering x only once."""
    weights = [layer.local_weight() for layer in layers]
    matmuls = [layer.matmul for layer in layers]
    gradients = [layer.gradient for layer in layers]
    tp, kept = layers[0].tp, layers[0].kept
    return ColumnParallelFunction.apply(x, tp, matmuls, gradients, kept, None, *weights)


class RowParallelLinear(ParallelLinear):
    """A linear layer with weight [out, in], whose input columns are sharded over tp:
    x [S, B, in/tp] → [S/tp, B, out] (without sequence parallelism [S, B, out]), summed over tp."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        matmul: LinearProducts,
        initial: Normal,
    ) -> None:
        super().__init__(tp, matmul)
        shape = out_features, in_features
        self.add_weight(WeightSpec(shape, Shard(1), initial, MATRIX, gradient_is_partial=False))

    def forward(self, x: Tensor) -> Tensor:
        return row_parallel(x, self, self.matmul)


def row_parallel(x: Tensor, layer: KeepingLayer, matmul: LinearProducts) -> Tensor:
    """Multiply by the layer's weight in a way that a recomputation ends before the product."""
    weight, node = layer.local_weight(), None  # that of `KeepForBackward`, which has both
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the compiler decides
        x = KeepForBackward.apply(x, weight)
        node = x.grad_fn
    early = layer.kept is not None  # no input is gathered again, which dy would delay
    return RowParallelFunction.apply(x, node, layer.tp, matmul, layer.gradient, early, weight)


class EmbeddingFunction(torch.autograd.Function):
    """Look up tokens in the rows `held` of a weight, with zeros for the tokens of other ranks, and
    sum over tp (with sequence parallelism g-bar in Korthikanti et al., else g in Shoeybi et al.).

    | pass         | computes             | local shapes             | communication over tp      |
    |--------------|----------------------|--------------------------|----------------------------|
    | forward      | y = Σ weight[tokens] | [S, B] → [S/tp, B, D]    | reduce-scatter y: S·B·D    |
    | weight grad. | dw[tokens] += dy     | [S/tp, B, D] → [V/tp, D] | all-gather dy: S·B·D       |

    Without sequence parallelism forward all-reduces y, [S, B, D]; dy is whole, so backward sends
    nothing. The weight gradient is formed in backward or in a deferred job.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        held: range,
        tp: TensorParallel,
        gradient: WeightGradient,
        weight: Tensor,
    ) -> Tensor:
        elsewhere = (tokens < held.start) | (tokens >= held.stop)
        rows = (tokens - held.start).masked_fill(elsewhere, 0)
        ctx.tp, ctx.gradient = tp, gradient
        ctx.save_for_backward(rows, elsewhere)
        y = functional.embedding(rows, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        return start_reduce_(y, tp.group, tp.sequence_parallel, tp.pieces).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, elsewhere = ctx.saved_tensors
        tp, mask = ctx.tp, elsewhere.unsqueeze(-1)
        if tp.size > 1 and tp.sequence_parallel:  # what is gathered may be changed in place
            dy = start_all_gather(dy, tp.group, tp.pieces).wait().masked_fill_(mask, 0)
        else:
            dy = dy.masked_fill(mask, 0)
        return None, None, None, None, ctx.gradient.add_lookup(dy, rows)


class VocabParallelEmbedding(Layer):
    """An embedding with weight [V, D], whose rows are sharded over tp (unevenly if tp does not
    divide V): tokens [S, B] → [S/tp, B, D]."""

    def __init__(self, rows: Atoms, dim: int, tp: TensorParallel, initial: Normal) -> None:
        super().__init__(tp)
        rows.check(tp.size)
        self.rows = rows.of(tp.size, tp.rank)
        shape = rows.count, dim
        self.add_weight(WeightSpec(shape, Shard(0), initial, EMBEDDING, gradient_is_partial=False))

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.local_weight()
        return EmbeddingFunction.apply(tokens, self.rows, self.tp, self.gradient, weight)
