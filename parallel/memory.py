"""The categories of memory use, and a way for code to state the category of a tensor.

A training run registers no listener; its report counts what model, FSDP and optimizer hold
(runtime/metrics/memory_report.py). The planner counts by these categories (costs/, tools/plan/).
The rehearsal, which sees every storage, registers a listener (tools/rehearse/memory.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

WEIGHTS, MOMENTS = "sharded weights", "optimizer state"
GATHERED, GRADIENTS, SHARDED_GRADIENTS = "gathered weights", "whole gradients", "sharded gradients"
GATHERING, REDUCING = "buffers of gathers", "buffers of reductions"
ACTIVATIONS, DEFERRED = "activations", "kept for weight gradients"
MESSAGES, TEMPORARY = "messages of the pipeline", "temporary"
CATEGORIES = {
    WEIGHTS, MOMENTS, GATHERED, GRADIENTS, SHARDED_GRADIENTS, GATHERING, REDUCING, ACTIVATIONS,
    DEFERRED, MESSAGES, TEMPORARY,
}  # fmt: skip

_listeners: list[Callable[[Tensor, str], None]] = []


def tell(tensor: Tensor, category: str) -> None:
    """State that `tensor` belongs to `category` from now on."""
    for listener in _listeners:
        listener(tensor, category)


@contextmanager
def listening(listener: Callable[[Tensor, str], None]) -> Iterator[None]:
    """Pass every `tell` inside this context to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
