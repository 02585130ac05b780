"""What is put around the products of a rank's linear layers, to time or check them.

Every linear layer has an object that computes its three products (model/matmul.py). Nothing is sent
or waited for inside one, and most of a step's operations are in them. So they show what a rank's
own machine does, whatever its communication with others.

Not covered: the grouped products of experts, whose sizes depend on the tokens; attention, whose
work depends on the documents; and layers that torch.compile has traced, because another object in a
layer would have the compiler trace it again.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from parallel.tensor import ParallelLinear
from parallel.weight_gradient import LinearProducts
from training.step import TrainStep

Compute = Callable[[], Tensor]
Inputs = tuple[Tensor | None, ...]
# Called with the layer's name, the kind of a product, what computes it, and its inputs; returns its
# result. An input that the result is added to is the last one; then it is also the result.
Around = Callable[[str, str, Compute, Inputs], Tensor]


def linear_layers(train: TrainStep) -> dict[str, ParallelLinear]:
    """This rank's layers whose products can be wrapped, by name."""
    if train.config.train.compile:
        return {}
    return {
        name: layer
        for stage in train.stages.values()
        for name, layer in stage.named_modules()
        if isinstance(layer, ParallelLinear)
    }


def wrap(layers: dict[str, ParallelLinear], around: Around) -> Callable[[], None]:
    """Call `around` for each product of these layers. Returns a function that ends that."""
    before = {name: layer.matmul for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.compute_with(_Wrapped(before[name], name, around))

    def unwrap() -> None:
        for name, layer in layers.items():
            layer.compute_with(before[name])

    return unwrap


class _Wrapped:
    """Products that call another object's inside `around`."""

    def __init__(self, inner: LinearProducts, name: str, around: Around) -> None:
        self.inner, self.name, self.around = inner, name, around

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        compute = partial(self.inner.forward, x, weight, out)
        return self.around(self.name, "forward", compute, (x, weight))

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        compute = partial(self.inner.input_gradient, dy, weight, into, out)
        return self.around(self.name, "input_gradient", compute, (dy, weight, into))

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        compute = partial(self.inner.weight_gradient, dy, x)
        return self.around(self.name, "weight_gradient", compute, (dy, x))

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        compute = partial(self.inner.add_weight_gradient, dy, x, into, dtype)
        return self.around(self.name, "weight_gradient", compute, (dy, x, into))
