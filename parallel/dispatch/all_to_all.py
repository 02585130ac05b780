"""Tokens travel to the ranks of their experts, and results back, by all-to-alls.

    4 experts, ep 2, each token to 2 experts          (rows: tokens, once for each chosen expert)

    rank 0   tokens a b      rows  a0 b1 | a2 b3    ─┐  all-to-all  ┌─►  rank 0: experts 0 and 1
    rank 1   tokens c d      rows  c1 d1 | c3 d2    ─┘              └─►  rank 1: experts 2 and 3

A rank sorts its rows by expert, so those for one rank are contiguous, sends them, and sorts what it
receives by expert again: each expert's rows are then contiguous for one grouped product. The
results return the same way, and each token's are summed. No token is dropped, so ranks receive
different numbers of rows, or none.

| pass     | what travels over ep, per layer         | bytes that leave a rank, of `b` each        |
|----------|-----------------------------------------|---------------------------------------------|
| forward  | counts of rows, for each expert         | 8 · X · (ep − 1) / ep                       |
|          | rows there, beside the router's weights | T·k · (D·b + 4) · (ep − 1) / ep if balanced |
|          | results back                            | T·k · D·b · (ep − 1) / ep                   |
| backward | gradients of results there, rows' back  | the same as the two rows above              |

T is the number of tokens of a rank, k of experts that a token chooses, X of experts. With `full`
and `full_but_attention`, the recomputation sends rows and weights there again. The router's weight
is multiplied between an expert's two products, so results need not be kept for its gradient.

The host must know how many rows it sends and receives, because it allocates them and because a
collective takes numbers, not tensors. With ep 1 it knows: all of them. Else it waits for these
2 · ep numbers, in `counts_on_host`: once per layer and forward. Backward and recomputation know
them already, because routes are kept (kept.py). (Kernels that need no such wait take buffers for
the worst case: DeepSeek's DeepEP.)

(Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668; dropless: Gale et al. 2022,
https://arxiv.org/abs/2211.15841; ep as a part of the other axes: Liu et al. 2025,
https://arxiv.org/abs/2504.14960.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.asynchronous import Start, Wait
from parallel.collectives import Pending, start_all_to_all
from parallel.dispatch import RowKernels, TokenDispatch, counts_on_host
from parallel.expert import Choice, ExpertParallel, Received


@dataclass(frozen=True)
class Routes:
    """Where the rows of one layer and micro-batch travel, seen from one rank."""

    order: Tensor  # [T·k]: the rows sorted by expert; row i is choice i % k of token i // k
    places: Tensor  # [T·k]: where `order` has each row
    k: int
    send: Sequence[int]  # rows to each rank
    receive: Sequence[int]  # rows from each rank
    local_order: Tensor | None  # received rows, sorted by expert; None: they are
    local_places: Tensor | None  # where `local_order` has each of them
    ends: Tensor  # int32 [X/ep]: of each expert's rows


def find_routes(choice: Choice, ep: ExpertParallel) -> Routes:
    """The routes of a choice. All ranks of the ep group call it."""
    order, mine = choice.experts.flatten().argsort(stable=True), choice.counts.sum(0)
    local = len(mine) // ep.size
    per_rank = [local] * ep.size
    theirs = start_all_to_all(mine, ep.group, per_rank, per_rank).wait().view(ep.size, -1)
    send = receive = [len(order)]
    if ep.size > 1:
        numbers = counts_on_host(torch.cat([mine.view(ep.size, -1).sum(1), theirs.sum(1)]))
        send, receive = numbers[: ep.size], numbers[ep.size :]
    local_order = local_places = None
    if ep.size > 1 and local > 1:  # the rows of a single expert are in order as they arrive
        experts = torch.arange(local, device=mine.device).repeat(ep.size)
        experts = experts.repeat_interleave(theirs.flatten(), output_size=sum(receive))
        local_order = experts.argsort(stable=True)
        local_places = places_in(local_order)
    places, k = places_in(order), choice.experts.shape[1]
    ends = theirs.sum(0).cumsum(0).to(torch.int32)
    return Routes(order, places, k, send, receive, local_order, local_places, ends)


class Dispatch(TokenDispatch):
    def send(self, x: Tensor, choice: Choice) -> "Sent":
        routes = self.kept.once(lambda: find_routes(choice, self.ep))
        rows = Rows(routes, self.ep.group, self.kernels)

        def start(*tensors: Tensor) -> None:
            if not self.kept.has_outputs:
                rows.start_there(*tensors)

        return rows, Start.apply(start, rows.back, x, choice.weights)

    def receive(self, sent: "Sent") -> Received:
        rows, link = sent
        x, weights = Wait.apply(link, partial(self.kept.of, rows.there), rows.start_back)
        return Received(x, weights, rows.routes.ends, leave=rows.start_back)

    def combine(self, y: Tensor, sent: "Sent") -> Tensor:
        rows, _ = sent
        link = Start.apply(rows.start_back, rows.there, y)
        (total,) = Wait.apply(link, rows.back, rows.start_there)
        return total


class Rows:
    """The rows of one layer and micro-batch on their way to the experts, or back. Results return
    as gradients of what was sent there do, and their gradients travel there as tokens do."""

    def __init__(self, routes: Routes, group: ProcessGroup, kernels: RowKernels) -> None:
        self.routes, self.group, self.kernels = routes, group, kernels
        self._pending: list[Pending] = []

    def start_there(self, x: Tensor, *weights: Tensor) -> None:
        """Send each token's row of x [T, D] to each of its experts, and weights [T, k]."""
        order, places, k = self.routes.order, self.routes.places, self.routes.k
        rows = [self.kernels.spread(x, order, places, k)]
        rows += [each.flatten().index_select(0, order) for each in weights]
        self._start(rows, self.routes.send, self.routes.receive)

    def there(self) -> tuple[Tensor, ...]:
        """What was sent to this rank's experts, sorted by expert: [R, D], [R]."""
        order = self.routes.local_order
        return tuple(t if order is None else t.index_select(0, order) for t in self._wait())

    def start_back(self, *tensors: Tensor) -> None:
        """Send [R, …], sorted by expert, to the ranks where the rows came from. The first of them
        that an earlier call has sent are not sent again."""
        places, tensors = self.routes.local_places, tensors[len(self._pending) :]
        rows = [each if places is None else each.index_select(0, places) for each in tensors]
        self._start(rows, self.routes.receive, self.routes.send)

    def back(self) -> tuple[Tensor, ...]:
        """What has come back: the sum of each token's rows [T, D], in the order of its choices,
        and weights [T, k]."""
        places, k = self.routes.places, self.routes.k
        rows, *weights = self._wait()
        weights = [each.index_select(0, places).unflatten(0, (-1, k)) for each in weights]
        return self.kernels.sum(rows, places, k), *weights

    def _start(self, rows: list[Tensor], send: Sequence[int], receive: Sequence[int]) -> None:
        self._pending += [start_all_to_all(each, self.group, send, receive) for each in rows]

    def _wait(self) -> list[Tensor]:
        pending, self._pending = self._pending, []
        return [each.wait() for each in pending]


Sent = tuple[Rows, Tensor]  # and the link (asynchronous.py)


def places_in(order: Tensor) -> Tensor:
    """The inverse of a permutation: with it, `rows = x[order]` gives x = rows[places]. (Rows are
    gathered both ways: sums in place, by atomic additions, would depend on their order.)"""
    return torch.empty_like(order).index_copy_(
        0, order, torch.arange(len(order), device=order.device)
    )
