"""Measures when each action of a real step begins and ends, on every rank, on one clock."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallel.pipeline.actions import Action
from parallel.pipeline.simulate import Event


class ActionRecorder:
    """Hand it to the runner as `record`. Waiting for a message is before the action and not in it.

    On a GPU the times are those at which the device reached the action's begin and end in its
    stream: nothing waits for it.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._marks: list[tuple[Action, Any, Any]] = []
        if device == "cuda":
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
            self._zero_seconds = time.perf_counter()

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        begin = self._mark()
        yield
        self._marks.append((action, begin, self._mark()))

    def events(self, offset: float) -> list[Event]:
        """What was recorded, in milliseconds, `offset` seconds taken from this process's clock.
        Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return [
            Event(action, self._milliseconds(a, offset), self._milliseconds(b, offset))
            for action, a, b in self._marks
        ]

    def _mark(self) -> Any:
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, mark: Any, offset: float) -> float:
        if self.device == "cuda":
            return (self._zero_seconds - offset) * 1e3 + self._zero.elapsed_time(mark)
        return (mark - offset) * 1e3


def clock_offset(device: str, rounds: int = 16) -> float:
    """How far this process's clock is ahead of rank 0's, in seconds; every rank must call it.

    All ranks leave a barrier at nearly the same moment, so the difference of what their clocks say
    then is their offset; the median over several barriers is good to about the time of one.
    """
    mine = []
    for _ in range(rounds):
        dist.barrier()
        mine.append(time.perf_counter())
    first = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.broadcast(first, src=0)
    return statistics.median(a - b for a, b in zip(mine, first.tolist(), strict=True))
