"""A pretended device with streams, events and one current device per thread, which records what
waits for what instead of computing. It takes the place of `torch.cuda`.

A stream starts work when the host has issued it, and in the order in which it was issued. So all
that the host has waited for is ordered before work that it issues later, but not the reverse: the
host never waits unless it says so.
"""

import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tools.streams.clocks import Lane, Point
from tools.streams.findings import SYNC, THREAD, Findings, line


class Device:
    """Device number `index` of its machine, as one rank uses it. Its attributes have the names of
    those of `torch.cuda`."""

    def __init__(self, index: int, findings: Findings) -> None:
        self.index, self.findings = index, findings
        self.host_lanes: dict[threading.Thread, Lane] = {}
        self._thread = threading.local()
        self.Event = lambda *_, **__: Event(self)
        self.Stream = lambda *_, **__: Stream(self, _assigned(sys._getframe(1)))
        self.compute = Stream(self, "the compute stream")
        self.joined: Callable[[], None] = lambda: None  # called when the compute stream has waited

    # --- threads ---

    def host(self) -> Lane:
        """The lane of the calling thread."""
        thread = threading.current_thread()
        return self.host_lanes.setdefault(thread, Lane(f"the thread {thread.name}"))

    @property
    def in_step(self) -> bool:
        """Whether the calling thread is in a step, where the host should not wait."""
        return getattr(self._thread, "in_step", False)

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._thread.in_step = value

    def current_device(self) -> int:
        return getattr(self._thread, "index", 0)

    def set_device(self, index: int) -> None:
        self._thread.index = index

    def touch(self) -> None:
        """To be called by whatever uses the device: the thread must have chosen it."""
        if self.current_device() != self.index:
            name, now = threading.current_thread().name, self.current_device()
            self.findings.add(
                THREAD,
                f"the thread {name} uses device {self.index} at {line()} while its current device "
                f"is {now}",
            )

    # --- streams ---

    def current_stream(self, *_: Any) -> "Stream":
        return getattr(self._thread, "stream", self.compute)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def issue(self) -> "Stream":
        """The current stream, ordered after what the calling thread has done and seen."""
        self.touch()
        stream = self.current_stream()
        stream.after(self.host().point())
        return stream

    def waits(self, why: str, point: Point) -> None:
        """The calling thread waits for `point`; inside a step this is a finding."""
        self.touch()
        self.host().after(point)
        if self.in_step:
            self.findings.add(SYNC, f"{why} at {line()}")

    def synchronize(self, *_: Any) -> None:
        self.waits("synchronize()", self.compute.point())

    @staticmethod
    def is_initialized() -> bool:
        return True


def _assigned(frame: FrameType) -> str:
    """The name that a frame's current line assigns to."""
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(?:self\.)?(\w+)\b.*=", source)
    return found[1] if found else f"a stream made at {line()}"


class Stream(Lane):
    def __init__(self, device: Device, name: str) -> None:
        super().__init__(name)
        self.device = device

    def after(self, point: Point) -> None:
        super().after(point)
        if self is self.device.compute:
            self.device.joined()

    def wait_stream(self, stream: "Stream") -> None:
        self.device.touch()
        self.after(stream.point())

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.waits("Stream.synchronize()", self.point())


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self._point: Point = {}  # an event that was never recorded is complete

    def record(self, stream: Stream | None = None) -> None:
        self.device.touch()
        self._point = (stream or self.device.current_stream()).point()

    def wait(self, stream: Stream | None = None) -> None:
        self.device.touch()
        (stream or self.device.current_stream()).after(self._point)

    def synchronize(self) -> None:
        self.device.waits("Event.synchronize()", self._point)

    def elapsed_time(self, end: "Event") -> float:
        return 0.0
