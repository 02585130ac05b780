"""How much computing can hide each collective.

A collective is hidden by what the compute stream does at the same time: all that is ordered neither
before its start nor after its end. Its start waits for what its stream had waited for when it was
launched; its end is waited for when the compute stream next joins that stream, directly or through
others. For a collective of tensor parallelism this is what is issued between its start and its
`wait()`. A gather of FSDP in forward is launched after the layer before it has been issued, and yet
runs beside that layer, because its stream waits only for the layer before that.

Several collectives may count the same computing. The host is assumed to be ahead of the device.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from costs.events import Attention, Moved, Product
from parallel.pipeline.actions import Action
from tools.streams.clocks import Lane
from tools.streams.device import Device

Computing = Product | Attention | Moved
OUTSIDE = "-"  # the phase of what runs between actions


@dataclass
class Flight:
    """One collective on its way."""

    axis: str
    kind: str
    bytes: int  # of the whole tensor
    phase: str  # the letter of the action in which it was launched
    lane: Lane
    number: int  # of the lane's work
    begin: int  # the compute stream's work up to here is ordered before it
    end: int | None = None  # after here: after it

    @property
    def name(self) -> str:
        """The row to which it belongs."""
        return f"{self.axis} {self.kind} {self.phase}"


@dataclass
class Overlap:
    """Records the collectives of a step, and what the compute stream computes."""

    device: Device
    flights: list[Flight] = field(default_factory=list)
    phase: str = OUTSIDE
    open: list[Flight] = field(default_factory=list)  # those whose end is not known yet
    computed: dict[int, Computing] = field(default_factory=dict)  # by number of the stream's work

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """A context for the pipeline's runner."""
        self.phase = action.kind.value
        yield
        self.phase = OUTSIDE

    def clear(self) -> None:
        """Forget everything, before the step that is to be recorded."""
        self.flights.clear()
        self.open.clear()
        self.computed.clear()

    def launched(
        self, axis: str, kind: str, size: int, lane: Lane, number: int, begin: int
    ) -> None:
        flight = Flight(axis, kind, size, self.phase, lane, number, begin)
        if lane is self.device.compute:
            flight.end = begin
        else:
            self.open.append(flight)
        self.flights.append(flight)

    def joined(self) -> None:
        """The compute stream has waited for another one."""
        compute, left = self.device.compute, []
        for flight in self.open:
            if compute.seen(flight.lane) >= flight.number:
                flight.end = compute.done
            else:
                left.append(flight)
        self.open = left

    def beside(self, flight: Flight) -> list[Computing]:
        """What can run at the same time."""
        end = self.device.compute.done if flight.end is None else flight.end
        numbers = range(flight.begin + 1, end + 1)
        return [self.computed[n] for n in numbers if n in self.computed]


def table(overlap: Overlap) -> dict[str, Counter[str]]:
    """The collectives of a step, summed by axis, kind and phase:

    count   how many there are
    bytes   of the whole tensors
    bare    how many have no matrix product or attention beside them
    flops   of the products and attention beside them
    """
    rows: dict[str, Counter[str]] = {}
    for flight in sorted(overlap.flights, key=lambda flight: flight.name):
        beside = overlap.beside(flight)
        flops = int(sum(e.flops for e in beside if isinstance(e, (Product, Attention))))
        row = rows.setdefault(flight.name, Counter())
        row.update(count=1, bytes=flight.bytes, bare=int(flops == 0), flops=flops)
    return rows
