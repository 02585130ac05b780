"""Measures the bandwidth within a node and between nodes, for the preflight.

Every rank times all-reduces: one among the ranks of its node, and others among the ranks of two
nodes. An all-reduce over all nodes would be as slow as the slowest node on every rank; pairs show
which node is slow. Each node is in two pairs, and its faster one counts, so that a good node is not
blamed for a bad neighbour.

    round 0   (0) (1) (2) (3) (4) (5)
    round 1   (0 1) (2 3) (4 5)
    round 2   (1 2) (3 4) (5 0)      five nodes: (0 1) (2 3), (1 2) (3 4), (4 0)

Nor does a node fail because a neighbour is broken: each round has a process group of its own, and
its answer is written at once. A process whose round failed, or hangs until the round's time is
over, may be unable to communicate again. A new process takes its place in the next round. (Between
two broken nodes, a good one fails, as both of its pairs do.)

The bandwidth is the bytes on each rank's link, 2 (n − 1) / n of the data, divided by the time of
one all-reduce ("bus bandwidth" in nccl-tests). The lowest value of the node's ranks counts.
"""

import contextlib
import json
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runtime.signals import end_with_parent

# Large enough for latency not to matter, yet fast: in a node, ten of 256 MiB take 10 ms.
BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
TIMES = {"cuda": 10, "cpu": 4}
CPU_RANKS = 2  # ranks per node: enough to measure with gloo whether and how fast nodes communicate
# The part of the time for all rounds that each one after the first pairs has for itself: a node may
# enter it only when the round before is over, to create CUDA contexts and connect (5 to 8 s). If a
# node does not report, half of the preflight's 55 s is left, less 2: this part is then 8.2 of 25.5
# s, and the rounds before have at least 9.2.
SHARE = 0.32
Group = tuple[int, ...]


def rounds(nodes: list[int]) -> list[list[Group]]:
    """Each node, then pairs of neighbours in a ring; within a round each node is in at most one
    group. Over all rounds each node is in two pairs (if there are only two nodes: in one)."""
    single: list[Group] = [(node,) for node in nodes]
    if len(nodes) <= 2:
        return [single, [tuple(nodes)]] if len(nodes) == 2 else [single]
    pairs: list[Group] = [*zip(nodes, [*nodes[1:], nodes[0]], strict=True)]
    last = [[pairs.pop()]] if len(nodes) % 2 else []
    return [single, pairs[0::2], pairs[1::2], *last]


def rounds_of(node: int, nodes: list[int]) -> dict[int, Group]:
    """Number of a round → this node's group in it."""
    numbered = enumerate(rounds(nodes))
    return {number: group for number, groups in numbered for group in groups if node in group}


