"""Reads the step that a run has traced (runtime/profiling/trace.py). Needs no torch."""

from collections import defaultdict
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from costs.timeline import MICROSECONDS, Timeline
from errors import UserError
from parallel.pipeline.actions import Action, Kind
from parallel.pipeline.simulate import Event
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
