"""What every layer with weights is built on: how tp cuts it, and this rank's tensor of each weight.

A weight is a DTensor that carries its placement on tp: FSDP2 shards it further, checkpoints store
the global tensor, and the gradient norm knows what is a replica. Forward and backward compute with
the local tensor, which `Layer.local_weight` opens.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from errors import UserError
from parallel.deferred import Destination, ReadyGradient, WeightGradientQueue
from parallel.memory import GRADIENTS, tell
from parallel.parameter import WeightSpec
from parallel.placement import as_dtensor_like, chunk_range, local_part


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis, as a layer sees it. Without a mesh its weights are this rank's parts, in shapes
    only: enough to ask a layer what it holds and, in any process, what it would do (costs/)."""

    size: int = 1
    rank: int = 0
    sequence_parallel: bool = True  # the residual stream is [S/tp, B, D] on a rank, else [S, B, D]
    mesh: DeviceMesh | None = None
    group: ProcessGroup = None  # type: ignore[assignment]  # of the mesh

    @classmethod
    def of(cls, mesh: DeviceMesh, sequence_parallel: bool) -> "TensorParallel":
        """Of this rank's tp group."""
        return cls(mesh.size(), mesh.get_local_rank(), sequence_parallel, mesh, mesh.get_group())


@dataclass(frozen=True)
class Pieces:
    """What a dimension of a weight consists of, heads for example: tp cuts only between them."""

    count: int
    key: str  # of the configuration
    uneven: bool = False  # ranks may have different numbers of them (rows of a vocabulary)
    can_share: bool = False  # where there are fewer than ranks, several ranks may have the same one

    def of(self, tp: int, rank: int) -> range:
        """Those that a rank computes with."""
        if self.count < tp and self.can_share:
            return range(rank * self.count // tp, rank * self.count // tp + 1)
        return chunk_range(self.count, tp, rank)

    def check(self, tp: int) -> None:
        """Raises UserError where they cannot be cut for `tp` ranks."""
        if self.uneven:
            if not self.of(tp, tp - 1):
                why = f"{self.key}={self.count} leaves the last rank no row"
                raise UserError("parallel.tp", tp, why, "use fewer")
        elif self.count % tp and (tp % self.count or not self.can_share):
            of_count = [t for t in range(1, 65) if self.count % t == 0]
            if not self.can_share:
                why = f"does not divide {self.key}={self.count}"
                raise UserError("parallel.tp", tp, why, f"choose one of {of_count}")
            why = f"must divide {self.key}={self.count}, or be a multiple of it (heads are then "
            fits = sorted({*of_count, *range(self.count, 65, self.count)})
            raise UserError("parallel.tp", tp, why + "replicated)", f"choose one of {fits}")


class Layer(nn.Module):
    """A module with weights of its own."""

    weight: nn.Parameter
    queue: WeightGradientQueue | None = None  # where a schedule splits backward (deferred.py)

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.weights: dict[
            str, WeightSpec
        ] = {}  # FSDP2 replaces parameters; what they are stays here

    def add_weight(self, weight: WeightSpec, name: str = "weight") -> None:
        """Make a parameter on the meta device: this tp rank's part of `weight`."""
        tp, shape, local_shape = self.tp, torch.Size(weight.shape), list(weight.shape)
        if isinstance(weight.placement, Shard):
            dim = weight.placement.dim
            local_shape[dim] = len(chunk_range(shape[dim], tp.size, tp.rank))
        local = torch.empty(local_shape, device="meta")
        if tp.mesh is not None:
            stride = torch.empty(shape, device="meta").stride()
            placements = [weight.placement]
            local = DTensor.from_local(
                local, tp.mesh, placements, run_check=False, shape=shape, stride=stride
            )
        self.register_parameter(name, nn.Parameter(local))
        self.weights[name] = weight

    def local_weight(self) -> Tensor:
        """This rank's tensor of `weight`. Its gradient becomes the weight's; where the queue
        defers, it waits there."""
        weight = self.weight
        if torch.compiler.is_compiling():
            return local_part(weight)  # the compiler knows this one, and pays its price once
        if not torch.is_grad_enabled() and isinstance(weight, DTensor):
            # Without the view that `to_local` makes: it took a fifth of a small model's time for a
            # generated token.
            return weight._local_tensor
        return LocalTensor.apply(weight, self.queue)


def share_queue(stage: nn.Module) -> WeightGradientQueue:
    """A queue for all layers of `stage`."""
    queue = WeightGradientQueue()
    for module in stage.modules():
        if isinstance(module, Layer):
            module.queue = queue
    return queue


class LocalTensor(torch.autograd.Function):
    """This rank's tensor of a DTensor weight; its gradient becomes the weight's, placed alike.

    `DTensor.to_local` does the same through the dispatcher, at several times the host time per
    weight and micro-batch. Here, where gradients stay in the weight between micro-batches (float32
    computing), all but the first are added to the local tensor at once; where FSDP takes each away
    to sum it in a wider dtype (bfloat16), each is the first. What is added to was made by the first
    call of this backward, from a tensor that every caller has just made, so nobody else holds it.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, queue: WeightGradientQueue | None) -> Tensor:
        ctx.weight, ctx.queue = weight, queue
        ctx.set_materialize_grads(False)  # a deferred gradient is None here, and not zeros
        return local_part(weight)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> tuple[Tensor | None, None]:
        weight = ctx.weight
        if dw is None:
            return None, None
        tell(dw, GRADIENTS)
        if ctx.queue is not None and ctx.queue.is_deferring:
            ctx.queue.add(ReadyGradient(dw, Destination(weight)))
            return None, None
        if weight.grad is not None:
            local_part(weight.grad).add_(dw)
            return None, None
        return as_dtensor_like(dw, weight), None
