"""Expert parallelism: each rank holds some of the experts of a layer. A router makes a `Choice`, a
dispatch (dispatch/) brings the rows of each expert together, and their results back.

All ranks of dp_shard × cp × tp have different tokens, and ep is a part of them (axes.py). So the
gradient of an expert covers all tokens of its ep group, and FSDP's plain sum over efsdp and
ep_replicate adds the rest: no factor is needed.

An expert is whole on its rank, so its linear layers use the functions of tensor parallelism
(tensor.py) as over one rank; what differs are the products, grouped by expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard

from parallel.asynchronous import Starts
from parallel.layer import TensorParallel
from parallel.mesh import Axis, Mesh
from parallel.parameter import MATRIX, Normal, WeightSpec
from parallel.tensor import ColumnParallelFunction, KeepingLayer, row_parallel
from parallel.weight_gradient import LinearProducts

WHOLE = TensorParallel(sequence_parallel=False)


@dataclass(frozen=True)
class ExpertParallel(Axis):
    """The ep axis, as a layer of experts sees it."""

    # The groups over which a sequence is split, and the number of its parts.
    sequence: tuple[ProcessGroup, ...] = ()
    parts: int = 1
    dispatch: str = "all_to_all"  # how tokens reach their experts: a file of dispatch/

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        cp, tp = mesh.cp, mesh.tp
        return cls(**vars(mesh.ep), sequence=(cp.group, tp.group), parts=cp.size * tp.size)


class Choice(NamedTuple):
    """The experts that a router has chosen for this rank's T tokens, in one layer."""

    experts: Tensor  # [T, k] int64
    weights: Tensor  # [T, k], in at least float32; with a gradient
    counts: Tensor  # [B, X] int64: how often the tokens of each sequence chose each expert


class Received(NamedTuple):
    """The rows that this rank's experts compute with, in one layer."""

    rows: Tensor  # [R, D], sorted by expert
    weights: Tensor  # [R]: the router's
    ends: Tensor  # int32 [X/ep]: where each expert's rows end, on the device
    leave: Starts  # takes the gradient of `rows`, and may start to send it


class ExpertLinear(KeepingLayer):
    """The weight [X, out, in] of a linear layer of all experts of a layer, of which each ep rank
    holds X/ep. `expert_linear` and `last_expert_linear` compute with it.

    Args:
        num_experts: X.
        grouped: the products of the rows of each expert, which end at the numbers it takes.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        ep: ExpertParallel,
        grouped: Callable[[Tensor], LinearProducts],
        initial: Normal,
    ) -> None:
        super().__init__(WHOLE)
        self.grouped = grouped
        shape = num_experts, out_features, in_features
        weight = WeightSpec(
            shape, Shard(0), initial, MATRIX, gradient_is_partial=False, is_expert=True
        )
        self.add_weight(weight, over=ep)


def expert_linear(
    rows: Tensor, ends: Tensor, leave: Starts, *layers: ExpertLinear
) -> tuple[Tensor, ...]:
    """Map rows [R, in], those of each expert together, to one [R, out] for each of `layers`. Each
    expert's rows end where `ends` (int32 [X/ep]) says. Backward calls `leave` with the gradient of
    the rows before it forms those of the weights, which hide its way back."""
    weights = [layer.local_weight() for layer in layers]
    matmuls = [layer.grouped(ends) for layer in layers]
    gradients = [layer.gradient for layer in layers]
    kept = layers[0].kept
    return ColumnParallelFunction.apply(rows, WHOLE, matmuls, gradients, kept, leave, *weights)


def last_expert_linear(rows: Tensor, ends: Tensor, layer: ExpertLinear) -> Tensor:
    """Map rows [R, in] to [R, out]. A recomputation ends before this product."""
    return row_parallel(rows, layer, layer.grouped(ends))
