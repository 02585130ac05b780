"""How much computing can hide each collective.

A collective is hidden by what the compute stream does at the same time: all that is ordered neither
before its start nor after its end. Its start waits for what its stream had waited for when it was
launched; its end is waited for when the compute stream next joins that stream, directly or through
others. For a collective of tensor parallelism this is what is issued between its start and its
`wait()`. A gather of FSDP in forward is launched after the layer before it has been issued, and yet
runs beside that layer, because its stream waits only for the layer before that.

Several collectives may count the same computing. The host is assumed to be ahead of the device.
"""

from dataclasses import dataclass, field

from costs.collectives import Call
from tools.rehearse.device import Device, Lane


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


@dataclass
class Overlap:
    """Records the collectives of a step, and what the compute stream computes."""

    device: Device
    flights: list[Flight] = field(default_factory=list)
    open: list[Flight] = field(default_factory=list)  # those whose end is not known yet
    # of products and attention, by number of the compute stream's work
    flops: dict[int, int] = field(default_factory=dict)

    def launched(self, flight: Flight) -> None:
        if flight.lane is self.device.compute:
            flight.end = flight.begin
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

    def beside(self, flight: Flight) -> int:
        """The FLOPs of the products and attention that can run at the same time."""
        end = self.device.compute.done if flight.end is None else flight.end
        return sum(self.flops.get(number, 0) for number in range(flight.begin + 1, end + 1))

    def table(self) -> dict[str, dict[str, int]]:
        """The collectives of a step, summed by axis, kind and phase:

        count   how many there are
        bytes   of the whole tensors
        bare    how many have no matrix product or attention beside them
        flops   of the products and attention beside them
        """
        rows: dict[str, dict[str, int]] = {}
        for flight in sorted(self.flights, key=lambda flight: flight.name):
            flops = self.beside(flight)
            mine = {"count": 1, "bytes": flight.call.bytes, "bare": int(not flops), "flops": flops}
            row = rows.setdefault(flight.name, dict.fromkeys(mine, 0))
            for name, number in mine.items():
                row[name] += number
        return rows
