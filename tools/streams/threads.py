"""Threads on the pretended device: those that the code starts, and the one in which autograd runs
backward.

On a GPU autograd runs backward in a thread of its own, whose current device it sets (torch/csrc/
autograd/engine.cpp, Engine::thread_init), and each node on the stream that was current in its
forward. Here backward runs in a thread too, on the compute stream; watch.py raises an error if
autograd records an operator on another stream.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from tools.streams.device import Device

AUTOGRAD = "of autograd"


@contextmanager
def watched_threads(
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
            device.set_device(device.index)
            device.in_step = in_step
            try:
                backward(*args, **kwargs)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=target, name=AUTOGRAD, daemon=True)
        thread.start()
        thread.join()
        device.host_lanes.pop(thread, None)
        if failed:
            raise failed[0]

    return run
