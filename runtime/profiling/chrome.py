"""Convert a timeline to a Chrome trace and back, and compute the mean cost of each action. Needs no
torch.

One lane ("thread") per rank, one event per action; https://ui.perfetto.dev and chrome://tracing
open it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from errors import UserError
from parallel.pipeline.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Kind,
)
from parallel.pipeline.simulate import Costs, Event, Timeline
from runtime.log.log_lines import is_count, is_number

NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "input gradient",
    BACKWARD_WEIGHT: "weight gradient",
}
REMEDY = "give a trace.json that a run has written"
LETTERS = [kind.value for kind in Kind]
MICROSECONDS = 1000.0  # per unit of the timeline, a millisecond


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Convert `timeline`, whose unit of time is a millisecond, to a trace."""
    process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "pipeline"}}
    events: list[dict[str, Any]] = [process]
    for rank in range(len(timeline.ranks)):
        thread = {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank}
        events.append({**thread, "args": {"name": f"rank {rank}"}})
    for rank, lane in enumerate(timeline.ranks):
        for action, start, end in lane:
            kind, stage, microbatch = action
            event = {"ph": "X", "name": str(action), "cat": NAMES[kind], "pid": 0, "tid": rank}
            ts, dur = (round(time * MICROSECONDS, 3) for time in (start, end - start))
            arguments = {"kind": kind.value, "stage": stage, "microbatch": microbatch}
            events.append({**event, "ts": ts, "dur": dur, "args": arguments})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def merge_chrome(pipelines: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Merge the traces of several parallel pipelines into one, with a named process for each."""
    events = []
    for pid, (name, trace) in enumerate(pipelines):
        for event in trace["traceEvents"]:
            arguments = {"name": name} if event["name"] == "process_name" else event["args"]
            events.append({**event, "pid": pid, "args": arguments})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def from_chrome(trace: Any, name: str = "trace", pipeline: int = 0) -> Timeline:
    """Convert a trace that `to_chrome` has made to a timeline in milliseconds.

    Args:
        trace: the parsed JSON.
        name: what error messages call the trace.
        pipeline: the number of the pipeline to read from a merged trace.

    Raises:
        UserError: it is not such a trace.
    """
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UserError(name, _short(trace), "has no list traceEvents", REMEDY)
    lanes: dict[int, list[Event]] = defaultdict(list)
    seen: set[Action] = set()
    for i, event in enumerate(events):
        at = f"{name}: traceEvents[{i}]"
        if not isinstance(event, dict):
            raise UserError(at, _short(event), "is not an event", "remove it")
        # skip names of lanes, and anything that a viewer added
        if event.get("ph") != "X" or event.get("pid", 0) != pipeline:
            continue
        rank = _field(event, "tid", at, "the rank, 0 or more", is_count)
        start = _field(event, "ts", at, "a time in microseconds", is_number) / MICROSECONDS
        duration = (
            _field(event, "dur", at, "microseconds, 0 or more", lambda x: is_number(x) and x >= 0)
            / MICROSECONDS
        )
        arguments = _field(
            event, "args", at, "kind, stage and microbatch", lambda x: isinstance(x, dict)
        )
        kind = _field(arguments, "kind", f"{at}.args", f"one of {LETTERS}", lambda x: x in LETTERS)
        stage = _field(arguments, "stage", f"{at}.args", "0 or more", is_count)
        action = Action(
            Kind(kind), stage, _field(arguments, "microbatch", f"{at}.args", "0 or more", is_count)
        )
        if action in seen:
            raise UserError(
                at, str(action), "occurs more than once", "keep the events of a single step"
            )
        seen.add(action)
        lanes[rank].append(Event(action, start, start + duration))
    missing = set(range(max(lanes, default=0) + 1)) - lanes.keys()
    if missing:
        raise UserError(
            f"{name}: tid",
            sorted(lanes),
            f"there is no event of rank {min(missing)}",
            "merge the events of all ranks",
        )
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


def _field(
    event: dict[str, Any], key: str, at: str, wanted: str, fits: Callable[[Any], bool]
) -> Any:
    value = event.get(key)
    if not fits(value):
        why = f"must be {wanted}" if key in event else f"is missing: {wanted}"
        raise UserError(f"{at}.{key}", _short(value), why, REMEDY)
    return value


def _short(value: Any) -> Any:
    return value if len(repr(value)) <= 60 else f"{repr(value)[:60]}…"
