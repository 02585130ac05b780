"""The pipeline runner does not deadlock on a network without buffers, where, as with NCCL, a send
completes only when its receive is posted.

The network replaces `torch.distributed.batch_isend_irecv`. A thread processes batches in order, as
NCCL's stream does: the receiver of a message first reports that it is ready, and only then does the
sender send. A batch has one work object for all its operations. Programs that rely on buffers hang
on this network, and a control shows that they do.
"""

import math
import queue
import threading
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.pipeline.schedules import SCHEDULES
from proofs.ranks import RankError, Ranks
from tests.proofs.parity_tiers import DEEP, DEEPER, agrees, thorough_but

READY, DATA = 1, 2  # tags: each message is sent as two


class Work:
    """The work object of one batch."""

    def __init__(self, operations):
        self.operations, self.done, self.error = operations, threading.Event(), None

    def wait(self):
        assert self.done.wait(60), "the network hangs"
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.done.is_set()


class Network(threading.Thread):
    """This rank's end of the network."""

    def __init__(self):
        super().__init__(daemon=True)
        self.batches = queue.SimpleQueue()
        self.start()

    def batch_isend_irecv(self, operations):
        work = Work(operations)
        for operation in operations:
            if operation.op is dist.irecv:
                operation.tensor.fill_(math.nan)  # exposes a read that does not wait
        self.batches.put(work)
        return [work]

    def run(self):
        while True:
            work = self.batches.get()
            try:
                self.carry_out(work.operations)
            except Exception as error:
                work.error = error
            work.done.set()

    def carry_out(self, operations):
        waiting, ready = [], torch.zeros(1)
        for o in operations:
            if o.op is dist.irecv:
                waiting.append(dist.isend(ready, o.peer, group=o.group, tag=READY))
                waiting.append(dist.irecv(o.tensor, o.peer, group=o.group, tag=DATA))
        for o in operations:
            if o.op is dist.isend:
                # nothing is sent before the receiver is ready
                dist.irecv(torch.zeros(1), o.peer, group=o.group, tag=READY).wait()
                waiting.append(dist.isend(o.tensor, o.peer, group=o.group, tag=DATA))
        for work in waiting:
            work.wait()


def no_buffers():
    return patch.object(dist, "batch_isend_irecv", Network().batch_isend_irecv)


# The messages are those between stages, so four ranks are enough. `make test` runs one schedule of
# each kind: stages in the order of ranks, around the ranks in a circle, and forth and back.
# test_schedule.py checks all schedules for deadlocks.
CASES = [replace(case, layout=MeshSizes(pp=4)) for case in DEEPER]
KINDS = [case for case in CASES[: len(DEEP)]
         if case.schedule in ("1f1b", "interleaved_1f1b", "dualpipe_v")]  # fmt: skip


@pytest.mark.parametrize("case", thorough_but(KINDS, CASES), ids=str)
def test_every_schedule_without_buffers(ranks, case):
    agrees(ranks, case, sabotage=no_buffers)


def test_every_schedule_is_tried():
    assert {case.schedule for case in CASES} == set(SCHEDULES)


def exchange_opposite_ways(together):
    """Two ranks send to each other and receive from each other: `together` in one batch, otherwise
    each first sends."""
    with no_buffers():
        peer = 1 - dist.get_rank()
        sent, received = torch.full((4,), float(dist.get_rank())), torch.zeros(4)
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        works = [
            work
            for batch in ([operations] if together else [[o] for o in operations])
            for work in dist.batch_isend_irecv(batch)
        ]
        for work in works:
            work.wait()
        return received.mean().item()


@pytest.mark.thorough
def test_the_network_can_stand_still():
    """Control: two ranks that both send first would succeed on a network with buffers, and hang on
    this one."""
    with Ranks(2) as pool:
        assert pool.run(exchange_opposite_ways, 2, True) == [1.0, 0.0]
        pool.timeout = 10  # it would wait forever
        with pytest.raises(RankError, match="no answer"):
            pool.run(exchange_opposite_ways, 2, False)
