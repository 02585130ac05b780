"""The linear layers of experts: one weight [X, out, in] for all experts of a layer, of which each
ep rank holds X/ep, and grouped products of each expert's rows.

An expert is whole on its rank, so the functions of tensor parallelism (tensor.py) are used as over
one rank; what differs are the products.
"""

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import Shard

from parallel.expert import ExpertParallel
from parallel.kept import KeepsOutputs
from parallel.layer import Layer, TensorParallel
from parallel.parameter import MATRIX, Normal, WeightSpec
from parallel.tensor import ColumnParallelFunction, row_parallel
from parallel.weight_gradient import LinearProducts

WHOLE = TensorParallel(sequence_parallel=False)


class ExpertLinear(KeepsOutputs, Layer):
    """The weights [X, out, in] of a linear layer of all experts. `expert_linear` and
    `last_expert_linear` compute with it.

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
        weight = WeightSpec(
            shape=(num_experts, out_features, in_features),
            placement=Shard(0),
            initial=initial,
            group=MATRIX,
            gradient_is_partial=False,
            is_expert=True,
        )
        self.add_weight(weight, over=ep)


def expert_linear(rows: Tensor, ends: Tensor, *layers: ExpertLinear) -> tuple[Tensor, ...]:
    """Map rows [R, in], those of each expert together, to one [R, out] for each of `layers`. Each
    expert's rows end where `ends` (int32 [X/ep]) says."""
    weights = [layer.local_weight() for layer in layers]
    matmuls = [layer.grouped(ends) for layer in layers]
    gradients = [layer.gradient for layer in layers]
    y = ColumnParallelFunction.apply(rows, WHOLE, matmuls, gradients, layers[0].kept, *weights)
    return tuple(y)


def last_expert_linear(rows: Tensor, ends: Tensor, layer: ExpertLinear) -> Tensor:
    """Map rows [R, in] to [R, out]. A recomputation ends before this product."""
    return row_parallel(rows, layer.local_weight(), WHOLE, layer.grouped(ends), layer.gradient)
