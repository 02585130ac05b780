"""Reads the step that a run has traced (runtime/profiling/trace.py), and computes the mean cost of
each action. Needs no torch.
"""

from collections import defaultdict
from typing import Annotated, Any

from pydantic import Field, ValidationError

from costs.timeline import MICROSECONDS, Timeline
from errors import UserError
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.simulate import Costs, Event
from runtime.schema import Natural, Strict

REMEDY = "give a trace.json that a run has written"


class _Action(Strict, extra="ignore"):
    kind: Annotated[Kind, Field(strict=False)]  # written as its letter
    stage: Natural
    microbatch: Natural


class _Event(Strict, extra="ignore"):
    tid: Natural  # the rank
    ts: float  # microseconds
    dur: Annotated[float, Field(ge=0)]
    args: _Action


def from_chrome(trace: Any, name: str = "trace", pipeline: int = 0) -> Timeline:
    """Convert a trace of a run to a timeline in milliseconds.

    Args:
        trace: the parsed JSON.
        name: what error messages call the trace.
        pipeline: the number of the pipeline to read.

    Raises:
        UserError: it is not such a trace.
    """
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UserError(name, trace, "has no list traceEvents", REMEDY)
    lanes: dict[int, list[Event]] = defaultdict(list)
    seen: set[Action] = set()
    for i, told in enumerate(events):
        at = f"{name}: traceEvents[{i}]"
        # skip names of lanes, and anything that a viewer added
        if isinstance(told, dict) and (told.get("ph") != "X" or told.get("pid", 0) != pipeline):
            continue
        try:
            event = _Event.model_validate(told)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join((at, *map(str, problem["loc"])))
            raise UserError(place, problem["input"], problem["msg"], REMEDY) from None
        action = Action(event.args.kind, event.args.stage, event.args.microbatch)
        if action in seen:
            why, remedy = "occurs more than once", "keep the events of a single step"
            raise UserError(at, str(action), why, remedy)
        seen.add(action)
        start = event.ts / MICROSECONDS
        lanes[event.tid].append(Event(action, start, start + event.dur / MICROSECONDS))
    missing = set(range(max(lanes, default=0) + 1)) - lanes.keys()
    if missing:
        why = f"there is no event of rank {min(missing)}"
        raise UserError(f"{name}: tid", sorted(lanes), why, "merge the events of all ranks")
    timeline = Timeline(
        [sorted(lanes[rank], key=lambda event: event.start) for rank in range(len(lanes))]
    )
    if timeline.step_time <= 0:
        raise UserError(f"{name}: dur", 0, "the events take no time", REMEDY)
    return timeline


def measured_costs(timeline: Timeline, communication: float = 0.0) -> Costs:
    """Average the measured time of each kind of action on each stage. `communication`: the time to
    assume for a message.

    A whole backward counts half as an input gradient and half as a weight gradient, which keeps the
    mean of a stage's total backward time.
    """
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    stages = set()
    for lane in timeline.ranks:
        for action, start, end in lane:
            stages.add(action.stage)
            if action.kind is BACKWARD:
                for kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
                    durations[kind, action.stage].append((end - start) / 2)
            else:
                durations[action.kind, action.stage].append(end - start)

    def means(kind: Kind) -> list[float]:
        return [
            sum(d) / len(d) if (d := durations[kind, s]) else 0.0 for s in range(max(stages) + 1)
        ]

    return Costs(means(FORWARD), means(BACKWARD_INPUT), means(BACKWARD_WEIGHT), communication)
