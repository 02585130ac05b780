"""Seconds of what was recorded, at the rates of a device.

a product               2·m·n·(k + ramp) / (peak · efficiency), never less than its bytes take
attention               its operations / (peak · efficiency)
every other operation   bytes read and written / memory's rate
a collective over tp    links.py; hidden as far as something is computed before the wait for it
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from costs.links import Links
from costs.recorder import Attention, Moved, Phase, Product, Sent, Waited
from hardware import Device


class Cost(NamedTuple):
    """Seconds of a phase: what it computes, what it sends over tp, and how much of that computing
    waits for."""

    computing: float
    wire: float
    exposed: float

    @property
    def total(self) -> float:
        return self.computing + self.exposed


@dataclass(frozen=True)
class Rates:
    """Of one rank of a mesh."""

    device: Device
    links: Links
    width: int  # bytes of a number that is computed with

    @cached_property
    def _peak(self) -> float:
        return self.device.peak(self.width)

    def memory(self, size: float) -> float:
        """Seconds to read and write so many bytes."""
        return size / (self.device.memory_bytes_per_second * self.device.memory_efficiency)

    def operation(self, event: Product | Attention | Moved) -> float:
        device = self.device
        if isinstance(event, Product):
            flops = event.flops * (1 + device.matmul_ramp / event.inner)
            busy = max(flops / (self._peak * device.matmul_efficiency), self.memory(event.bytes))
        elif isinstance(event, Attention):
            busy = event.flops / (self._peak * device.attention_efficiency)
        else:
            busy = self.memory(event.bytes)
        return busy + device.kernel_seconds

    def cost(self, phase: Phase, is_weight: bool = False) -> Cost:
        """`is_weight`: of weight gradients that were put off. They go on from unit to unit, so what
        is gathered first comes behind the last products of the unit before (run_jobs in
        parallel/deferred.py)."""
        computing = wire = exposed = last = 0.0
        started: dict[int, tuple[float, float]] = {}  # when, in computing; and seconds it takes
        at_once = 0.0  # what waits before anything is computed
        for event in phase.events:
            if isinstance(event, Sent):
                times = 2 if event.kind == "all_reduce" else 1
                seconds = self.links.collective("tp", event.bytes, times)
                started[event.number] = computing, seconds
                wire, last = wire + seconds, computing
            elif isinstance(event, Waited):
                began, seconds = started.pop(event.number)
                exposed += max(0.0, seconds - (computing - began))
                at_once += seconds if computing == 0.0 else 0.0
            else:
                computing += self.operation(event)
        if is_weight:
            exposed -= min(at_once, computing - last)
        return Cost(computing, wire, exposed)
