"""The base of every layer with weights: how tp or ep shards them, and this rank's local tensor.

A weight is a DTensor that carries its placement on tp, so FSDP2 can shard it further, checkpoints
can store the global tensor, and the gradient norm can tell replicas from shards. Forward and
backward compute with the local tensor, which `Layer.local_weight` returns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from errors import UserError
from parallel.mesh import Axis, Mesh
from parallel.parameter import WeightSpec
from parallel.placement import as_dtensor_like, chunk_range, local_part
from parallel.weight_gradient import TO_AUTOGRAD, WeightGradient


@dataclass(frozen=True)
class TensorParallel(Axis):
    """The tp axis, as a layer sees it."""

    sequence_parallel: bool = True  # the residual stream is [S/tp, B, D] on a rank, else [S, B, D]
    pieces: int = 1  # of the sequence: one is computed while others are sent (collectives.py)

    @classmethod
    def of(cls, mesh: Mesh, sequence_parallel: bool, pieces: int = 1) -> "TensorParallel":
        return cls(**vars(mesh.tp), sequence_parallel=sequence_parallel, pieces=pieces)

    def local_length(self, length: int) -> int:
        """The number of positions, of so many, in the residual stream of one rank."""
        return length // self.size if self.sequence_parallel else length


@dataclass(frozen=True)
class Atoms:
    """The indivisible parts of a weight's dimension, for example heads: tp cuts only between
    them."""

    count: int
    key: str  # the configuration key that sets `count`
    uneven: bool = False  # ranks may have different numbers of them (rows of a vocabulary)
    can_share: bool = False  # if there are fewer than ranks, ranks may share one

    def of(self, tp: int, rank: int) -> range:
        """The atoms that `rank` computes with."""
        if self.count < tp and self.can_share:
            return range(rank * self.count // tp, rank * self.count // tp + 1)
        return chunk_range(self.count, tp, rank)

    def check(self, tp: int) -> None:
        """Raise UserError if the atoms cannot be split over `tp` ranks."""
        if self.uneven:
            if not self.of(tp, tp - 1):
                why = f"with {self.key}={self.count} the last tp rank would have no row"
                raise UserError("parallel.tp", tp, why, "use a smaller number")
        elif self.count % tp and (tp % self.count or not self.can_share):
            fits = {t for t in range(1, 65) if self.count % t == 0}
            why = f"does not divide {self.key}={self.count}"
            if self.can_share:
                fits |= {*range(self.count, 65, self.count)}
                why += ", and is no multiple of it (which would replicate heads)"
            raise UserError("parallel.tp", tp, why, f"choose one of {sorted(fits)}")


class Layer(nn.Module):
    """The base class of modules that own a weight: one, called `weight`, on which its gradient
    (weight_gradient.py) and costs rely. A bias, or a second matrix, is a layer of its own.

    A layer is complete when it is built. What others may change later, they change by its methods.
    """

    weight: nn.Parameter
    spec: WeightSpec

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self._gradient = TO_AUTOGRAD

    def add_weight(
        self, weight: WeightSpec, over: Axis | None = None, rows: slice | None = None
    ) -> None:
        """Register the parameter on the meta device: this rank's part of `weight`, which is placed
        over the axis `over` (None: tp). `rows`: those of this part that the layer computes with;
        None: all."""
        axis, shape, local_shape = over or self.tp, torch.Size(weight.shape), list(weight.shape)
        if isinstance(weight.placement, Shard):
            dim = weight.placement.dim
            local_shape[dim] = len(chunk_range(shape[dim], axis.size, axis.rank))
        local = torch.empty(local_shape, device="meta")
        if axis.mesh is not None:
            stride = torch.empty(shape, device="meta").stride()
            placements = [weight.placement]
            local = DTensor.from_local(
                local, axis.mesh, placements, run_check=False, shape=shape, stride=stride
            )
        self.weight = nn.Parameter(local)
        self.spec = weight  # kept here because FSDP2 replaces the parameters
        self._gradient = WeightGradient(local_shape, rows)

    @property
    def gradient(self) -> WeightGradient:
        """The gradient of the weight; in compiled code, autograd's."""
        return TO_AUTOGRAD if torch.compiler.is_compiling() else self._gradient

    def use_weight(self, weight: nn.Parameter) -> None:
        """Compute with this copy of the weight from now on. (FSDP exchanges it, too.)"""
        self.weight = weight

    def local_weight(self) -> Tensor:
        """This tp rank's local tensor of `weight`, or the `rows` of it with which it computes. Its
        gradient becomes that of the weight."""
        weight, rows = self.weight, self._gradient.rows
        if torch.compiler.is_compiling():
            local = local_part(weight)  # the compiler can trace `to_local`, at a cost paid once
        elif not torch.is_grad_enabled() and isinstance(weight, DTensor):
            # This avoids the view that `to_local` creates, which took a fifth of a small model's
            # time per generated token.
            local = weight._local_tensor
        else:
            return LocalTensor.apply(weight, self.gradient)
        return local if rows is None else local[rows]


def layers_of(stage: nn.Module) -> list[Layer]:
    return [module for module in stage.modules() if isinstance(module, Layer)]


def gradients_of(stage: nn.Module) -> list[WeightGradient]:
    return [layer.gradient for layer in layers_of(stage)]


class LocalTensor(torch.autograd.Function):
    """This rank's local tensor of a DTensor weight, or the rows of it that the gradient covers. Its
    gradient becomes that of the weight, with the same placement.

    `DTensor.to_local` does the same through the dispatcher, at several times the host time per
    weight and micro-batch. A gradient may become the sum of gradients itself: nothing else refers
    to it, because its producer has just created it.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, gradient: WeightGradient) -> Tensor:
        ctx.weight, ctx.gradient = weight, gradient
        ctx.set_materialize_grads(False)  # a gradient that went elsewhere stays None
        # A tensor of its own: with torch 2.11 `to_local` gives the one that the weight holds, which
        # would then lead to this node and back to the weight, and never be freed.
        local = local_part(weight).detach()
        return local if gradient.rows is None else local[gradient.rows]

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, None]:
        if dw is not None:
            dw = ctx.gradient.add(dw)
        if dw is None:
            return None, None
        if ctx.gradient.rows is not None:
            rows, dw = dw, dw.new_zeros(ctx.gradient.shape)
            dw[ctx.gradient.rows] = rows
        return as_dtensor_like(dw, ctx.weight), None
