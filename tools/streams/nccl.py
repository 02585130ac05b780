"""Collectives and messages on the pretended device, on the streams that ProcessGroupNCCL uses.

In torch 2.11 to 2.13 (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective`,
`pointToPoint`, `endCoalescing` and `WorkNCCL::synchronizeStream`):

    async_op=True, messages    run on the communicator's own stream, which first waits for the
                               current stream; `wait()` makes the current stream wait for the end
    async_op=False             runs on the current stream; there is nothing to wait for
    a batch of messages        is one kernel with one work
    memory                     the work holds the tensors until `wait()`, or if nobody waits, until
                               the watchdog finds it complete; `record_stream` is not called
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from costs.collectives import Work, arguments_of, call_of, group_of, returned
from costs.operators import tensors_of
from tools.rehearse.tape import GroupAxes
from tools.streams.clocks import Point
from tools.streams.device import Device, Stream
from tools.streams.findings import line
from tools.streams.memory import Memory
from tools.streams.overlap import Overlap


class Nccl:
    """All communicators of a rank."""

    def __init__(self, device: Device, memory: Memory, overlap: Overlap, axes: GroupAxes) -> None:
        self.device, self.memory, self.overlap, self.axes = device, memory, overlap, axes
        self._streams: dict[str, Stream] = {}
        self._held: dict[Work, list[Tensor]] = {}

    def launch(self, func: Any, args: Sequence[Any]) -> Any:
        """Run an operator of torch.distributed, and return what it returns."""
        group, (kind, size) = group_of(args), call_of(func, args)
        read, written = arguments_of(kind, args)
        current = self.device.issue()
        is_async = _is_async(func, args)
        stream = self._stream(group) if is_async else current
        if is_async:
            stream.after(current.point())
        sees = stream.seen(self.device.compute)
        axis, number = self.axes.of(group, kind), stream.advance()
        if axis is not None:
            self.overlap.launched(axis, kind, size, stream, number, sees)
        what = f"{kind} over {axis or 'one rank'} at {line()}"
        self.memory.access(stream, number, what, [(tensor, False) for tensor in read])
        self.memory.access(stream, number, what, [(tensor, True) for tensor in written])
        work = self._work(stream.point(), list(tensors_of(args)), is_async)
        return returned(func, args, work)

    def batch(self, operations: list[P2POp]) -> list[Work]:
        """Take the place of `dist.batch_isend_irecv`."""
        held = dict(self._held)
        for each in operations:
            each.op(each.tensor, each.peer, each.group)
        self._held = held  # the works of single messages do not exist in a batch
        stream, tensors = self._stream(operations[0].group), [each.tensor for each in operations]
        return [self._work(stream.point(), tensors, True)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with patch.object(dist, "batch_isend_irecv", self.batch):
            yield

    def _stream(self, group: ProcessGroup) -> Stream:
        name = group.group_name
        if name not in self._streams:
            axis = self.axes.of(group) or "one rank"
            self._streams[name] = Stream(self.device, f"NCCL's stream of {axis}")
        return self._streams[name]

    def _work(self, end: Point, tensors: list[Tensor], is_async: bool) -> Work:
        def wait() -> None:
            if is_async:
                self.device.touch()
                self.device.current_stream().after(end)
                self._held.pop(work, None)

        work = Work(wait)
        self._held[work] = tensors if is_async else []
        return work


def _is_async(func: Any, args: Sequence[Any]) -> bool:
    """The argument async_op, which messages do not have."""
    names = (argument.name for argument in func._schema.arguments)
    return all(value for name, value in zip(names, args, strict=False) if name == "async_op")
