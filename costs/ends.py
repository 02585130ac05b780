"""The two ends of a recorded unit: its input and the gradient of its output, which a neighbouring
unit would allocate, and the moments at which backward begins and ends. Also the moment at which it
ends for a module inside of a unit."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from costs.as_on_gpu import DEVICE


class Begin(torch.autograd.Function):
    """Allocates the unit's input in forward; in backward, reports its gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Callable[[Tensor], None]) -> Tensor:
        ctx.received = received
        return torch.empty_like(leaf)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[None, None]:
        ctx.received(dx)
        return None, None


class End(torch.autograd.Function):
    """Allocates the gradient of the unit's output in backward, which only autograd then holds."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, sent: Callable[[Tensor], None]) -> Tensor:
        ctx.shape, ctx.dtype, ctx.sent = y.shape, y.dtype, sent
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        dy = torch.empty(ctx.shape, dtype=ctx.dtype, device=DEVICE)
        ctx.sent(dy)
        return dy, None


class Entrance(torch.autograd.Function):
    """x, unchanged, at the beginning of a module's forward; in backward, reports its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Callable[[], None]) -> Tensor:
        ctx.received = received
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        ctx.received()
        return dx, None
