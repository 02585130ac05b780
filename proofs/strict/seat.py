"""A rank's connection to the referee: queues of operations, each run when the referee allows it.
Also the thread of rank 0 in which the referee works."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from proofs.strict.referee import Operation, Referee, Wrong

MAX_DELAY = 0.001  # seconds before an operation begins
LOOK_SECONDS = 0.1  # after which a rank that waits looks whether the task has failed


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
            while not job.ended.wait(LOOK_SECONDS) and not self.failure:
                pass
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
            self.failure = text  # every `wait` looks at it
            for job in [*self.running.values()]:
                job.allowed.set()


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
