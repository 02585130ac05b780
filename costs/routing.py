"""How many rows a rank sends to the experts of others and receives for its own, where tensors have
no data.

The host reads these numbers from the device (`find_routes` in parallel/dispatch/all_to_all.py). For
tensors without data they are assumed. T·k rows leave each of the `ep` ranks:

    balanced       T·k arrive at each rank, as many from each other
    imbalance f    f · T·k arrive at this rank, and the other ranks share the rest

Where a division leaves a remainder, some numbers are larger by one, and the totals are exact.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from costs.as_on_gpu import DEVICE
from errors import UserError
from model.config import ModelConfig
from model.experts import Experts


def parts(total: int, number: int) -> list[int]:
    """`total` as a sum of `number` integers that differ by at most one."""
    return [(i + 1) * total // number - i * total // number for i in range(number)]


def check_imbalance(key: str, imbalance: float, model: ModelConfig, ep: int) -> None:
    """Raise UserError, which names `key`, if no rank can receive so many rows: a token goes to each
    of its experts at most once."""
    experts = model.find(Experts)
    largest = min(ep, experts.count / experts.per_token) if experts else 1.0
    if not 1.0 <= imbalance <= largest:
        why = "a rank receives this times its balanced share of rows, and the busiest receives "
        why += f"1 to {largest:g} times" if largest > 1 else "all: there is one rank"
        raise UserError(key, imbalance, why, f"give a number from 1 to {largest:g}")


class Routing(TorchFunctionMode):
    """A context in which this thread's dispatch, on tensors without data, reads these numbers.

    Args:
        rows: T·k, the rows that each rank sends.
        ep, rank: the number of ep ranks, and this one.
        imbalance: this rank receives so many times its balanced share.
    """

    def __init__(self, rows: int, ep: int = 1, rank: int = 0, imbalance: float = 1.0) -> None:
        super().__init__()
        self.rows, self.ep, self.rank = rows, ep, rank
        self.received = round(rows * imbalance)
        self.reads: Callable[[Tensor], None] = lambda _: None  # called when the host reads them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and args[0].device.type == DEVICE:
            numbers = [*self.send, *self.receive]  # in the order of `find_routes`
            if args[0].shape == (len(numbers),):
                self.reads(args[0])
                return numbers
        return func(*args, **(kwargs or {}))

    @property
    def send(self) -> list[int]:
        """To each rank."""
        mine = self.receive[self.rank]
        others = parts(self.rows - mine, self.ep - 1) if self.ep > 1 else []
        return [*others[: self.rank], mine, *others[self.rank :]]

    @cached_property
    def receive(self) -> list[int]:
        """From each rank."""
        received = parts(self.received, self.ep)
        return received[self.rank :] + received[: self.rank]
