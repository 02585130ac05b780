"""Makes timelines with a title and figures, of simulated schedules and of a measured step, and
prints them as text: a line per rank, a fixed number of characters per unit of time."""

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from costs.timeline import MICROSECONDS, Timeline
from errors import UserError
from parallel.pipeline.actions import Action, Kind
from parallel.pipeline.schedules import STAGES_PER_RANK, build_schedule
from parallel.pipeline.simulate import Costs, Event, simulate
from runtime.schema import Natural, Strict, first_problem
from tools.timeline.draw import Panel, chunk_of_stage

UNIT_CHARACTERS = 3


def figures(timeline: Timeline, unit: str = "") -> str:
    """The caption of a timeline: step time, bubble, and the activations that each rank holds, as a
    number of micro-batches through all of its stages."""
    held = [
        f"{timeline.peak_live(rank) / len(chunk_of_stage(lane)):.4g}"
        for rank, lane in enumerate(timeline.ranks)
    ]
    times = f"step time {timeline.step_time:.4g}{unit} · bubble {timeline.bubble:.4g}{unit}"
    idle = f"idle {timeline.bubble_fraction:.1%}"
    return f"{times} · {idle} · holds at most {', '.join(held)} micro-batches"


def simulated_panels(
    names: Sequence[str],
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: Sequence[int] = (),
    costs: Sequence[float] = (1.0, 1.0, 1.0),
    communication: float = 0.0,
) -> list[Panel]:
    """Make a panel for each schedule, all of the same model on the same ranks.

    `stages_per_rank` has one number for all schedules, or one for each. `costs` are the F, I and W
    of a stage at the largest. With fewer stages per rank, each stage takes proportionally longer.
    """
    per_rank = stages_per_rank or [STAGES_PER_RANK.get(name, 1) for name in names]
    if len(per_rank) == 1:
        per_rank = [*per_rank] * len(names)
    panels = []
    for name, v in zip(names, per_rank, strict=True):
        forward, input_grad, weight_grad = (cost * max(per_rank) / v for cost in costs)
        stage_costs = Costs.equal(num_ranks * v, forward, input_grad, weight_grad, communication)
        schedule = build_schedule(name, num_ranks, v, num_microbatches)
        timeline = Timeline(simulate(schedule, stage_costs))
        size = f"{num_ranks} ranks × {v} stage{'s' * (v > 1)}, {num_microbatches} micro-batches"
        panels.append(Panel(f"{name}: {size}", timeline, figures(timeline)))
    return panels


# --- a measured step (runtime/profiling/trace.py) ---


def traced_panel(path: Path) -> Panel:
    """A panel of a step measured in a run (its folder, or its trace.json)."""
    file = path / "trace.json" if os.path.isdir(path) else path
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "give a trace.json, or the folder of a run with run.trace=true"
        raise UserError("--trace", str(file), f"cannot be read: {error}", remedy) from None
    measured = from_chrome(trace, str(file))
    return Panel("measured", measured, figures(measured, " ms"))


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


# --- as text ---


def ascii_lanes(timeline: Timeline, unit: float = 1.0, columns: int | None = None) -> list[str]:
    """Return a line per rank, three characters per `unit` of time. Lines longer than `columns` are
    cut and end in `…`."""
    lines = []
    for rank, lane in enumerate(timeline.ranks):
        line, chunks = "", chunk_of_stage(lane)
        for action, start, end in lane:
            first, after = (
                round((time - timeline.start) / unit * UNIT_CHARACTERS) for time in (start, end)
            )
            letter = action.kind.value.lower() if chunks[action.stage] % 2 else action.kind.value
            label = f"{letter}{action.microbatch}"[: max(after - first, 0)]
            rest = after - first - len(label)
            line = line.ljust(first)[:first] + label + "─" * (rest - 1) + " " * (rest > 0)
        name = f"rank {rank}".ljust(len(f"rank {len(timeline.ranks) - 1}"))
        lines.append(f"{name} ▏{line.rstrip()}")
    return [
        line if columns is None or len(line) <= columns else line[: columns - 1] + "…"
        for line in lines
    ]


def print_panels(panels: Sequence[Panel], unit: str) -> None:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lanes = [lane for panel in panels for lane in panel.timeline.ranks]
    durations = sorted(end - start for lane in lanes for _, start, end in lane if end > start)
    # the lower quartile: short actions stay readable, and a very short one stretches nothing
    scale = durations[len(durations) // 4]
    for panel in panels:
        lines = ascii_lanes(panel.timeline, scale, columns)
        print(panel.title, *lines, panel.caption, "", sep="\n")
    print(f"{UNIT_CHARACTERS} characters: time {scale:.3g} {unit}".rstrip())
