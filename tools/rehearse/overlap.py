"""How much computing can hide each collective, and what that means in seconds of a device.

A collective is hidden by what the compute stream does at the same time: all that is ordered neither
before its start nor after its end. Its start waits for what its stream had waited for when it was
launched; its end is waited for when the compute stream next joins that stream, directly or through
others. For a collective of tensor parallelism this is what is issued between its start and its
`wait()`. A gather of FSDP in forward is launched after the layer before it has been issued, and yet
runs beside that layer, because its stream waits only for the layer before that.

Several collectives may count the same computing. The host is assumed to be ahead of the device.
"""

import itertools
from dataclasses import dataclass, field

from costs.collectives import Call
from costs.events import Attention, Moved, Product
from parallel.axes import FSDP_AXES
from tools.plan.time import StepTime
from tools.rehearse.device import Device, Lane

AXES_OF_LINKS = ("tp", "cp", "ep", *itertools.chain(*FSDP_AXES.values()))
Computing = Product | Attention | Moved


@dataclass
class Flight:
    """One collective on its way."""

    call: Call
    phase: str  # the letter of the action in which it was launched; `-`: between actions
    lane: Lane
    number: int  # of the lane's work
    begin: int  # the compute stream's work up to here is ordered before it
    end: int | None = None  # after here: after it

    @property
    def name(self) -> str:
        """The row to which it belongs."""
        return f"{self.call.axis} {self.call.kind} {self.phase}"

    def seconds(self, time: StepTime) -> float:
        """On the wire."""
        axis, kind, size = self.call
        if kind in ("send", "receive"):
            return time.message_seconds
        if axis in AXES_OF_LINKS:
            return time.links.seconds(kind, axis, size)
        return time.links.device.collective_seconds  # a few numbers, over another group


@dataclass
class Overlap:
    """Records the collectives of a step, and what the compute stream computes."""

    device: Device
    flights: list[Flight] = field(default_factory=list)
    open: list[Flight] = field(default_factory=list)  # those whose end is not known yet
    computed: dict[int, Computing] = field(default_factory=dict)  # by number of the stream's work

    def launched(self, flight: Flight) -> None:
        if flight.lane is self.device.compute:
            flight.end = flight.begin
        else:
            self.open.append(flight)
        self.flights.append(flight)

    def joined(self) -> None:
        """The compute stream has waited for another one."""
        compute = self.device.compute
        for flight in self.open:
            if compute.seen(flight.lane) >= flight.number:
                flight.end = compute.done
        self.open = [flight for flight in self.open if flight.end is None]

    def beside(self, flight: Flight) -> list[Computing]:
        """What can run at the same time."""
        end = self.device.compute.done if flight.end is None else flight.end
        numbers = range(flight.begin + 1, end + 1)
        return [self.computed[n] for n in numbers if n in self.computed]

    def table(self, time: StepTime) -> dict[str, dict[str, float]]:
        """The collectives of a step, summed by axis, kind and phase:

        count             how many there are
        bytes             of the whole tensors
        bare              how many have no matrix product or attention beside them
        flops             of the products and attention beside them
        wire_seconds      at the rates of `time`
        exposed_seconds   of them, at least: several collectives may be hidden by the same computing
                          here, and no rank waits for another one
        """
        rows: dict[str, dict[str, float]] = {}
        for flight in sorted(self.flights, key=lambda flight: flight.name):
            beside = self.beside(flight)
            flops = int(sum(e.flops for e in beside if isinstance(e, (Product, Attention))))
            wire, hidden = flight.seconds(time), sum(map(time.rates.operation, beside))
            mine = {
                "count": 1,
                "bytes": flight.call.bytes,
                "bare": int(flops == 0),
                "flops": flops,
                "wire_seconds": wire,
                "exposed_seconds": max(0.0, wire - hidden),
            }
            row = rows.setdefault(flight.name, dict.fromkeys(mine, 0))
            for name, number in mine.items():
                row[name] += number
        return rows
