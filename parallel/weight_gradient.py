"""Where the gradient of a weight goes, and how it is summed over the micro-batches of a step.

A layer in isolation returns the gradients of its weights to autograd. In a training run each layer
has a `GradientSum` (from data.py or whole.py), to which the product dyᵀ · x adds:

    without   dw = dyᵀ · x in bfloat16, written and read again; total += dw in float32
    with      total = total + dyᵀ · x, in float32 inside the product, never rounded to bfloat16

This saves one pass over a stage's gradients in every micro-batch, and the memory for dw.
(Megatron-LM calls it gradient accumulation fusion.) Autograd then gets None. Gradients of norms,
routers and the embedding are formed in the dtype of the sum, and added. Only where there is no sum
(zero_stage 2 and 3, compiled code) are the gradients of each micro-batch rounded to bfloat16.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from parallel.memory import GRADIENTS, tell
from parallel.placement import as_dtensor_like, local_part


class LinearProducts(Protocol):
    """The three products of a linear layer. Each layer has its own object (model/matmul.py)."""

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]; written to `out` if given."""

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` or written to `out` if given."""

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """into + dyᵀ · x, summed in `dtype`; for dy [..., F] and x [..., D]."""


def sum_dtype(
    whole: bool, zero_stage: int, compute: torch.dtype, master: torch.dtype, reduce: torch.dtype
) -> torch.dtype | None:
    """The dtype in which gradients are summed over micro-batches; None: they are not, because each
    micro-batch's are reduced. `whole`: no rank shares the weights, so sums are not sent."""
    if whole:
        return torch.promote_types(reduce, master)
    return torch.promote_types(reduce, compute) if zero_stage < 2 else None


class GradientSum:
    """The sum of a weight's gradients over micro-batches, in `dtype`: the attribute `name` (None
    before a step's first gradient) of `holder`, or of the weight that forward used. (FSDP sums
    wider dtypes in an attribute of its own.)"""

    def __init__(self, dtype: torch.dtype, holder: Any = None, name: str = "grad") -> None:
        self.dtype, self.holder, self.name = dtype, holder, name

    def get(self, weight: nn.Parameter) -> Tensor | None:
        """This tp rank's part of the sum."""
        total = getattr(self._holder_for(weight), self.name)
        return None if total is None else local_part(total)

    def begin(self, weight: nn.Parameter, total: Tensor) -> None:
        """Make `total`, this tp rank's part, the sum."""
        tell(total, GRADIENTS)
        setattr(self._holder_for(weight), self.name, as_dtensor_like(total, weight))

    def _holder_for(self, weight: nn.Parameter) -> Any:
        return weight if self.holder is None else self.holder


class Destination(NamedTuple):
    """The weight that a gradient belongs to."""

    weight: nn.Parameter  # the weight that forward used; the gradient is of this tp rank's part
    rows: slice | None = None  # the rows of that part that the gradient covers; None: all
    matmul: LinearProducts | None = None  # the products, for a linear layer
    sum: GradientSum | None = None  # None: in isolation; deferred gradients then go to `.grad`

    def add(self, dw: Tensor, times: Tensor | None = None) -> None:
        """Add a gradient, or dw · times for a scalar tensor, to the sum. Nothing else may refer to
        dw: it may become the sum."""
        place = self.sum or GradientSum(self.weight.dtype)
        total = self._begun(place, dw)
        if total is None:
            dw = dw if times is None else dw.mul_(times)
            place.begin(self.weight, dw.to(place.dtype))
        else:
            total.add_(dw) if times is None else total.addcmul_(dw, times)

    def add_product(self, dy: Tensor, x: Tensor) -> Tensor | None:
        """Add dyᵀ · x to the sum, for dy [..., F] and x [..., D]; without a sum, return it."""
        assert self.matmul is not None
        if self.sum is None:
            return self.matmul.weight_gradient(dy, x)
        begun = self._begun(self.sum, dy)
        total = self.matmul.add_weight_gradient(dy, x, begun, self.sum.dtype)
        if begun is None:
            self.sum.begin(self.weight, total)
        return None

    def of_lookup(self, dy: Tensor, rows: Tensor) -> Tensor:
        """The gradient [V/tp, D], in the dtype of the sum, of a lookup of rows [S, B], for dy
        [S, B, D]."""
        dy = dy if self.sum is None else dy.to(self.sum.dtype)
        num_rows = local_part(self.weight).shape[0]
        return torch.ops.aten.embedding_dense_backward(dy, rows, num_rows, -1, False)

    def _begun(self, place: GradientSum, like: Tensor) -> Tensor | None:
        """The sum, or its `rows`, to which this gradient is added; a sum of rows begins with zeros
        (on the device of `like`). None: the gradient, the first, becomes the sum."""
        total = place.get(self.weight)
        if self.rows is None:
            return total
        if total is None:
            total = like.new_zeros(local_part(self.weight).shape, dtype=place.dtype)
            place.begin(self.weight, total)
        return total[self.rows]
