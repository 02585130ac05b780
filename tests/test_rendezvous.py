"""The runner on a network that buffers nothing: a send completes only when its receive is posted,
as with NCCL.

The transport stands in for `torch.distributed.batch_isend_irecv`. A thread works off the batches
one after the other, as NCCL's stream does: the receiver of a message first says that it is ready,
and only then does the sender send. A batch has one answer for all its operations. Programs that
rely on a buffer hang on it, and a control shows that they do.
"""

import contextlib
import math
import queue
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.pipeline.schedules import SCHEDULES
from tests.test_parity import DEEP, DEEPER, thorough_but
from tools.parity.row import line
from tools.parity.run import check
from tools.ranks import RankError, Ranks

READY, DATA = 1, 2  # tags of the two messages that one message is


class Work:
    """The one answer to a batch."""

    def __init__(self, operations):
        self.operations, self.done, self.error = operations, threading.Event(), None

    def wait(self):
        assert self.done.wait(60), "the network stands still"
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.done.is_set()


class Network(threading.Thread):
    """This rank's side of it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.batches = queue.SimpleQueue()
        self.start()

    def batch_isend_irecv(self, operations):
        work = Work(operations)
        for operation in operations:
            if operation.op is dist.irecv:
                operation.tensor.fill_(math.nan)  # whoever reads it without waiting shows
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
                # nothing leaves before
                dist.irecv(torch.zeros(1), o.peer, group=o.group, tag=READY).wait()
                waiting.append(dist.isend(o.tensor, o.peer, group=o.group, tag=DATA))
        for work in waiting:
            work.wait()


@contextlib.contextmanager
def no_buffers():
    with patch.object(dist, "batch_isend_irecv", Network().batch_isend_irecv):
        yield


# In `make test` one of each kind: straight through the ranks, around them in a circle, and there
# and back. All are checked for programs that wait for each other in test_schedule.py.
KINDS = [DEEP["1f1b"], DEEP["interleaved_1f1b"], DEEP["dualpipe_v"]]


@pytest.mark.parametrize("case", thorough_but(KINDS, DEEPER), ids=str)
def test_every_schedule_without_buffers(ranks, case):
    row = check(ranks, case, sabotage=no_buffers)
    assert not row.failures(), line(row, 0)


def test_every_schedule_is_tried():
    assert {case.schedule for case in DEEPER} == set(SCHEDULES)


def exchange_opposite_ways(together):
    """Two ranks send to each other and receive from each other: in one batch, or each first its
    send."""
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
    """The control: what a network with buffers forgives, this one does not."""
    with Ranks(2) as pool:
        assert pool.run(exchange_opposite_ways, 2, True) == [1.0, 0.0]
        pool.timeout = 10  # it would wait forever
        with pytest.raises(RankError, match="no answer"):
            pool.run(exchange_opposite_ways, 2, False)
