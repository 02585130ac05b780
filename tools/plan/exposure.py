"""Seconds of a rank's communication in a step, and how many of them are exposed."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from costs.seconds import Cost
from parallel.pipeline.actions import FORWARD
from parallel.pipeline.lower import result_of
from tools.plan.layout import SHARDED_OVER, Layout
from tools.plan.time import StepTime


class Seconds(NamedTuple):
    """Seconds of communication over one axis, in one step."""

    wire: float
    exposed: float  # the part during which computation waits


def seconds_on_the_wire(time: StepTime, pp_rank: int) -> dict[str, Seconds]:
    """Seconds by axis, on pipeline rank `pp_rank`. The exposed seconds of `pp` are by how much the
    whole step is longer because messages take time. Those of gathers and reductions are shared out
    to the axes of experts and of other weights as their seconds on the wire."""
    layout = time.layout.at(pp_rank)
    parallel, m = layout.config.parallel, layout.num_microbatches
    gathers = waits = reductions = replicas = 0.0
    for stage in layout.stages:
        gather, scatter, over_replicas = time.data_parallel(stage)
        gathers += gather * (2 * m if parallel.zero_stage == 3 else 1)
        reductions += scatter * (m if parallel.zero_stage >= 2 else 1)
        replicas += over_replicas
        waits += m * time.waits(stage).total
    late = _late_start(time, pp_rank)
    tail = max(0.0, time.reductions[pp_rank] - time.timeline.ranks[pp_rank][-1].end)
    over_shards = max(0.0, tail - replicas) if replicas else tail
    table = {
        "tp": _inside_units(time, layout, "tp"),
        "cp": _inside_units(time, layout, "cp"),
        "ep": _inside_units(time, layout, "ep"),
    }
    exposed = waits + late + over_shards, tail - over_shards
    for axis, share in _shares(time, layout, "shards").items():
        table[axis] = Seconds((gathers + reductions) * share, exposed[0] * share)
    for axis, share in _shares(time, layout, "replicas").items():
        table[axis] = Seconds(replicas * share, exposed[1] * share)
    results = [result_of(action, layout.num_stages) for action in layout.schedule[pp_rank]]
    sent = sum(
        message is not None and layout.where[message.stage] != pp_rank for message in results
    )
    table["pp"] = Seconds(sent * time.message_seconds, time.waiting_for_messages)
    return {axis: seconds for axis, seconds in table.items() if seconds.wire}


def _shares(time: StepTime, layout: Layout, over: str) -> dict[str, float]:
    """Which part of the seconds of collectives over shards, or over replicas, are on each axis."""
    seconds: dict[str, float] = {}
    for _, unit in (each for stage in layout.stages for each in layout.fsdp_units(stage)):
        gather, scatter, replicas = time.of_unit(unit)
        axis = SHARDED_OVER[unit.over][over == "replicas"]
        one = replicas if over == "replicas" else gather + scatter
        seconds[axis] = seconds.get(axis, 0.0) + one
    total = sum(seconds.values())
    return {axis: one / total if total else 0.0 for axis, one in seconds.items()}


def _inside_units(time: StepTime, layout: Layout, axis: str) -> Seconds:
    """Seconds of the communication that is recorded from units."""
    units = [unit for stage in layout.stages for unit in layout.units(stage)]

    def seconds(which: Callable[[Cost], Mapping[str, float]]) -> float:
        def over_axis(cost: Cost) -> float:
            return which(cost).get(axis, 0.0)

        parts = (time.part(unit, seconds=over_axis).total for unit in units)
        return sum(layout.num_microbatches * part for part in parts)

    return Seconds(seconds(attrgetter("wire")), seconds(attrgetter("exposed")))


def _late_start(time: StepTime, pp_rank: int) -> float:
    """Seconds by which the first forwards of this rank's stages are longer than later ones, because
    they wait for weights."""
    late = 0.0
    for action, start, end in time.timeline.ranks[pp_rank]:
        if action.kind is FORWARD and action.microbatch == 0:
            late += end - start - time.costs.forward[action.stage]
    return max(0.0, late)
