"""Expert parallelism: each rank holds some of the experts of a layer, and tokens travel to them.

    4 experts, ep 2, each token to 2 experts          (rows: tokens, once for each chosen expert)

    rank 0   tokens a b      rows  a0 b1 | a2 b3    ─┐  all-to-all  ┌─►  rank 0: experts 0 and 1
    rank 1   tokens c d      rows  c1 d1 | c3 d2    ─┘              └─►  rank 1: experts 2 and 3

A rank sorts its rows by expert, so those for one rank are contiguous, sends them, and sorts what it
receives by expert again: each expert's rows are then contiguous for one grouped product. The
results return the same way, and each token's are summed. No token is dropped, so ranks receive
different numbers of rows, or none.

All ranks of dp_shard × cp × tp have different tokens (with sequence parallelism those of tp too),
and ep is a part of them (axes.py). So the gradient of an expert covers all tokens of its ep group,
and FSDP's plain sum over efsdp and ep_replicate adds the rest: no factor is needed.

| pass     | what travels over ep, per layer         | bytes that leave a rank, of `b` each        |
|----------|-----------------------------------------|---------------------------------------------|
| forward  | counts of rows, for each expert         | 8 · X · (ep − 1) / ep                       |
|          | rows there, beside the router's weights | T·k · (D·b + 4) · (ep − 1) / ep if balanced |
|          | results back                            | T·k · D·b · (ep − 1) / ep                   |
| backward | gradients of results there, rows' back  | the same as the two rows above              |

T is the number of tokens of a rank, k of experts that a token chooses, X of experts. With full
checkpointing, rows and weights are sent there again. The router's weight is multiplied between an
expert's two products, so results need not be kept for its gradient.

The host must know how many rows it sends and receives, because it allocates them and because a
collective takes numbers, not tensors. It waits for all of them at once, in `counts_on_host`: once
per layer and forward. Backward and recomputation know them already. (Kernels that need no such wait
take buffers for the worst case: DeepSeek's DeepEP.) The choice is kept through recomputation
(kept.py).

(Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668; dropless: Gale et al. 2022,
https://arxiv.org/abs/2211.15841; ep as a part of the other axes: Liu et al. 2025,
https://arxiv.org/abs/2504.14960.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from parallel.collectives import Pending, all_reduce, start_all_to_all
from parallel.kept import KeptOutputs
from parallel.mesh import Axis, Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertParallel(Axis):
    """The ep axis, as a layer of experts sees it."""

    # The groups over which a sequence is split, and the number of its parts.
    sequence: tuple[ProcessGroup, ...] = ()
    parts: int = 1

    @classmethod
    def of(cls, mesh: Mesh) -> "ExpertParallel":
        cp, tp = mesh.cp, mesh.tp
        return cls(**vars(mesh.ep), sequence=(cp.group, tp.group), parts=cp.size * tp.size)


class Groups(NamedTuple):
    """The rows of each of a rank's experts, one after another."""

    sizes: tuple[int, ...]  # for the host
    offsets: Tensor  # int32 [X/ep]: the ends, on the device


@dataclass(frozen=True)
class Routes:
    """Where the rows of one layer and micro-batch travel, seen from one rank."""

    chosen: Tensor  # [T, k] int64: the experts of each token
    order: Tensor  # [T·k]: the rows sorted by expert; row i is choice i % k of token i // k
    send: Sequence[int]  # rows to each rank
    receive: Sequence[int]  # rows from each rank
    local_order: Tensor | None  # received rows, sorted by expert; None: they are
    groups: Groups
    # [B, X] int64: how often the tokens of each sequence, on this rank, chose each expert
    counts: Tensor
    # the same of whole sequences, summed over the ranks that share them; None: not needed
    sequence_counts: Tensor | None


def counts_on_host(counts: Tensor) -> list[int]:
    """The host waits for the device here, and nowhere else in a layer of experts."""
    numbers: list[int] = counts.tolist()
    return numbers


