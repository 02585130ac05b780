"""The host's side of the fake GPU, for the check of races: pinned memory, copies, and threads
(those that the code starts, and the one in which autograd runs backward).

On a GPU autograd runs backward in a thread of its own, whose current device it sets (torch/csrc/
autograd/engine.cpp, Engine::thread_init), and each node on the stream that was current in its
forward. Here backward runs in a thread too, on the compute stream; races.py raises an error if
autograd records an operator on another stream.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from costs.as_on_gpu import DEVICE, AsOnGpu
from costs.operators import copies_values
from tools.rehearse.device import INDEX, Device, Stream
from tools.rehearse.races import Races

_CUDA = ("Event", "Stream", "stream", "current_stream", "synchronize", "current_device",
         "set_device", "is_initialized")  # fmt: skip


class InThisThread(TorchDispatchMode):
    """Passes the operators of the calling thread to a tape."""

    def __init__(self, tape: TorchDispatchMode) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tape.__torch_dispatch__(func, types, args, kwargs)


class HostMemory(TorchFunctionMode):
    """Makes the host's code for GPUs work without one: pinned memory, and copies to `cuda`."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self.races = races

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.pin_memory:
            return self.races.pin(args[0].clone())
        if func == Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            return func(args[0], DEVICE, *args[2:], **kwargs)
        if kwargs.pop("pin_memory", False):  # zeros, because the save refuses what is not finite
            return self.races.pin(torch.zeros(*args, **kwargs))
        if copies_values(func, kwargs):
            self.races.device.waits(f"{func.__name__}() copies to the device", {})
        return func(*args, **kwargs)


@contextmanager
def host_of_gpu(races: Races, tape: TorchDispatchMode) -> Iterator[None]:
    """A context in which the host's code for GPUs works, and `tape` sees the operators of all
    threads that start in it. The calling thread must enter the tape itself."""
    device = races.device

    def modes() -> list[AbstractContextManager[Any]]:
        return [AsOnGpu(), HostMemory(races), InThisThread(tape)]

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        races.accesses.record_stream(tensor, stream)

    with ExitStack() as stack:
        for name in _CUDA:
            stack.enter_context(patch.object(torch.cuda, name, getattr(device, name)))
        accelerator = patch.object(torch.accelerator, "current_stream", device.current_stream)
        stack.enter_context(accelerator)
        stack.enter_context(patch.object(Tensor, "record_stream", record_stream))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", races.nccl.batch))
        stack.enter_context(_threads(device, modes))
        stack.enter_context(HostMemory(races))
        yield


@contextmanager
def _threads(
    device: Device, modes: Callable[[], list[AbstractContextManager[Any]]]
) -> Iterator[None]:
    """A context in which threads begin with what their starter had done and seen, and `join` adds
    what they did. `modes`: contexts to be entered in every thread, because modes of torch belong
    to a thread."""
    start, run, join = (getattr(threading.Thread, name) for name in ("start", "run", "join"))
    begun: dict[threading.Thread, Any] = {}

    def started(thread: threading.Thread) -> None:
        begun[thread] = device.host().point()
        start(thread)

    def running(thread: threading.Thread) -> None:
        with ExitStack() as stack:
            for mode in modes():
                stack.enter_context(mode)
            device.host().after(begun.pop(thread, {}))
            run(thread)

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        join(thread, timeout)
        if not thread.is_alive() and thread in device.host_lanes:
            device.host().after(device.host_lanes[thread].point())

    with (
        patch.object(threading.Thread, "start", started),
        patch.object(threading.Thread, "run", running),
        patch.object(threading.Thread, "join", joined),
        patch.object(torch.autograd, "backward", _in_a_thread(device, torch.autograd.backward)),
    ):
        yield


def _in_a_thread(device: Device, backward: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        failed: list[BaseException] = []
        in_step = device.in_step

        def target() -> None:
            device.set_device(INDEX)
            device.in_step = in_step
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=target, name="of autograd", daemon=True)
        thread.start()
        thread.join()
        device.host_lanes.pop(thread, None)
        if failed:
            raise failed[0]

    return run
