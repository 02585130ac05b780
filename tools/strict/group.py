"""The ranks' side of the strict process group: queues of operations, run when the referee allows.

Importing this module registers the backends "strict" and "strict_shared" (one queue for all of a
rank's communicators).
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch import Tensor

from tools.strict.referee import Operation, Peer, Referee, Wrong

# torch's methods of a process group, and gloo's where it has another name
COLLECTIVES = {
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",  # torch 2.11's name of the one above
    "reduce_scatter_single": "_reduce_scatter_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",
    **{
        name: name
        for name in (
            "allreduce",
            "broadcast",
            "reduce",
            "allgather",
            "gather",
            "scatter",
            "barrier",
        )
    },
}
MAX_DELAY = 0.001  # seconds before an operation begins


@dataclass(eq=False)
class Job:
    """An operation in a queue."""

    communicator: str
    members: list[int]  # ranks of the world
    operation: Operation
    run: Callable[[], None]  # carries the data; every rank that takes part runs it
    post: Callable[[], None] = lambda: None  # what can be posted to gloo before all have begun
    number: int = field(default_factory=count().__next__)
    ended: threading.Event = field(default_factory=threading.Event)
    allowed: threading.Event = field(default_factory=threading.Event)


class Work(dist._Work):
    """What an operation returns. `wait` blocks the host. On a GPU the stream would wait, and with
    it everything that the host posts later, so nothing is hidden here that would fail there."""

    def __init__(self, seat: "Seat", job: Job) -> None:
        super().__init__()
        self.seat, self.job = seat, job

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.seat.wait(self.job)
        return True

    def is_completed(self) -> bool:
        return self.job.ended.is_set()


class Seat:
    """A rank's connection to the referee, and its queues.

    Args:
        rank: of the world.
        address: of the referee.
        shared: one queue for all communicators of the rank.
    """

    def __init__(self, rank: int, address: str, shared: bool) -> None:
        self.rank, self.shared, self.failure = rank, shared, ""
        self.main = threading.current_thread()
        self.random = random.Random(rank)
        self.connection: Connection = Client(address, "AF_UNIX")
        self.lock = threading.Lock()
        self.queues: dict[str, SimpleQueue[Job | None]] = {}
        self.running: dict[str, Job] = {}  # by queue
        self.users: dict[str, str] = {}  # communicator → name of the thread that uses it
        self.threads = [threading.Thread(target=self._listen, daemon=True)]
        self.threads[0].start()

    def tell(self, *message: Any) -> None:
        with self.lock:
            self.connection.send(message)

    def post(self, job: Job) -> Work:
        self.check()
        thread = threading.current_thread().name
        if self.users.setdefault(job.communicator, thread) != thread:
            other = self.users[job.communicator]
            self.fail(f"rank {self.rank} uses {job.communicator} from threads {other} and {thread}")
        name = "all" if self.shared else job.communicator
        if name not in self.queues:
            self.queues[name] = SimpleQueue()
            self.threads.append(threading.Thread(target=self._work, args=(name,), daemon=True))
            self.threads[-1].start()
        self.tell("posts", self.rank, name, job.number, f"{job.operation} over {job.communicator}")
        self.queues[name].put(job)
        return Work(self, job)

    def wait(self, job: Job) -> None:
        is_main = threading.current_thread() is self.main
        if not job.ended.is_set():
            if is_main:
                self.tell("waits", self.rank, job.number)
            job.ended.wait()
            if is_main:
                self.tell("waits", self.rank, None)
        self.check()

    def check(self) -> None:
        if self.failure:
            raise Wrong(self.failure)

    def fail(self, why: str) -> None:
        """Ends this task on every rank."""
        self.tell("fails", why)
        raise Wrong(why)

    def close(self) -> None:
        """After the last operation of the rank."""
        for queue in self.queues.values():
            queue.put(None)
        self.tell("leaves", self.rank)
        for thread in self.threads:
            thread.join(10)
        self.connection.close()

    def _work(self, name: str) -> None:
        while (job := self.queues[name].get()) is not None:
            time.sleep(self.random.random() * MAX_DELAY)
            self.running[name] = job
            job.post()
            self.tell("begins", self.rank, name, job.communicator, job.members, job.operation)
            job.allowed.wait()
            if self.failure:
                return
            job.run()
            self.tell("ends", self.rank, job.number)
            job.ended.set()

    def _listen(self) -> None:
        while True:
            try:
                kind, text = self.connection.recv()
            except (EOFError, OSError):
                return
            if kind == "over":
                return
            if kind == "runs":
                self.running[text].allowed.set()
                continue
            self.failure = text
            for job in [*self.running.values()]:
                job.allowed.set()
                job.ended.set()
            for queue in self.queues.values():
                while not queue.empty():
                    if (waiting := queue.get()) is not None:
                        waiting.ended.set()


def referee(listener: Listener, world: int) -> None:
    """Serve the ranks until all have left; in a thread of rank 0."""
    with listener:
        seats = [listener.accept() for _ in range(world)]
    judge, by_rank, over = Referee(world), {}, False
    open_seats = list(seats)
    while open_seats:
        for seat in wait(open_seats):
            assert isinstance(seat, Connection)
            try:
                kind, *arguments = seat.recv()
            except (EOFError, OSError):
                open_seats.remove(seat)
                continue
            if kind != "fails":
                by_rank[arguments[0]] = seat
            try:
                if kind == "fails":
                    raise Wrong(arguments[0])
                for rank, queue in getattr(judge, kind)(*arguments) or []:
                    by_rank[rank].send(("runs", queue))
                if kind == "leaves":
                    open_seats.remove(seat)
                    seat.send(("over", ""))
                if kind in ("waits", "begins", "ends", "leaves"):
                    judge.check()
            except Wrong as wrong:
                if not over:
                    for each in open_seats:
                        each.send(("fails", str(wrong)))
                over = True


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
        self.group_rank = rank
        self.made: set[str] = set()  # communicators that have had their first operation
        self.messages: dict[tuple[int, int], int] = {}  # (from, to) → how many: gloo's tags

    def size(self) -> int:
        return len(self.members)

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

        def run() -> None:
            getattr(self.inner, COLLECTIVES[kind])(*arguments).wait()

        self._make(self.name, self.members)
        operation = Operation(" ".join(said))
        return self.seat.post(Job(self.name, self.members, operation, run))

    def batch(self, calls: Sequence[tuple[bool, Tensor, int]]) -> Work:
        """Post sends and receives that run together: (sends, tensor, rank of the group)."""
        self._make(self.name, self.members)
        return self._transfers(self.name, self.members, calls)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._single(True, tensors[0], peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._single(False, tensors[0], peer)

    def _single(self, sends: bool, tensor: Tensor, peer: int) -> Work:
        """Outside of a batch: over a communicator of the two ranks."""
        pair = sorted((self.group_rank, peer))
        name, members = f"{self.name} {pair}", [self.members[each] for each in pair]
        self._make(name, members)
        return self._transfers(name, members, [(sends, tensor, peer)])

    def _transfers(
        self, name: str, members: list[int], calls: Sequence[tuple[bool, Tensor, int]]
    ) -> Work:
        peers, begun, tagged = [], [], []
        for sends, tensor, peer in calls:
            peers.append(Peer(sends, members.index(self.members[peer]), _shape(tensor)))
            way = (self.group_rank, peer) if sends else (peer, self.group_rank)
            self.messages[way] = tag = self.messages.get(way, 0) + 1
            tagged.append((sends, tensor, peer, tag))

        def post() -> None:
            for sends, tensor, peer, tag in tagged:
                call = self.inner.send if sends else self.inner.recv
                begun.append(call([tensor], peer, tag))

        def run() -> None:
            for work in begun:
                work.wait()

        job = Job(name, members, Operation(peers=tuple(peers)), run, post)
        return self.seat.post(job)

    def _make(self, name: str, members: list[int]) -> None:
        """Before its first operation a communicator is made; the host waits for all its ranks."""
        if name not in self.made:
            self.made.add(name)
            operation = Operation("made by the first operation of each rank")
            self.seat.post(Job(name, members, operation, lambda: None)).wait()


def _method(kind: str) -> Callable[..., Work]:
    def method(self: StrictGroup, *arguments: Any, opts: Any = None) -> Work:
        return self.collective(kind, *arguments, *([] if opts is None else [opts]))

    return method


for _kind in COLLECTIVES:
    setattr(StrictGroup, _kind, _method(_kind))


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shapes(kind: str, arguments: Sequence[Any]) -> list[str]:
    """Of all tensors among the arguments; of a gather or scatter, of the rank's own."""
    if kind == "gather":
        arguments = arguments[1:2]
    elif kind == "scatter":
        arguments = arguments[:1]

    def tensors(value: Any) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        return (
            [t for each in value for t in tensors(each)] if isinstance(value, (list, tuple)) else []
        )

    return [_shape(tensor) for tensor in tensors(list(arguments))]


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
    return [group.batch(calls)]


dist.batch_isend_irecv = _batch
dist.Backend.register_backend("strict", partial(_create, False), devices=["cpu"])
dist.Backend.register_backend("strict_shared", partial(_create, True), devices=["cpu"])
