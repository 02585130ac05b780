"""A fake device with streams, events and one current device per thread, which records what waits
for what instead of computing. It takes the place of `torch.cuda`.

A *lane* does its work in the order in which it was issued: a stream of the device, or a thread of
the host. Work on two lanes is ordered only by what one lane waited for: `Lane.after` joins what
another lane had done and seen at some point. These are vector clocks. (Fidge 1988; Mattern 1989.
Race detection with them: Flanagan and Freund 2009, FastTrack,
https://doi.org/10.1145/1542476.1542490.)

A stream starts work when the host has issued it. So all that the host has waited for is ordered
before work that it issues later, but not the reverse: the host never waits unless it says so.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from tools.rehearse.findings import SYNC, THREAD, line

INDEX = 3  # of the fake device in its machine: not 0, which every new thread has

Point = dict["Lane", int]  # lane → how much of its work is done; of a lane not named: nothing


class Lane:
    """A stream or a host thread. Its work is numbered from 1; `done` is the last number."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, 0
        self._seen: Point = {}  # of other lanes

    def seen(self, lane: "Lane") -> int:
        """The number of the last work of `lane` that is ordered before what this lane does next."""
        return self.done if lane is self else self._seen.get(lane, 0)

    def point(self) -> Point:
        """Everything that is ordered before what this lane does next."""
        return {**self._seen, self: self.done}

    def after(self, point: Point) -> None:
        """Order what this lane does next after `point`."""
        for lane, number in point.items():
            if lane is not self and number > self._seen.get(lane, 0):
                self._seen[lane] = number


class Here(threading.local):
    """What each thread has of its own."""

    index = 0  # its current device
    stream: "Stream | None" = None  # its current stream; None: the compute stream
    in_step = False  # whether it is in a step, where the host should not wait


class Device:
    """Device number `INDEX` of its machine, as one rank uses it. Its attributes have the names of
    those of `torch.cuda`."""

    def __init__(self) -> None:
        self.here = Here()
        self.host_lanes: dict[threading.Thread, Lane] = {}
        self.Event = lambda *_, **__: Event(self)
        self.Stream = lambda *_, **__: Stream(self, f"a stream made at {line()}")
        self.compute = Stream(self, "the compute stream")
        # what a tape listens to: a finding, of a kind; that the compute stream has waited; and that
        # a tensor of the host is pinned
        self.found: Callable[[str, str], None] = lambda kind, text: None
        self.joined: Callable[[], None] = lambda: None
        self.pin: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.set_device(INDEX)

    # --- threads ---

    def host(self) -> Lane:
        """The lane of the calling thread."""
        thread = threading.current_thread()
        return self.host_lanes.setdefault(thread, Lane(f"the thread {thread.name}"))

    def current_device(self) -> int:
        return self.here.index

    def set_device(self, index: int) -> None:
        self.here.index = index

    def touch(self) -> None:
        """To be called by whatever uses the device: the thread must have chosen it."""
        if (now := self.here.index) != INDEX:
            name = threading.current_thread().name
            self.found(THREAD, f"the thread {name}, with current device {now}, uses device {INDEX}")

    # --- streams ---

    def current_stream(self, *_: Any) -> "Stream":
        return self.here.stream or self.compute

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.here.stream = self.here.stream, stream
        try:
            yield
        finally:
            self.here.stream = before

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
        if self.here.in_step:
            self.found(SYNC, why)

    def synchronize(self, *_: Any) -> None:
        self.waits("synchronize()", self.compute.point())

    @staticmethod
    def is_initialized() -> bool:
        return True


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
