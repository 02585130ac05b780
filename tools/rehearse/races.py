"""Looks for races: every operator, collective and copy is issued on the stream that would run it,
and what it reads and writes is checked.

Tensors of the device are those of costs/as_on_gpu.py, without data. What an operator does
internally (a kernel's table of pointers, a workspace) is not seen.

The streams of collectives are those that ProcessGroupNCCL would use. In torch 2.11 to 2.13
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, `collective`, `pointToPoint`, `endCoalescing` and
`WorkNCCL::synchronizeStream`):

    async_op=True, messages    run on the communicator's own stream, which first waits for the
                               current stream; `wait()` makes the current stream wait for the end
    async_op=False             runs on the current stream; there is nothing to wait for
    a batch of messages        is one kernel with one work
    memory                     the work holds the tensors until `wait()`, or if nobody waits, until
                               the watchdog finds it complete; `record_stream` is not called

On a GPU autograd runs backward in a thread of its own, whose current device it sets (torch/csrc/
autograd/engine.cpp, Engine::thread_init), and each node on the stream that was current in its
forward. Here backward runs in a thread too, on the compute stream; an operator that autograd
records on another stream raises an error.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup

from costs.as_on_gpu import DEVICE
from costs.collectives import Call, Work, arguments_of, group_of
from costs.events import event_of
from costs.operators import accesses, host_copy, needs_value, on_device, takes_from_host, tensors_of
from costs.storages import key_of, watch_resizes
from hardware import H100
from hardware import Device as Rates
from parallel.mesh import Mesh
from runtime.checkpoint.lease import Lease
from runtime.checkpoint.manifest import Manifest
from runtime.checkpoint.save import Saver
from runtime.log.run_log import RunLog
from runtime.trainer_state import DataState
from tools.command import table
from tools.plan.layout import Layout
from tools.plan.time import StepTime
from tools.rehearse.accesses import Accesses, Block
from tools.rehearse.device import INDEX, Device, Stream
from tools.rehearse.fake_gpu import OnFakeGpu
from tools.rehearse.findings import Findings, line
from tools.rehearse.overlap import Computing, Flight, Overlap
from tools.rehearse.rank import title
from tools.rehearse.tape import ONE_RANK, Tape
from training.step import TrainStep


class SaverWithoutFiles(Saver):
    """A saver of one rank that writes no file. What concerns the device is the run's own: the
    copies to the host, and the thread that waits for them and reads them."""

    def __init__(self, train: TrainStep) -> None:
        with patch.object(dist, "new_group", lambda **_: None):
            super().__init__(train, Path(), Lease(""), RunLog(train.config))
        self.is_first = False  # of the ranks, which alone logs and commits

    def save(self, *state: Any) -> Any:
        with patch.object(self.train, "mesh", replace(self.train.mesh, device="cuda")):
            return super().save(*state)

    def _agree(self, action: Callable[[], Any]) -> list[Any]:
        return [action()]

    def _write_partial(self, *_: Any) -> Manifest:
        return Manifest(files={}, tensors={})


class Races(Tape):
    """The streams of a fake GPU, what is accessed on them, and what overlaps. Use `checking`.

    Args:
        gpu: the fake GPU.
        rates: those of a device, for the seconds in the report of what overlaps.
    """

    def __init__(self, mesh: Mesh, gpu: Device, rates: Rates) -> None:
        super().__init__(mesh)
        self.gpu, self.rates = gpu, rates
        self.findings: Findings = Counter()
        self.accesses, self.overlap = Accesses(self.findings), Overlap(gpu)
        gpu.found, gpu.pin = self.found, self.pin
        self.operators = 0
        self._step: dict[str, Any] = {}  # what overlapped in the last one
        self._pinned: dict[int, range] = {}  # addresses of storages of the host, by their keys
        self._streams: dict[str, Stream] = {}  # NCCL's, by the name of the group
        # by works that were not waited for; torch would wait forever for one that Python forgot
        self._held: dict[Work, list[Tensor]] = {}

    def found(self, kind: str, text: str) -> None:
        self.findings[kind, f"{text} at {line()}"] += 1

    # --- a step ---

    def clear(self) -> None:
        super().clear()
        self.overlap = Overlap(self.gpu)
        self.gpu.joined = self.overlap.joined

    def after_step(self, train: TrainStep, step: int) -> None:
        layout = Layout.of_rank(train.config, train.mesh.sizes.world, dist.get_rank())
        self._step = self.overlap.table(StepTime(layout, self.rates))
        if step == 0:
            self.saver = SaverWithoutFiles(train)
        data = DataState(checksum="none", next_sample=0, skipped=[])
        self.saver.save(step + 1, 0, data)  # its thread works beside the next step

    def report(self) -> dict[str, Any]:
        self.saver.close()
        return {
            "findings": [
                f"{kind}: {text}" + (f" ({count} times)" if count > 1 else "")
                for (kind, text), count in self.findings.items()
            ],
            "operators": self.operators,
            "compared": self.accesses.compared,  # pairs of accesses
            "overlap": self._step,
        }

    # --- storages ---

    def born(self, key: int, size: int) -> None:
        self.accesses.allocate(key, self.gpu.current_stream(), line())

    def freed(self, key: int, size: int) -> None:
        self.accesses.free(key, line())

    def pin(self, tensor: Tensor) -> Tensor:
        """Treat a tensor of the host as pinned."""
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        self._pinned[storage._cdata] = range(begin, begin + storage.nbytes())
        self.accesses.blocks[storage._cdata] = Block(self.gpu.host(), [])
        weakref.finalize(storage, self._unpin, storage._cdata).atexit = False
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is pinned; a storage inside that of another one is, too, and is
        watched from now on."""
        inside = any(tensor.data_ptr() in addresses for addresses in self._pinned.values())
        if inside and key_of(tensor) not in self._pinned:
            self.pin(tensor)
        return inside

    def _unpin(self, key: int) -> None:
        """The allocator of pinned memory waits for every stream that used it."""
        del self._pinned[key], self.accesses.blocks[key]

    # --- operators ---

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = list(tensors_of([*args, *kwargs.values()])), list(tensors_of([result]))
        for tensor in [*given, *made]:
            self.saw(tensor)
        if (copy := host_copy(func, args, kwargs)) is not None:
            self._copied(func, args, result, *copy)
            return
        touched = list(accesses(func, args, kwargs, result))
        if on_device([*given, *made]):
            what = on_device(given) and needs_value(func, args, kwargs)
            if not what and takes_from_host(given):
                self._wait(f"{func} copies a tensor of the host to the device")
            if touched:
                self._issue(func, args, kwargs, result, touched)
            if what:
                self._wait(f"{func} needs {what}")
        elif self._pinned and any(self._is_pinned(t) for t, _ in touched if t.device.type == "cpu"):
            self.accesses.access(self.gpu.host(), f"{func} at {line()}", touched)

    def _issue(
        self, func: Any, args: Any, kwargs: Any, result: Any, touched: list[tuple[Tensor, bool]]
    ) -> None:
        self.operators += 1
        stream = self.gpu.issue()
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t, _ in touched)
        if recorded and stream is not self.gpu.compute:
            raise NotImplementedError(
                f"{func} at {line()} is recorded by autograd on {stream.name}"
            )
        number = self.accesses.access(stream, f"{func} at {line()}", touched)
        if stream is self.gpu.compute:
            event = event_of(func, args, kwargs, result)
            if isinstance(event, Computing):
                self.overlap.computed[number] = event

    def _copied(
        self, func: Any, args: Any, result: Tensor, source: str, target: str, blocks: bool
    ) -> None:
        """A copy makes the host wait, unless it is asked not to and the host's memory is pinned."""
        fills = func is torch.ops.aten.copy_.default
        read = args[1] if fills else args[0]
        host = read if source == "cpu" else result
        if target == "cpu" and not fills and not blocks:
            self.pin(host)  # as torch does (aten/src/ATen/native/TensorConversions.cpp)
        pinned = not host.numel() or self._is_pinned(host)
        self.operators += 1
        way = "device to the host" if source == DEVICE else "host to the device"
        name = f"the copy from the {way} at {line()}"
        self.accesses.access(self.gpu.issue(), name, [(read, False), (result, True)])
        if blocks or not pinned:
            why = "without non_blocking" if blocks else "with memory that is not pinned"
            self._wait(f"a copy from the {way} {why}")

    def _wait(self, why: str) -> None:
        self.gpu.waits(why, self.gpu.issue().point())

    # --- collectives and messages ---

    def communicates(self, call: Call, func: Any, args: Sequence[Any]) -> Work:
        read, written = arguments_of(call.kind, args)
        stream, is_async = self.gpu.issue(), _is_async(func, args)
        if is_async:
            current, stream = stream, self._stream(group_of(args))
            stream.after(current.point())
        begin = stream.seen(self.gpu.compute)
        touched = [(tensor, False) for tensor in read] + [(tensor, True) for tensor in written]
        what = f"{call.kind} over {call.axis} at {line()}"
        number = self.accesses.access(stream, what, touched)
        if call.axis != ONE_RANK:
            phase = self.action.kind.value if self.action else "-"
            self.overlap.launched(Flight(call, phase, stream, number, begin))
        if is_async:
            return self._work(stream, list(tensors_of(args)))
        return super().communicates(call, func, args)

    def batch(self, operations: list[P2POp]) -> list[Work]:
        """Take the place of `dist.batch_isend_irecv`."""
        held = dict(self._held)
        for each in operations:
            each.op(each.tensor, each.peer, each.group)
        self._held = held  # the works of single messages do not exist in a batch
        stream, tensors = self._stream(operations[0].group), [each.tensor for each in operations]
        return [self._work(stream, tensors)]

    def _stream(self, group: ProcessGroup) -> Stream:
        name = group.group_name
        if name not in self._streams:
            self._streams[name] = Stream(self.gpu, f"NCCL's stream of {self._axes.of(group)}")
        return self._streams[name]

    def _work(self, stream: Stream, tensors: list[Tensor]) -> Work:
        end = stream.point()

        def wait() -> None:
            self.gpu.touch()
            self.gpu.current_stream().after(end)
            self._held.pop(work, None)

        work = Work(wait)
        self._held[work] = tensors
        return work