def find_routes(
    chosen: Tensor, sequences: int, num_experts: int, ep: ExpertParallel, whole_sequences: bool
) -> Routes:
    """The routes of `chosen` [T, k], where T is [S, sequences]. All ranks of the ep group call it.

    whole_sequences: count over the ranks that share a sequence too.
    """
    flat = chosen.flatten()
    assert len(chosen) % sequences == 0, "tokens are [S, sequences]"
    order = flat.argsort(stable=True)
    # integers: a sum of ones in any order is the same, and larger than 256 in bfloat16 is not
    of_sequence = torch.arange(sequences, device=flat.device).repeat_interleave(chosen.shape[1])
    cells = flat.view(-1, len(of_sequence)) + of_sequence * num_experts
    counts = flat.new_zeros(sequences * num_experts)
    counts.scatter_add_(0, cells.flatten(), torch.ones_like(flat))
    counts = counts.view(sequences, num_experts)
    mine = counts.sum(0)
    per_rank = [num_experts // ep.size] * ep.size
    theirs = start_all_to_all(mine, ep.group, per_rank, per_rank).wait().view(ep.size, -1)
    numbers = counts_on_host(torch.cat([mine.view(ep.size, -1).sum(1), theirs.flatten()]))
    send, rows = numbers[: ep.size], numbers[ep.size :]
    local = num_experts // ep.size
    sizes = tuple(sum(rows[expert::local]) for expert in range(local))
    receive = [sum(rows[rank * local : (rank + 1) * local]) for rank in range(ep.size)]
    local_order = None
    if ep.size > 1 and local > 1:  # the rows of a single expert are in order as they arrive
        experts = torch.arange(local, device=flat.device).repeat(ep.size)
        experts = experts.repeat_interleave(theirs.flatten(), output_size=sum(receive))
        local_order = experts.argsort(stable=True)
    offsets = theirs.sum(0).cumsum(0).to(torch.int32)
    sequence_counts = None
    if whole_sequences:
        sequence_counts = counts
        for group in ep.sequence:
            sequence_counts = all_reduce(sequence_counts, group)
    groups = Groups(sizes, offsets)
    return Routes(chosen, order, send, receive, local_order, groups, counts, sequence_counts)


class TokenDispatch(nn.Module):
    """Sends tokens to their experts and the results back, for one layer. It has no weights.

    sent = dispatch.send(x, weights, routes)          starts
    …                                                 what is computed here overlaps the sending
    rows, weights = dispatch.receive(sent)            [R, D] and [R], sorted by expert
    y = dispatch.send_back(experts(rows), routes)     [T, D]
    """

    def __init__(self, ep: ExpertParallel) -> None:
        super().__init__()
        self.ep = ep
        self.kept: KeptOutputs | None = None  # set by activation checkpointing, which keeps routes
        self.keeps_rows = False  # and with selective checkpointing, received rows

    def once(self, compute: Callable[[], T]) -> T:
        """The result of `compute`, kept for the recomputation, which does not call it: routes are
        found, and counted, once."""
        return compute() if self.kept is None else self.kept.once(compute)

    def send(self, x: Tensor, weights: Tensor, routes: Routes) -> "Sent":
        """Start to send x [T, D] and the router's weights [T, k]. In backward, waits for their
        gradients."""
        exchange = Exchange(routes, self.ep.group, self.kept if self.keeps_rows else None)
        return Sent(exchange, *StartToSend.apply(x, weights, exchange))

    def receive(self, sent: "Sent") -> tuple[Tensor, Tensor]:
        """The rows [R, D] and weights [R] that this rank's experts compute with. In backward,
        starts to send their gradients."""
        rows, weights = Receive.apply(sent.rows, sent.weights, sent.exchange)
        return rows, weights

    def send_back(self, y: Tensor, routes: Routes) -> Tensor:
        """Map the experts' results [R, D] to the sum of each token's [T, D]."""
        result: Tensor = SendBack.apply(y, routes, self.ep.group)
        return result


class Exchange:
    """Rows on their way, for one layer and pass. It refers to no tensor that autograd follows."""

    def __init__(
        self, routes: Routes, group: ProcessGroup, kept: KeptOutputs | None = None
    ) -> None:
        self.routes, self.group, self.kept = routes, group, kept
        self.pending: tuple[Pending, ...] = ()

    def start_there(self, *tensors: Tensor) -> None:
        """Send rows that are sorted by expert [T·k, …]."""
        r = self.routes
        self.pending = tuple(start_all_to_all(t, self.group, r.send, r.receive) for t in tensors)

    def there(self) -> tuple[Tensor, ...]:
        """What was sent to this rank's experts, sorted by expert [R, …]."""
        arrived, order = self._wait(), self.routes.local_order
        return arrived if order is None else tuple(t.index_select(0, order) for t in arrived)

    def start_back(self, *tensors: Tensor) -> None:
        """Send [R, …], sorted by expert, to the ranks where the rows came from."""
        r = self.routes
        if r.local_order is not None:
            tensors = tuple(unsorted(t, r.local_order) for t in tensors)
        self.pending = tuple(start_all_to_all(t, self.group, r.receive, r.send) for t in tensors)

    def back(self) -> tuple[Tensor, ...]:
        """What has come back, for each choice of each token [T, k, …]."""
        shape = self.routes.chosen.shape
        return tuple(unsorted(t, self.routes.order).unflatten(0, shape) for t in self._wait())

    def _wait(self) -> tuple[Tensor, ...]:
        arrived = tuple(each.wait() for each in self.pending)
        self.pending = ()
        return arrived


class Sent(NamedTuple):
    """What `TokenDispatch.send` returns. autograd must know that `receive` depends on `send` while
    rows still travel: the placeholders, which have the shapes and no data, tell it."""

    exchange: Exchange
    rows: Tensor
    weights: Tensor


def unsorted(rows: Tensor, order: Tensor) -> Tensor:
    """The inverse of `rows = x[order]`: each row at its place in x. (Sums of rows in place, by
    atomic additions, would depend on their order.)"""
    return torch.empty_like(rows).index_copy_(0, order, rows)


class StartToSend(torch.autograd.Function):
    """x [T, D] and weights [T, k] → placeholders of [R, D] and [R]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange, routes = exchange, exchange.routes
        if exchange.kept is None or not exchange.kept.has_result:
            rows = x.index_select(0, routes.order // weights.shape[1])
            exchange.start_there(rows, weights.flatten().index_select(0, routes.order))
        received = sum(routes.groups.sizes)
        return (
            x.new_empty(()).expand(received, x.shape[1]),
            weights.new_empty(()).expand(received),
        )

    @staticmethod
    def backward(ctx: Any, *placeholders: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.exchange.back()  # [T, k, D], [T, k]
        return rows.sum(1), weights, None


class Receive(torch.autograd.Function):
    """Placeholders → rows [R, D] and weights [R], sorted by expert."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        kept = exchange.kept
        return exchange.there() if kept is None else kept.of(exchange.there)

    @staticmethod
    def backward(ctx: Any, drows: Tensor, dweights: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.exchange.start_back(drows, dweights)
        shapes = drows.shape, dweights.shape
        return drows.new_zeros(()).expand(shapes[0]), dweights.new_zeros(()).expand(shapes[1]), None


class SendBack(torch.autograd.Function):
    """y [R, D], sorted by expert → the sum of each token's results [T, D], in the order of its
    choices, whatever rank they come from."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, routes: Routes, group: ProcessGroup) -> Tensor:
        ctx.exchange = Exchange(routes, group)
        ctx.exchange.start_back(y)
        return ctx.exchange.back()[0].sum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        order, choices = ctx.exchange.routes.order, ctx.exchange.routes.chosen.shape[1]
        ctx.exchange.start_there(dy.index_select(0, order // choices))
        return ctx.exchange.there()[0], None, None
