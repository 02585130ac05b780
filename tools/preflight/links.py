"""How fast ranks talk within a node and from node to node, for the preflight.

All-reduces, timed on every rank: among the ranks of each node, and among those of two nodes at a
time. One among all nodes would be as slow as its slowest, everywhere; pairs tell which it is. Each
node is in two pairs, and its better one counts: a good node is not blamed for a bad neighbour.

    round 0   (0 1) (2 3) (4 5)
    round 1   (1 2) (3 4) (5 0)      five nodes: (0 1) (2 3), (1 2) (3 4), (4 0)

The bandwidth is what each rank's link carries, 2 (n − 1) / n of the bytes in the time of one
all-reduce ("bus bandwidth" of nccl-tests), the lowest of the node's ranks.
"""

import contextlib
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Latency does not matter, and it is short: in a node, ten all-reduces of 256 MiB take 10 ms.
BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
TIMES = {"cuda": 10, "cpu": 4}
CPU_RANKS = 2  # of each node: gloo needs no more to show whether and how fast nodes talk


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring, in rounds where no node is in two; each node is in two pairs
    (two nodes: in one)."""
    if num_nodes < 2:
        return []
    if num_nodes == 2:
        return [[(0, 1)]]
    pairs = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = [[pairs.pop()]] if num_nodes % 2 else []
    return [pairs[0::2], pairs[1::2], *last]


class Links:
    """This node's ranks of the measurement, one process per GPU or two; they end with it."""

    def __init__(self, device: str, ranks_per_node: int, address: str, deadline: float) -> None:
        self.num_ranks = ranks_per_node if device == "cuda" else min(ranks_per_node, CPU_RANKS)
        self.deadline = deadline
        # torch is imported, and CUDA not yet initialised
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for local_rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, device, local_rank, self.num_ranks, address),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def measure(self, members: list[int], node: int) -> dict[str, Any]:
        """On each of `members` alike: `within` and `across` in bytes per second, None where there
        is nobody to talk to; or `problems`."""
        for pipe in self.pipes:
            pipe.send(
                (len(members), members.index(node), max(self.deadline - time.monotonic() - 5, 1.0))
            )
        answers: list[Any] = []
        waiting = list(self.pipes)
        while waiting and (ready := wait(waiting, max(self.deadline - 3 - time.monotonic(), 0))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                with contextlib.suppress(EOFError):
                    answers.append(pipe.recv())
        errors = [answer for answer in answers if isinstance(answer, str)]
        if errors or len(answers) < self.num_ranks:
            why = errors[0] if errors else "in time" if waiting else "and died"
            return {
                "problems": [
                    f"{self.num_ranks - len(answers) + len(errors)} ranks could not talk: {why}"
                ]
            }
        lowest = [
            min(values) if None not in values else None for values in zip(*answers, strict=True)
        ]
        return {
            "within": lowest[0],
            "across": max((value for value in lowest[1:] if value), default=None),
        }

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(pipe: Connection, device: str, local_rank: int, num_ranks: int, address: str) -> None:
    """One rank: wait to be told who measures, do it, send the bandwidths, or the error's words."""
    try:
        num_nodes, node, seconds = pipe.recv()
        pipe.send(_measure(device, local_rank, num_ranks, address, num_nodes, node, seconds))
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    pipe.poll(None)  # until killed: a peer may still need this process


def _measure(
    device: str,
    local_rank: int,
    num_ranks: int,
    address: str,
    num_nodes: int,
    node: int,
    seconds: float,
) -> list[float | None]:
    """[within the node, and in each round of pairs] in bytes per second; None: no partner."""
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    host, _, port = address.rpartition(":")
    patience = timedelta(seconds=seconds)
    store = dist.PrefixStore(
        "links", dist.TCPStore(host, int(port), wait_for_workers=False, timeout=patience)
    )
    backend = "nccl" if device == "cuda" else "gloo"
    rank = node * num_ranks + local_rank
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=num_nodes * num_ranks, timeout=patience
    )

    def speed(nodes: tuple[int, ...]) -> float | None:
        ranks = [member * num_ranks + local for member in nodes for local in range(num_ranks)]
        if len(ranks) < 2:
            return None
        # Only its members make the group, and NCCL's connections at its first collective.
        group = dist.new_group(ranks, use_local_synchronization=True, timeout=patience)
        data = torch.ones(BYTES[device] // 4, device=device)
        for turn in range(TIMES[device] + 1):
            if turn == 1:  # the first connects
                _finish(device)
                began = time.perf_counter()
            # 2 (n − 1) / n · BYTES on each rank's link
            dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
        _finish(device)
        took = (time.perf_counter() - began) / TIMES[device]
        return 2 * (len(ranks) - 1) / len(ranks) * BYTES[device] / took

    speeds = [speed((node,))]
    for pairs in rounds(num_nodes):
        mine = [pair for pair in pairs if node in pair]
        speeds.append(speed(mine[0]) if mine else None)
    return speeds


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
