"""What selective activation checkpointing keeps of a block under tensor parallelism: the outputs of
its column-parallel layers.

torch's selective checkpointing keeps the result of an operation, and in the recomputation returns
it instead of running the operation again. A column-parallel layer is more than one operation: it
gathers its input piece by piece, and writes each piece's products into its outputs. So the layer as
a whole is treated in this way: the recomputation neither gathers nor multiplies.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

Outputs = tuple[Tensor, ...]


class KeptOutputs:
    """Shared by the column-parallel layers of one block. Outside of its contexts it does nothing.

    As in torch's own, a block must call its layers in the same order again, and nothing may modify
    an output in place.
    """

    def __init__(self) -> None:
        # of the forward that runs: for each call of `of`, (output, its version); None: none runs
        self._kept: deque[list[tuple[Tensor, int]]] | None = None
        self._again = False  # whether it is a recomputation

    def of(self, compute: Callable[[], Outputs]) -> Outputs:
        """The result of `compute`, which the recomputation does not call."""
        if self._kept is None:
            return compute()
        if not self._again:
            outputs = compute()
            # detached: the outputs become part of autograd's graph, which must not be kept
            self._kept.append([(y.detach(), y._version) for y in outputs])
            return outputs
        found = self._kept.popleft()
        if any(y._version != version for y, version in found):
            raise RuntimeError("a kept output of a column-parallel layer was modified in place")
        return tuple(y for y, _ in found)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For one micro-batch: a context for the block's forward, and one for its recomputation."""
        kept: deque[list[tuple[Tensor, int]]] = deque()
        return self._during(kept, again=False), self._during(kept, again=True)

    @contextmanager
    def _during(self, kept: deque[list[tuple[Tensor, int]]], again: bool) -> Iterator[None]:
        self._kept, self._again = kept, again
        try:
            yield
        finally:  # the recomputation ends with an exception when backward has all it needs
            self._kept = None
