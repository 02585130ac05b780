"""A rank's connection to the referee: queues of operations, each run when the referee allows it.
Also the thread of rank 0 in which the referee works."""

import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from proofs.strict.referee import Operation, Referee, Wrong

MAX_DELAY = 0.001  # seconds before an operation begins
LOOK_SECONDS = 0.1  # after which a rank that waits looks whether the task has failed


class Work(dist._Work):
    """An operation in a queue, and what it returns. `wait` blocks the host. On a GPU the stream
    would wait, and with it everything that the host posts later, so nothing is hidden here that
    would fail there.

    Args:
        members: of the communicator, ranks of the world.
        run: carries the data; every rank that takes part runs it.
        post: what can be posted to gloo before all have begun.
    """

    def __init__(
        self,
        seat: "Seat",
        communicator: str,
        members: list[int],
        operation: Operation,
        run: Callable[[], None],
        post: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.seat, self.communicator, self.members = seat, communicator, members
        self.operation, self.run, self.post = operation, run, post
        self.number = next(seat.numbers)
        self.allowed, self.ended = threading.Event(), threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        is_main = threading.current_thread() is self.seat.main
        if not self.ended.is_set():
            if is_main:
                self.seat.tell("waits", self.number)
            while not self.ended.wait(LOOK_SECONDS) and not self.seat.failure:
                pass
            if is_main:
                self.seat.tell("waits", None)
        self.seat.check()
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


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
        self.numbers = count()  # of operations
        self.queues: dict[str, SimpleQueue[Work | None]] = {}
        self.running: dict[str, Work] = {}  # by queue
        self.users: dict[str, str] = {}  # communicator → name of the thread that uses it
        self.threads = [threading.Thread(target=self._listen, daemon=True)]
        self.threads[0].start()

    def tell(self, kind: str, *about: Any) -> None:
        """Call a method of the referee's, for this rank."""
        with self.lock:
            self.connection.send((kind, self.rank, *about))

    def post(self, work: Work) -> Work:
        self.check()
        thread, communicator = threading.current_thread().name, work.communicator
        if (other := self.users.setdefault(communicator, thread)) != thread:
            why = f"rank {self.rank} uses {communicator} from threads {other} and {thread}"
            self.tell("fails", why)
            raise Wrong(why)
        name = "all" if self.shared else communicator
        if name not in self.queues:
            self.queues[name] = SimpleQueue()
            self.threads.append(threading.Thread(target=self._work, args=(name,), daemon=True))
            self.threads[-1].start()
        self.tell("posts", name, work.number, f"{work.operation} over {communicator}")
        self.queues[name].put(work)
        return work

    def check(self) -> None:
        if self.failure:
            raise Wrong(self.failure)

    def close(self) -> None:
        """After the last operation of the rank."""
        for queue in self.queues.values():
            queue.put(None)
        self.tell("leaves")
        for thread in self.threads:
            thread.join(10)
        self.connection.close()

    def _work(self, name: str) -> None:
        while (work := self.queues[name].get()) is not None:
            time.sleep(self.random.random() * MAX_DELAY)
            self.running[name] = work
            work.post()
            self.tell("begins", name, work.communicator, work.members, work.operation)
            work.allowed.wait()
            if self.failure:
                return
            work.run()
            self.tell("ends", work.number)
            work.ended.set()

    def _listen(self) -> None:
        while True:
            try:
                kind, text = self.connection.recv()
            except (EOFError, OSError):
                return
            if kind == "runs":
                self.running[text].allowed.set()
                continue
            self.failure = text  # every `wait` looks at it
            for work in [*self.running.values()]:
                work.allowed.set()


def referee(listener: Listener, world: int) -> None:
    """Serve the ranks until all have left; in a thread of rank 0."""
    with listener:
        seats = [listener.accept() for _ in range(world)]
    judge, by_rank, over = Referee(world), {}, False
    while seats:
        for seat in wait(seats):
            assert isinstance(seat, Connection)
            try:
                kind, rank, *about = seat.recv()
            except (EOFError, OSError):
                seats.remove(seat)
                continue
            by_rank[rank] = seat
            try:
                for other, queue in getattr(judge, kind)(rank, *about) or []:
                    by_rank[other].send(("runs", queue))
                if kind == "leaves":
                    seats.remove(seat)
                    seat.close()
                judge.check()
            except Wrong as wrong:
                if not over:
                    for each in seats:
                        each.send(("fails", str(wrong)))
                over = True
