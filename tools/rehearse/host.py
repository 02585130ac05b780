"""The host's threads, for the check of races: those that the code starts, and the one in which
autograd runs backward.

On a GPU autograd runs backward in a thread of its own, whose current device it sets (torch/csrc/
autograd/engine.cpp, Engine::thread_init), and each node on the stream that was current in its
forward. Here backward runs in a thread too, on the compute stream; races.py raises an error if
autograd records an operator on another stream.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from costs.storages import watch_resizes
from hardware import H100
from hardware import Device as Rates
from parallel.mesh import Mesh
from tools.rehearse.device import INDEX, Device, Stream
from tools.rehearse.fake_gpu import OnFakeGpu
from tools.rehearse.races import Races


@contextmanager
def checking(mesh: Mesh, device: Device, rates: Rates = H100) -> Iterator[Races]:
    """A context in which races are looked for, in this thread and in all that start in it.

    Args:
        device: the fake GPU.
        rates: those of a device, for the seconds in the report.
    """
    races = Races(mesh, device, rates)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        races.accesses.record_stream(tensor, stream)

    with (
        patch.object(torch.accelerator, "current_stream", device.current_stream),
        patch.object(Tensor, "record_stream", record_stream),
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
    device = races.gpu
    start, run, join = (getattr(threading.Thread, name) for name in ("start", "run", "join"))
    begun: dict[threading.Thread, Any] = {}

    def started(thread: threading.Thread) -> None:
        begun[thread] = device.host().point()
        start(thread)

    def running(thread: threading.Thread) -> None:
        with OnFakeGpu(device), races:
            device.host().after(begun.pop(thread, {}))
            run(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive() and (lane := device.host_lanes.pop(thread, None)):
            device.host().after(lane.point())

    with (
        patch.object(threading.Thread, "start", started),
        patch.object(threading.Thread, "run", running),
        patch.object(threading.Thread, "join", joined),
        patch.object(torch.autograd, "backward", _in_a_thread(device, torch.autograd.backward)),
    ):
        yield


def _in_a_thread(device: Device, backward: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        in_step = device.here.in_step

        def target() -> None:
            device.set_device(INDEX)
            device.here.in_step = in_step
            backward(*args, **kwargs)

        with ThreadPoolExecutor(1, "of autograd") as pool:  # joins its thread
            done = pool.submit(target)
        done.result()

    return run
