"""Measures the bandwidth within a node and between nodes, for the preflight.

Every rank times all-reduces: one among the ranks of its node, and others among the ranks of two
nodes. An all-reduce over all nodes would be as slow as the slowest node on every rank; pairs show
which node is slow. Each node is in two pairs, and its faster one counts, so that a good node is not
blamed for a bad neighbour.

    round 0   (0 1) (2 3) (4 5)
    round 1   (1 2) (3 4) (5 0)      five nodes: (0 1) (2 3), (1 2) (3 4), (4 0)

The bandwidth is the bytes on each rank's link, 2 (n − 1) / n of the data, divided by the time of
one all-reduce ("bus bandwidth" in nccl-tests). The lowest value of the node's ranks counts.
"""

import contextlib
import json
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
Speeds = list[float | None]  # of one rank, in bytes per second; None: it had no partner


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring, in rounds; within a round each node is in at most one pair.
    Over all rounds each node is in two pairs (if there are only two nodes: in one)."""
    if num_nodes <= 2:
        return [[(0, 1)]] if num_nodes == 2 else []
    pairs = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = [[pairs.pop()]] if num_nodes % 2 else []
    return [pairs[0::2], pairs[1::2], *last]


@dataclass(frozen=True)
class Links:
    """This node's ranks of the measurement: one process per GPU, or two on CPUs. In the `with`
    block `running`, they wait until `members`, a list of nodes, is in the store at `address`, and
    write `link/NODE/RANK` there: their speeds, or the text of an error."""

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
            context.Process(target=self._serve, args=(parent, local_rank), daemon=True)
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

    def _serve(self, parent: int, local_rank: int) -> None:
        """One rank."""
        end_with_parent(parent, signal.SIGKILL)
        os.dup2(2, 1)  # what NCCL prints (NCCL_DEBUG=INFO) is no part of the command's answer
        host, _, port = self.address.rpartition(":")
        try:
            left = self._time_left(0)
            store = dist.TCPStore(host, int(port), wait_for_workers=False, timeout=left)
            members = json.loads(store.get("members"))
        except RuntimeError:  # there is no first node
            return
        if self.node not in members:
            return
        answer: Speeds | str
        try:
            if self.device == "cuda":
                torch.cuda.set_device(local_rank)
            node, left = members.index(self.node), self._time_left(5)  # to report an error
            dist.init_process_group(
                "nccl" if self.device == "cuda" else "gloo",
                store=dist.PrefixStore("links", store),
                rank=node * self.num_ranks + local_rank,
                world_size=len(members) * self.num_ranks,
                timeout=left,
            )
            answer = _speeds(self.device, self.num_ranks, len(members), node, left)
        except Exception as error:
            answer = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        with contextlib.suppress(RuntimeError):
            store.set(f"link/{self.node}/{local_rank}", json.dumps(answer))
        signal.pause()  # until killed: a peer may still need this process

    def _time_left(self, reserve: float) -> timedelta:
        return timedelta(seconds=max(self.deadline - time.monotonic() - reserve, 1))


def judge_links(answers: list[Speeds | str | None]) -> dict[str, Any]:
    """Of the answers of a node's ranks, each None if it did not come in time: `within` and `across`
    in bytes per second (None without a partner), or `problems`."""
    if errors := [answer for answer in answers if isinstance(answer, str)]:
        return {"problems": [f"{len(errors)} ranks could not communicate: {errors[0]}"]}
    if None in answers:
        return {"problems": ["it sent no measurement in time"]}
    within, *across = (
        None if None in speeds else min(speeds) for speeds in zip(*answers, strict=True)
    )
    return {"within": within, "across": max(filter(None, across), default=None)}


def _speeds(device: str, num_ranks: int, num_nodes: int, node: int, patience: timedelta) -> Speeds:
    """The bandwidths of this rank: within its node, then in each round of pairs."""

    def speed(*nodes: int) -> float | None:
        ranks = [member * num_ranks + local for member in nodes for local in range(num_ranks)]
        # Only its members create the group; NCCL connects them in the first collective.
        group = dist.new_group(ranks, use_local_synchronization=True, timeout=patience)
        return _bandwidth(device, len(ranks), group)

    speeds = [speed(node)]
    for pairs in rounds(num_nodes):
        partners = next((pair for pair in pairs if node in pair), None)
        # Without a partner, too, it creates a group: the name of a group has the number of groups
        # that its ranks have created (torch 2.13), which must stay that of the partners of later
        # rounds.
        found = speed(*(partners or (node,)))
        speeds.append(found if partners else None)
    return speeds


def _bandwidth(device: str, num_ranks: int, group: dist.ProcessGroup) -> float | None:
    """That of each rank's link in an all-reduce among the ranks of the group."""
    if num_ranks < 2:
        return None
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    data = torch.ones(BYTES[device] // 4, device=device)
    for turn in range(TIMES[device] + 1):
        if turn == 1:  # the first all-reduce is not timed, as it connects
            finish()
            began = time.perf_counter()
        # 2 (n − 1) / n · BYTES on each rank's link
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
    finish()
    took = (time.perf_counter() - began) / TIMES[device]
    return 2 * (num_ranks - 1) / num_ranks * BYTES[device] / took
