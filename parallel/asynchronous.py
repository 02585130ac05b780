"""Collectives that autograd follows, started in one place of a layer and awaited in another. What
the layer computes between the two places runs while they travel, in forward and in backward:

    forward     x ──► start ─ ─ ─ ─ ─ ─ link ─ ─ ─ ─ ─ ─► wait ──► y
                        └────────── collective ────────────┘
                                (other computation)
                        ┌── collective of the gradients ───┐
    backward   dx ◄── wait  ◄ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─  start ◄── dy

    link = Start.apply(start, wait_for_gradients, x, …)
    …
    y, … = Wait.apply(link, wait, start_gradients)

The four functions belong to an object that holds what travels. autograd sees only the link, a
scalar without a value, by which y depends on x. (Several waits may have the same link.) The graph
refers to the object, which therefore must not refer to a tensor with a `grad_fn`, like the link:
the memory of such a cycle is freed late or never.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Starts = Callable[..., None]
Waits = Callable[[], tuple[Tensor, ...]]


class Start(torch.autograd.Function):
    """x, … → the link. Forward calls `start(x, …)`, and backward returns `wait_for_gradients()`."""

    @staticmethod
    def forward(ctx: Any, start: Starts, wait_for_gradients: Waits, *inputs: Tensor) -> Tensor:
        ctx.wait_for_gradients = wait_for_gradients
        ctx.set_materialize_grads(False)  # the link has none
        start(*inputs)
        return inputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.wait_for_gradients()


class Wait(torch.autograd.Function):
    """The link → y, …. Forward returns `wait()`, and backward calls `start_gradients(dy, …)`."""

    @staticmethod
    def forward(ctx: Any, link: Tensor, wait: Waits, start_gradients: Starts) -> tuple[Tensor, ...]:
        ctx.start_gradients = start_gradients
        return wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.start_gradients(*gradients)
        return None, None, None
