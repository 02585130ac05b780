"""The strict process group: torch's operations, put into the rank's queues (seat.py).

Importing this module registers the backends "strict" and "strict_shared" (one queue for all of a
rank's communicators).
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Listener
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from proofs.strict.referee import Operation, Peer
from proofs.strict.seat import Seat, Work, referee

# torch's methods of a process group, and gloo's where it has another name
COLLECTIVES = {
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",  # torch 2.11's name of the one above
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
ALL_TO_ALL = ("all_to_all", "alltoall")
SEAT: Seat | None = None  # this process's, during a task


class StrictGroup(dist.ProcessGroup):
    """One communicator.

    Args:
        seat: this rank's.
        name: the same on all its ranks.
        members: its ranks in the world.
        inner: carries the data.
        rank: in the group.
    """

    def __init__(self, seat: Seat, name: str, members: list[int], inner: Any, rank: int) -> None:
        super().__init__(rank, len(members))
        self.seat, self.name, self.members, self.inner = seat, name, members, inner
        self.made: set[str] = set()  # communicators that have had their first operation
        self.messages: dict[tuple[int, int], int] = {}  # (from, to) → how many: gloo's tags

    def getBackendName(self) -> str:
        return "strict"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def collective(self, kind: str, *arguments: Any) -> Work:
        """Post a collective, with torch's arguments."""
        options = arguments[-1]
        said = [kind, *_shapes(kind, arguments)]
        if hasattr(options, "reduceOp"):
            said.append(getattr(options.reduceOp, "op", options.reduceOp).name)
        if hasattr(options, "rootRank"):
            said.append(f"root {options.rootRank}")

        @torch.no_grad()  # a thread's own; without it autograd refuses to write to views
        def run() -> None:
            getattr(self.inner, COLLECTIVES[kind])(*arguments).wait()

        sends, receives = self._rows(kind, arguments)
        operation = Operation(" ".join(said), sends=sends, receives=receives)
        return self._post(self.name, self.members, operation, run)

    def _rows(self, kind: str, arguments: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of an all-to-all: how many rows go to, and come from, each rank."""
        if not kind.startswith(ALL_TO_ALL):
            return (), ()
        received, sent, receives, sends = arguments[:4]
        return tuple(
            tuple(sizes or [len(rows) // self.size()] * self.size())
            for rows, sizes in ((sent, sends), (received, receives))
        )

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._single(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._single(False, tensors[0], peer)

    def _single(self, sends: bool, tensor: Tensor, peer: int) -> Work:
        """Outside of a batch: over a communicator of the two ranks."""
        pair = sorted((self.rank(), peer))
        name, members = f"{self.name} {pair}", [self.members[each] for each in pair]
        return self.transfers(name, members, [(sends, tensor, peer)])

    def transfers(
        self, name: str, members: list[int], calls: Sequence[tuple[bool, Tensor, int]]
    ) -> Work:
        """Post sends and receives that run together: (sends, tensor, rank of the group)."""
        peers, posts, begun = [], [], []
        for sends, tensor, peer in calls:
            peers.append(Peer(sends, members.index(self.members[peer]), _shape(tensor)))
            way = (self.rank(), peer) if sends else (peer, self.rank())
            self.messages[way] = tag = self.messages.get(way, 0) + 1
            call = self.inner.send if sends else self.inner.recv
            posts.append(partial(call, [tensor], peer, tag))

        def post() -> None:
            begun.extend(each() for each in posts)

        def run() -> None:
            for work in begun:
                work.wait()

        return self._post(name, members, Operation(peers=tuple(peers)), run, post)

    def _post(self, name: str, members: list[int], *work: Any) -> Work:
        """Before its first operation a communicator is made; the host waits for all its ranks."""
        if name not in self.made:
            self.made.add(name)
            making = Operation("made by the first operation of each rank")
            self.seat.post(Work(self.seat, name, members, making, lambda: None)).wait()
        return self.seat.post(Work(self.seat, name, members, *work))


def _method(kind: str) -> Callable[..., Work]:
    def method(self: StrictGroup, *arguments: Any, opts: Any = None) -> Work:
        return self.collective(kind, *arguments, *([] if opts is None else [opts]))

    return method


for _kind in COLLECTIVES:
    setattr(StrictGroup, _kind, _method(_kind))


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shapes(kind: str, arguments: Sequence[Any]) -> list[str]:
    """Of all tensors among the arguments; of a gather or scatter, of the rank's own; of an
    all-to-all, of one row, because the ranks' numbers of rows differ."""
    if kind.startswith(ALL_TO_ALL):
        return [f"of rows {_shape(tensor[:0])}" for tensor in arguments[:2]]
    if kind == "gather":
        arguments = arguments[1:2]
    elif kind == "scatter":
        arguments = arguments[:1]
    return [_shape(each) for each in tree_leaves(list(arguments)) if isinstance(each, Tensor)]


def _create(
    shared: bool, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> StrictGroup:
    """What torch calls for each new group, on its ranks."""
    global SEAT
    if SEAT is None:  # the default group: of all ranks
        if rank == 0:
            listener = Listener(family="AF_UNIX")
            threading.Thread(target=referee, args=(listener, size), daemon=True).start()
            store.set("referee", listener.address)
        SEAT = Seat(rank, store.get("referee").decode(), shared)
    if rank == 0:
        store.set("name", uuid4().hex[:6])
    store.set(f"rank {rank}", str(SEAT.rank))
    members = [int(store.get(f"rank {each}")) for each in range(size)]
    name = f"the group of ranks {members} ({store.get('name').decode()})"
    inner = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return StrictGroup(SEAT, name, members, inner, rank)


def close() -> None:
    """After `dist.destroy_process_group`: end this rank's threads."""
    global SEAT
    if SEAT is not None:
        SEAT.close()
        SEAT = None


_batch_of_torch = dist.batch_isend_irecv


def _batch(operations: list[dist.P2POp]) -> list[Any]:
    """torch's `batch_isend_irecv` batches only for backends of its own; here too, as with NCCL."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, StrictGroup):
        return _batch_of_torch(operations)
    calls = [
        (each.op is dist.isend, each.tensor, group.members.index(each.peer)) for each in operations
    ]
    return [group.transfers(group.name, group.members, calls)]


dist.batch_isend_irecv = _batch
dist.Backend.register_backend("strict", partial(_create, False), devices=["cpu"])
dist.Backend.register_backend("strict_shared", partial(_create, True), devices=["cpu"])