def _is_async(func: Any, args: Sequence[Any]) -> bool:
    """The argument async_op, which messages do not have."""
    names = (argument.name for argument in func._schema.arguments)
    return all(value for name, value in zip(names, args, strict=False) if name == "async_op")


# --- threads of the host ---


@contextmanager
def checking(mesh: Mesh, device: Device, rates: Rates = H100) -> Iterator[Races]:
    """A context in which races are looked for, in this thread and in all that start in it.

    Args:
        device: the fake GPU.
        rates: those of a device, for the seconds in the report.
    """
    races = Races(mesh, device, rates)
    with (
        patch.object(torch.accelerator, "current_stream", device.current_stream),
        patch.object(Tensor, "record_stream", lambda *of: races.accesses.record_stream(*of)),
        patch.object(dist, "batch_isend_irecv", races.batch),
        watch_resizes(races),
        _threads(races),
        races,
    ):
        yield races


@contextmanager
def _threads(races: Races) -> Iterator[None]:
    """A context in which threads begin with what their starter had done and seen, and `join` adds
    what they did. The modes of torch belong to a thread, and so are entered in every one."""
    device, backward = races.gpu, torch.autograd.backward
    start, join = threading.Thread.start, threading.Thread.join

    def started(thread: threading.Thread) -> None:
        point, run = device.host().point(), thread.run

        def running() -> None:
            with OnFakeGpu(device), races:
                device.host().after(point)
                run()

        thread.run = running  # type: ignore[method-assign]
        start(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive() and (lane := device.host_lanes.pop(thread, None)):
            device.host().after(lane.point())

    def in_a_thread(*args: Any, **kwargs: Any) -> None:
        in_step = device.here.in_step

        def target() -> None:
            device.set_device(INDEX)
            device.here.in_step = in_step
            backward(*args, **kwargs)

        with ThreadPoolExecutor(1, "of autograd") as pool:  # joins its thread
            done = pool.submit(target)
        done.result()

    with (
        patch.object(threading.Thread, "start", started),
        patch.object(threading.Thread, "join", joined),
        patch.object(torch.autograd, "backward", in_a_thread),
    ):
        yield


# --- the report ---


def describe_races(report: dict[str, Any], device: Rates) -> str:
    found = report["findings"]
    rows = [(f"one step, with times on {device.name}", "count", "MB", "bare", "GFLOP beside",
             "wire ms", "exposed ms")]  # fmt: skip
    for name, row in report["overlap"].items():
        size, beside = f"{row['bytes'] / 1e6:,.3f}", f"{row['flops'] / 1e9:,.3f}"
        seconds = (f"{1e3 * row[each]:,.3f}" for each in ("wire_seconds", "exposed_seconds"))
        rows.append((name, f"{row['count']:,}", size, f"{row['bare']:,}", beside, *seconds))
    return "\n".join(
        [
            f"{title(report)}: {len(found)} findings in {report['operators']:,} operators; "
            f"{report['compared']:,} pairs of accesses compared",
            *(f"  {finding}" for finding in found),
            "",
            table(rows),
        ]
    )
