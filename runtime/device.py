"""What the host must take care of when it works with a device: in threads, and to measure time."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def device_thread(target: Callable[..., None], name: str, *args: Any) -> threading.Thread:
    """Make a daemon thread that runs `target(*args)` on the caller's current device.

    The current device belongs to a thread: a new one has device 0. What touches a device there
    would create a context on device 0 from every rank of the machine, about 0.5 GB each, and would
    wait for the training stream of the rank that owns it.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


class DeviceClock:
    """Measures the work on the current stream from its construction to `stop`, without waiting."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.begin.record()

    def stop(self) -> Callable[[], float]:
        """Return a function that waits for the work and returns its seconds."""
        self.end.record()

        def seconds() -> float:
            self.end.synchronize()
            return self.begin.elapsed_time(self.end) / 1e3

        return seconds
