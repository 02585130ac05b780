"""Seconds of a recorded computation, at the rates of a device.

a matrix product        ⌈tiles / multiprocessors⌉ waves of tiles of the result, each at the peak ·
                        efficiency of the whole device; or the time of its bytes if longer
attention               FLOPs / (peak · efficiency)
every other operation   bytes read and written / (memory bandwidth · efficiency)
a collective            links.py; over each of tp, cp and ep one runs after another, and is hidden
                        behind what is computed between its start and its wait
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from costs.events import Attention, Moved, Product, Sent, Waited
from costs.links import Links
from costs.recorder import Phase
from hardware import Device


class Cost(NamedTuple):
    """Seconds of one phase."""

    computing: float
    wire: Mapping[str, float]  # of collectives, by axis: tp, cp and ep
    exposed: Mapping[str, float]  # the part of `wire` during which computation waits

    @property
    def waiting(self) -> float:
        """All exposed seconds."""
        return sum(self.exposed.values())

    @property
    def total(self) -> float:
        return self.computing + self.waiting


@dataclass(frozen=True)
class Rates:
    """The rates of one rank of a mesh."""

    device: Device
    links: Links
    width: int  # bytes of a number of the dtype in which it computes

    def memory(self, size: float) -> float:
        """Seconds to read and write `size` bytes in total."""
        return size / (self.device.memory_bytes_per_second * self.device.memory_efficiency)

    def operation(self, event: Product | Attention | Moved) -> float:
        device = self.device
        if isinstance(event, Product):
            tiles = event.tiles(device.tile) // event.launches
            waves = -(-tiles // device.multiprocessors) * event.launches
            # a wave takes equally long whether or not all multiprocessors have a tile
            flops = 2.0 * waves * device.multiprocessors * device.tile**2 * event.inner
            peak = device.peak(event.width) * device.matmul_efficiency
            busy = max(flops / peak, self.memory(event.bytes))
        elif isinstance(event, Attention):
            busy = event.flops / (device.peak(self.width) * device.attention_efficiency)
        else:
            busy = self.memory(event.bytes)
        launches = event.launches if isinstance(event, Product) else 1
        return busy + launches * device.kernel_seconds

    def cost(self, phase: Phase, is_weight: bool = False) -> Cost:
        """The cost of one phase. `is_weight`: the phase computes deferred weight gradients. These
        run continuously from unit to unit, so the first gather of a unit overlaps with the last
        products of the previous unit (run_jobs in parallel/deferred.py)."""
        computing = waited = last = 0.0
        wire: dict[str, float] = defaultdict(float)
        exposed: dict[str, float] = defaultdict(float)
        at_once = 0.0  # seconds waited for before anything is computed
        # by number: the axis of a collective, and when it ends, in seconds of the phase
        ends: dict[int, tuple[str, float]] = {}
        # when the last one ends: collectives of one group run in the order of starts
        free: dict[str, float] = defaultdict(float)
        for event in phase.events:
            if isinstance(event, Sent):
                axis, kind, size = event.call
                seconds = self.links.seconds(kind, axis, size)
                free[axis] = max(free[axis], computing + waited) + seconds
                ends[event.number] = axis, free[axis]
                wire[axis], last = wire[axis] + seconds, computing
            elif isinstance(event, Waited):
                axis, end = ends.pop(event.number)
                wait = max(0.0, end - (computing + waited))
                exposed[axis], waited = exposed[axis] + wait, waited + wait
                at_once = waited if computing == 0.0 else at_once
            else:
                computing += self.operation(event)
        if is_weight and at_once:  # the inputs of weights are gathered over tp
            exposed["tp"] -= min(at_once, computing - last)
        return Cost(computing, wire, exposed)
