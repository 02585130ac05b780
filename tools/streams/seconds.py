"""How long collectives take on a device, and how much of it computing can hide."""

from costs.collectives import rounds
from tools.plan.time import StepTime
from tools.streams.overlap import Flight, Overlap


def seconds(overlap: Overlap, time: StepTime) -> dict[str, tuple[float, float]]:
    """{name of a row: (seconds on the wire, seconds of them exposed)}, at the rates of `time`.

    What is exposed is a lower bound: several collectives may be hidden by the same computing here,
    and no rank waits for another one."""
    found: dict[str, tuple[float, float]] = {}
    for flight in overlap.flights:
        wire, exposed = found.get(flight.name, (0.0, 0.0))
        mine = _wire(flight, time)
        beside = sum((time.rates.operation(each) for each in overlap.beside(flight)), 0.0)
        found[flight.name] = wire + mine, exposed + max(0.0, mine - beside)
    return found


def _wire(flight: Flight, time: StepTime) -> float:
    if flight.kind in ("send", "receive"):
        return time.message_seconds
    if flight.axis in ("tp", "dp_shard", "dp_replicate"):
        return time.links.collective(flight.axis, flight.bytes, rounds(flight.kind))
    return time.links.device.collective_seconds  # a few numbers
