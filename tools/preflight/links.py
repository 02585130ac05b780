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
import multiprocessing
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

# Large enough for latency not to matter, yet fast: in a node, ten of 256 MiB take 10 ms.
BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
TIMES = {"cuda": 10, "cpu": 4}
LATE, DIED = "no answer in time", "they died"
CPU_RANKS = 2  # ranks per node: enough to measure with gloo whether and how fast nodes communicate


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring, in rounds; within a round each node is in at most one pair.
    Over all rounds each node is in two pairs (if there are only two nodes: in one)."""
    if num_nodes < 2:
        return []
    if num_nodes == 2:
        return [[(0, 1)]]
    pairs = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = [[pairs.pop()]] if num_nodes % 2 else []
    return [pairs[0::2], pairs[1::2], *last]


@contextlib.contextmanager
def start_links(device: str, ranks_per_node: int, address: str) -> Iterator[list[Connection]]:
    """Pipes to this node's ranks of the measurement, which are killed at the end of the `with`
    block: one process per GPU, or two on CPUs."""
    num_ranks = ranks_per_node if device == "cuda" else min(ranks_per_node, CPU_RANKS)
    # fork: torch is already imported, and CUDA is not yet initialised
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for local_rank in range(num_ranks):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        arguments = theirs, pipes, device, local_rank, num_ranks, address
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def measure(
    pipes: list[Connection], members: list[int], node: int, deadline: float
) -> dict[str, Any]:
    """Measures on all of `members` at once: returns `within` and `across` in bytes per second
    (None without a partner), or `problems`."""
    seconds = max(deadline - time.monotonic() - 5, 1.0)
    for pipe in pipes:
        pipe.send((len(members), members.index(node), seconds))
    answers = [_answer(pipe, deadline - 3) for pipe in pipes]
    errors = [answer for answer in answers if isinstance(answer, str)]
    if errors:
        # an error explains more than that another rank did not come
        why = next((each for each in errors if each not in (LATE, DIED)), errors[0])
        return {"problems": [f"{len(errors)} ranks could not communicate: {why}"]}
    within, *across = (
        None if None in speeds else min(speeds) for speeds in zip(*answers, strict=True)
    )
    return {"within": within, "across": max(filter(None, across), default=None)}


def _answer(pipe: Connection, until: float) -> list[float | None] | str:
    """A rank's bandwidths, or the text of an error."""
    try:
        return pipe.recv() if pipe.poll(max(until - time.monotonic(), 0)) else LATE
    except EOFError:
        return DIED


def _serve(
    pipe: Connection,
    inherited: list[Connection],
    device: str,
    local_rank: int,
    num_ranks: int,
    address: str,
) -> None:
    """One rank: waits for the task, measures, and sends the bandwidths in bytes per second: within
    the node, then in each round of pairs; None if there is no partner. Or the text of an error."""
    for each in inherited:  # the parent's ends: open here, they would hide that it is gone
        each.close()
    os.dup2(2, 1)  # what NCCL prints (NCCL_DEBUG=INFO) is no part of the command's answer
    try:
        num_nodes, node, seconds = pipe.recv()
        patience = timedelta(seconds=seconds)
        host, _, port = address.rpartition(":")
        store = dist.TCPStore(host, int(port), wait_for_workers=False, timeout=patience)
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("links", store),
            rank=node * num_ranks + local_rank,
            world_size=num_nodes * num_ranks,
            timeout=patience,
        )

        def speed(*nodes: int) -> float | None:
            ranks = [member * num_ranks + local for member in nodes for local in range(num_ranks)]
            # Only its members create the group; NCCL connects them in the first collective.
            group = dist.new_group(ranks, use_local_synchronization=True, timeout=patience)
            return _bandwidth(device, len(ranks), group)

        speeds = [speed(node)]
        for pairs in rounds(num_nodes):
            partners = next((pair for pair in pairs if node in pair), None)
            # Without a partner, too, it creates a group: the name of a group has the number of
            # groups that its ranks have created (torch 2.13), which must stay that of the partners
            # of later rounds.
            found = speed(*(partners or (node,)))
            speeds.append(found if partners else None)
        pipe.send(speeds)
    except EOFError:
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    pipe.poll(None)  # until killed: a peer may still need this process


def _bandwidth(device: str, num_ranks: int, group: dist.ProcessGroup) -> float | None:
    """That of each rank's link in an all-reduce among the ranks of the group."""
    if num_ranks < 2:
        return None
    data = torch.ones(BYTES[device] // 4, device=device)
    for turn in range(TIMES[device] + 1):
        if turn == 1:  # the first all-reduce is not timed, as it connects
            _finish(device)
            began = time.perf_counter()
        # 2 (n − 1) / n · BYTES on each rank's link
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
    _finish(device)
    took = (time.perf_counter() - began) / TIMES[device]
    return 2 * (num_ranks - 1) / num_ranks * BYTES[device] / took


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