@dataclass(frozen=True)
class Links:
    """This node's ranks of the measurement: one process per GPU, or two on CPUs. In the `with`
    block `running`, they wait until `members`, a list of nodes and the seconds for all rounds, is
    in the store at `address`. They write `link/NODE/ROUND/RANK` there: bytes per second (None if
    this rank is the only one), or the text of an error."""

    device: str
    ranks_per_node: int
    address: str
    node: int
    deadline: float

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_node if self.device == "cuda" else min(self.ranks_per_node, CPU_RANKS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        # fork: torch is already imported, and CUDA is not yet initialised
        context, parent = multiprocessing.get_context("fork"), os.getpid()
        processes = [
            context.Process(target=self._watch, args=(parent, local_rank))
            for local_rank in range(self.num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            yield
        finally:
            for process in processes:
                process.kill()
                process.join()

    def _watch(self, parent: int, local_rank: int) -> None:
        """One rank: a process for all rounds, or after its end another one for the rest."""
        end_with_parent(parent, signal.SIGKILL)
        os.dup2(2, 1)  # what NCCL prints (NCCL_DEBUG=INFO) is no part of the command's answer
        try:
            nodes, seconds = json.loads(store_at(self.address, self.deadline).get("members"))
        except RuntimeError:  # there is no first node
            return
        # All nodes learn `members` at the same time, so these ends are the same on all of them.
        end, schedule = time.monotonic() + seconds, rounds(nodes)
        todo = [  # round 0 has no end of its own: a node that fails in it fails
            (number, group, end - seconds * SHARE * len(schedule[max(number, 1) + 1 :]))
            for number, group in rounds_of(self.node, nodes).items()
        ]
        current = mmap.mmap(-1, 1)  # shared memory: the round of the process that measures
        while todo:
            current[0] = todo[0][0]
            about = (os.getpid(), local_rank, todo, current)
            process = multiprocessing.get_context("fork").Process(target=self._measure, args=about)
            process.start()
            process.join()
            todo = [later for later in todo if later[0] > current[0]]

    def _measure(
        self, parent: int, local_rank: int, todo: list[tuple[int, Group, float]], current: mmap.mmap
    ) -> None:
        """Measures in each round of `todo`: its number, this node's group, and its end."""
        end_with_parent(parent, signal.SIGKILL)
        store = store_at(self.address, self.deadline)
        for number, group, end in todo:
            current[0] = number
            left = end - time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.01))  # SIGALRM ends this process
            patience = timedelta(seconds=max(left - 1, 1))  # 1 s to report an error
            store.set_timeout(patience)
            num_ranks = len(group) * self.num_ranks
            answer: float | str | None
            try:
                if self.device == "cuda":
                    torch.cuda.set_device(local_rank)
                dist.init_process_group(
                    "nccl" if self.device == "cuda" else "gloo",
                    store=dist.PrefixStore(f"links/{number}/{group}", store),
                    rank=group.index(self.node) * self.num_ranks + local_rank,
                    world_size=num_ranks,
                    timeout=patience,
                )
                answer = _bandwidth(self.device, num_ranks)
            except Exception as error:
                answer = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            with contextlib.suppress(RuntimeError):
                store.set(f"link/{self.node}/{number}/{local_rank}", json.dumps(answer))
            if isinstance(answer, str):
                return
            dist.destroy_process_group()


def store_at(address: str, deadline: float, is_master: bool = False) -> dist.Store:
    """The store of all nodes, at HOST:PORT; `is_master`: this process has it."""
    host, _, port = address.rpartition(":")
    left = timedelta(seconds=max(deadline - time.monotonic(), 1))
    return dist.TCPStore(host, int(port), None, is_master, left, wait_for_workers=False)


def judge_links(num_ranks: int, answers: list[dict[int, Any]]) -> dict[str, Any]:
    """Of rank → answer, in each of a node's rounds, without those that did not come in time:
    `within` and `across` in bytes per second (None without a partner), or `problems`."""
    errors = [(rank, a) for found in answers for rank, a in found.items() if isinstance(a, str)]
    failed = [
        len(found) < num_ranks or any(isinstance(a, str) for a in found.values())
        for found in answers
    ]
    # the slowest rank of each round, or None; a single rank has no links within its node
    within, *across = (
        None if bad else min(found.values()) for bad, found in zip(failed, answers, strict=True)
    )
    if not failed[0] and not (across and all(failed[1:])):
        return {"within": within, "across": max(filter(None, across), default=None)}
    if errors:
        ranks = {rank for rank, _ in errors}
        return {"problems": [f"{len(ranks)} ranks could not communicate: {errors[0][1]}"]}
    return {"problems": ["it sent no measurement in time"]}


def _bandwidth(device: str, num_ranks: int) -> float | None:
    """That of each rank's link in an all-reduce among all ranks of the process group."""
    if num_ranks < 2:
        return None
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    data = torch.ones(BYTES[device] // 4, device=device)
    for turn in range(TIMES[device] + 1):
        if turn == 1:  # the first all-reduce is not timed, as it connects
            finish()
            began = time.perf_counter()
        # 2 (n − 1) / n · BYTES on each rank's link
        dist.all_reduce(data, op=dist.ReduceOp.MAX)
    finish()
    took = (time.perf_counter() - began) / TIMES[device]
    return 2 * (num_ranks - 1) / num_ranks * BYTES[device] / took
