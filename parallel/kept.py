"""What activation checkpointing keeps of a block as the result of several operations: the outputs
of column-parallel layers, and what experts are sent (only selective checkpointing), and which
experts each token has chosen, with the routes to them (always).

torch's selective checkpointing keeps the result of an operation, and in the recomputation returns
it instead of running the operation again. A column-parallel layer is more than one operation: it
gathers its input piece by piece, and writes each piece's products into its outputs. So the layer as
a whole is treated in this way: the recomputation neither gathers nor multiplies.

The choice of experts must be kept: numbers that are computed again may differ in their last bits,
and a token would then go to another expert in backward.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch import Tensor

Outputs = tuple[Tensor, ...]
T = TypeVar("T")


class KeptOutputs:
    """Shared by layers of one block. Outside of its contexts it does nothing.

    As in torch's own, a block must call its layers in the same order again, and nothing may modify
    an output in place.
    """

    def __init__(self) -> None:
        # of the forward that runs: the result of each call of `once`; None: none runs
        self._kept: deque[Any] | None = None
        self._again = False  # whether it is a recomputation
        self._outputs = True  # whether `of` keeps

    @property
    def has_outputs(self) -> bool:
        """Whether this is a recomputation, in which `of` computes nothing."""
        return self._kept is not None and self._again and self._outputs

    def of(self, compute: Callable[[], Outputs]) -> Outputs:
        """The result of `compute`, which the recomputation does not call, if outputs are kept."""
        if self._kept is None or not self._outputs:
            return compute()
        if not self._again:
            outputs = compute()
            # detached: the outputs become part of autograd's graph, which must not be kept
            self._kept.append([(y.detach(), y._version) for y in outputs])
            return outputs
        found = self._kept.popleft()
        if any(y._version != version for y, version in found):
            raise RuntimeError("a kept output of a layer was modified in place")
        return tuple(y for y, _ in found)

    def once(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, which the recomputation does not call. It must have no tensor
        that autograd follows, and `compute` must run no product that selective checkpointing keeps:
        torch numbers these, and the recomputation would have one less."""
        if self._kept is None:
            return compute()
        result: T = self._kept.popleft() if self._again else compute()
        if not self._again:
            self._kept.append(result)
        return result

    def contexts(self, outputs: bool = True) -> list[AbstractContextManager[None]]:
        """For one micro-batch: a context for the block's forward, and one for its recomputation.
        Without `outputs`, only `once` keeps."""
        kept: deque[Any] = deque()
        return [self._during(kept, again, outputs) for again in (False, True)]

    @contextmanager
    def _during(self, kept: deque[Any], again: bool, outputs: bool) -> Iterator[None]:
        self._kept, self._again, self._outputs = kept, again, outputs
        try:
            yield
        finally:  # the recomputation ends with an exception when backward has all it needs
            self._kept = None


class KeepsOutputs:
    """A part of a block whose outputs may be kept."""

    kept: KeptOutputs | None = None  # None: they are not

    def keep_in(self, kept: KeptOutputs) -> None:
        self.kept = kept
