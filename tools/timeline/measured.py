"""Reads the step that a run has traced (runtime/profiling/trace.py), and computes the mean cost of
each action. Needs no torch.
"""

from collections import defaultdict
from itertools import chain
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from costs.timeline import MICROSECONDS, Timeline
from errors import UserError
from parallel.pipeline.actions import Action, Kind
from parallel.pipeline.simulate import Costs, Event
from runtime.schema import Natural, Strict, first_problem


class _Action(Strict, extra="ignore"):
    kind: Annotated[Kind, Field(strict=False)]  # written as its letter
    stage: Natural
    microbatch: Natural


class _Event(Strict, extra="ignore"):
    tid: Natural  # the rank
    ts: float  # microseconds
    dur: Annotated[float, Field(ge=0)]
    args: _Action


class _Trace(Strict, extra="ignore"):
    traceEvents: list[dict[str, Any]]


_EVENTS = TypeAdapter(list[_Event])


def from_chrome(trace: Any, name: str = "trace", pipeline: int = 0) -> Timeline:
    """Convert a trace of a run to a timeline in milliseconds.

    Args:
        trace: the parsed JSON.
        name: what error messages call the trace.
        pipeline: the number of the pipeline to read.

    Raises:
        UserError: it is not such a trace.
    """
    lanes: dict[int, list[Event]] = defaultdict(list)
    seen: set[Action] = set()
    try:
        told = _Trace.model_validate(trace).traceEvents
        # without names of lanes, and anything that a viewer added
        mine = [e for e in told if (e.get("ph"), e.get("pid", 0)) == ("X", pipeline)]
        for event in _EVENTS.validate_python(mine):
            action = Action(event.args.kind, event.args.stage, event.args.microbatch)
            if action in seen:
                remedy = "keep the events of a single step"
                raise UserError(name, str(action), "occurs more than once", remedy)
            seen.add(action)
            start, end = event.ts / MICROSECONDS, (event.ts + event.dur) / MICROSECONDS
            lanes[event.tid].append(Event(action, start, end))
    except ValidationError as error:
        why = f"is not the trace of a run: {first_problem(error)}"
        raise UserError(name, "traceEvents", why, "trace a step again") from None
    if missing := set(range(max(lanes, default=0) + 1)) - lanes.keys():
        why = f"there is no event of rank {min(missing)}"
        raise UserError(f"{name}: tid", sorted(lanes), why, "merge the events of all ranks")
    timeline = Timeline(
        [sorted(lanes[rank], key=lambda event: event.start) for rank in range(len(lanes))]
    )
    if timeline.step_time <= 0:
        raise UserError(f"{name}: dur", 0, "the events take no time", "trace a step again")
    return timeline


def measured_costs(timeline: Timeline, communication: float = 0.0) -> Costs:
    """Average the measured time of each kind of action on each stage. `communication`: the time to
    assume for a message.

    A whole backward counts half as an input gradient and half as a weight gradient, which keeps the
    mean of a stage's total backward time.
    """
    halves = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start, end in chain(*timeline.ranks):
        kinds = halves if action.kind is Kind.BACKWARD else [action.kind]
        for kind in kinds:
            durations[kind, action.stage].append((end - start) / len(kinds))
    stages = range(max(stage for _, stage in durations) + 1)
    means = (
        [fmean(durations[kind, s] or [0.0]) for s in stages] for kind in (Kind.FORWARD, *halves)
    )
    return Costs(*means, communication)
