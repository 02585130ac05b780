"""What is put around the products of a rank's linear layers, to time, check or disturb them.

Every linear layer has an object that computes its three products (model/matmul.py). Nothing is sent
or waited for inside one, and most of a step's operations are in them. So they show what a rank's
own machine does, whatever its communication with others.

Not covered: the grouped products of experts, whose sizes depend on the tokens; attention, whose
work depends on the documents; and layers that torch.compile has traced, because another object in a
layer would have the compiler trace it again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.layer import Layer
from parallel.weight_gradient import LinearProducts
from training.step import TrainStep

Compute = Callable[[], Tensor]


class Wrapped:
    """Products that call another object's. A subclass overrides `around`."""

    def __init__(self, inner: LinearProducts, name: str) -> None:
        self.inner, self.name = inner, name  # name: of the layer

    def around(self, kind: str, compute: Compute, *inputs: Tensor | None) -> Tensor:
        """Return the result of `compute`, the product `kind` of `inputs`. An input that it is added
        to is the last one; then it is also the result."""
        raise NotImplementedError

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return self.around("forward", lambda: self.inner.forward(x, weight, out), x, weight)

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        def compute() -> Tensor:
            return self.inner.input_gradient(dy, weight, into, out)

        return self.around("input_gradient", compute, dy, weight, into)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.around("weight_gradient", lambda: self.inner.weight_gradient(dy, x), dy, x)

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        def compute() -> Tensor:
            return self.inner.add_weight_gradient(dy, x, into, dtype)

        return self.around("weight_gradient", compute, dy, x, into)


def linear_layers(train: TrainStep) -> dict[str, Layer]:
    """This rank's layers whose products can be wrapped, by name."""
    if train.config.train.compile:
        return {}
    return {
        name: layer
        for stage in train.stages.values()
        for name, layer in stage.named_modules()
        if isinstance(layer, Layer) and hasattr(layer, "matmul")
    }


class Wrapping:
    """Wraps the products of layers, for a time: between `install` and `remove`."""

    def __init__(
        self, layers: dict[str, Layer], wrap: Callable[[LinearProducts, str], Wrapped]
    ) -> None:
        self.layers, self.wrap = layers, wrap
        self._before: dict[str, LinearProducts] = {}

    def install(self) -> None:
        for name, layer in self.layers.items():
            self._before[name] = layer.matmul  # type: ignore[assignment]
            layer.matmul = self.wrap(layer.matmul, name)  # type: ignore[arg-type,assignment]

    def remove(self) -> None:
        for name, before in self._before.items():
            self.layers[name].matmul = before  # type: ignore[assignment]
        self._before = {}


@contextmanager
def wrapped(
    layers: dict[str, Layer], wrap: Callable[[LinearProducts, str], Wrapped]
) -> Iterator[None]:
    """`wrap` the products of the layers in the enclosed computation."""
    wrapping = Wrapping(layers, wrap)
    wrapping.install()
    try:
        yield
    finally:
        wrapping.remove()
