"""Collectives and messages on the fake GPU: the axis that each is over, and the streams that
ProcessGroupNCCL would use.

In torch 2.11 to 2.13 (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective`,
`pointToPoint`, `endCoalescing` and `WorkNCCL::synchronizeStream`):

    async_op=True, messages    run on the communicator's own stream, which first waits for the
                               current stream; `wait()` makes the current stream wait for the end
    async_op=False             runs on the current stream; there is nothing to wait for
    a batch of messages        is one kernel with one work
    memory                     the work holds the tensors until `wait()`, or if nobody waits, until
                               the watchdog finds it complete; `record_stream` is not called
"""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from costs.collectives import Call, Work, arguments_of, group_of, returned
from costs.operators import tensors_of
from parallel.axes import EXPERT_AXES
from parallel.mesh import Mesh
from tools.rehearse.accesses import Accesses
from tools.rehearse.device import Device, Point, Stream
from tools.rehearse.findings import line
from tools.rehearse.overlap import Overlap

ONE_RANK = "one rank"  # the axis of what a group of one rank does


class GroupAxes:
    """Names a group by the view of the mesh with the same ranks (the innermost first), by `world`,
    or by `ends` (the ranks of the first and last stage, for a tied embedding). `cp` and the axes of
    experts are only the names of their own groups, as other axes may have the same ranks. Of all
    ranks there is one group: if they are those of cp, all its collectives are counted over cp; if
    of an axis of experts, over the axis of weights that has them, or else the world."""

    def __init__(self, mesh: Mesh) -> None:
        groups = {name: view.get_group() for name, view in mesh.views().items()}
        own = {axis: groups.pop(axis) for axis in ("cp", *EXPERT_AXES[1:]) if axis in groups}
        world = frozenset(range(mesh.root.size()))
        self._axes = [
            (name, frozenset(dist.get_process_group_ranks(group))) for name, group in groups.items()
        ]
        self._axes.append(("world", world))
        self._known: dict[str, str | None] = {
            group.group_name: axis if group.size() > 1 else None
            for axis, group in own.items()
            if axis == "cp" or group.size() < len(world)
        }

    def of(self, group: ProcessGroup, kind: str = "") -> str | None:
        """The name of the axis of a collective of this kind, or None for a group of one rank.
        Every all-to-all is over ep."""
        if kind == "all_to_all":
            return "ep"
        name = group.group_name
        if name not in self._known:
            ranks = frozenset(dist.get_process_group_ranks(group))
            axis = next((axis for axis, members in self._axes if members == ranks), "ends")
            self._known[name] = axis if len(ranks) > 1 else None
        return self._known[name]


class _Complete(Work):
    def is_completed(self) -> bool:
        return True


_COMPLETE = _Complete(lambda: None)


def complete(func: Any, args: Sequence[Any]) -> Any:
    """What an operator of torch.distributed returns that is complete at once."""
    return returned(func, args, _COMPLETE)


class Nccl:
    """All communicators of a rank."""

    def __init__(
        self, device: Device, accesses: Accesses, overlap: Overlap, axes: GroupAxes
    ) -> None:
        self.device, self.accesses, self.overlap, self.axes = device, accesses, overlap, axes
        self._streams: dict[str, Stream] = {}
        self._held: dict[Work, list[Tensor]] = {}

    def launch(self, func: Any, args: Sequence[Any], call: Call, phase: str) -> Work:
        """Issue an operator of torch.distributed, in this phase of the step."""
        read, written = arguments_of(call.kind, args)
        current, is_async = self.device.issue(), _is_async(func, args)
        stream = self._stream(group_of(args)) if is_async else current
        if is_async:
            stream.after(current.point())
        sees = stream.seen(self.device.compute)
        number = stream.advance()
        if call.axis != ONE_RANK:
            self.overlap.launched(call, phase, stream, number, sees)
        what = f"{call.kind} over {call.axis} at {line()}"
        self.accesses.access(stream, number, what, [(tensor, False) for tensor in read])
        self.accesses.access(stream, number, what, [(tensor, True) for tensor in written])
        return self._work(stream.point(), list(tensors_of(args)), is_async)

    def batch(self, operations: list[P2POp]) -> list[Work]:
        """Take the place of `dist.batch_isend_irecv`."""
        held = dict(self._held)
        for each in operations:
            each.op(each.tensor, each.peer, each.group)
        self._held = held  # the works of single messages do not exist in a batch
        stream, tensors = self._stream(operations[0].group), [each.tensor for each in operations]
        return [self._work(stream.point(), tensors, True)]

    def _stream(self, group: ProcessGroup) -> Stream:
        name = group.group_name
        if name not in self._streams:
            axis = self.axes.of(group) or ONE_RANK
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
