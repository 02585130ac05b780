"""Makes timelines with a title and figures, of simulated schedules and of a measured step, and
prints them as text: a line per rank, a fixed number of characters per unit of time."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from costs.timeline import Timeline
from errors import UserError
from parallel.pipeline.actions import Fault
from parallel.pipeline.check import check_complete
from parallel.pipeline.schedules import build_schedule
from parallel.pipeline.simulate import Costs, simulate
from tools.timeline.draw import Panel, chunk_of_stage
from tools.timeline.measured import from_chrome, measured_costs

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
    per_rank = stages_per_rank or [stages_needed(n, num_ranks, num_microbatches) for n in names]
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


def stages_needed(name: str, num_ranks: int, num_microbatches: int) -> int:
    """The number of stages per rank that the schedule accepts: one, or else two."""
    try:
        build_schedule(name, num_ranks, 1, num_microbatches)
    except UserError as error:
        if error.key != "parallel.stages_per_rank":
            raise
        return 2
    return 1


def traced_panels(path: Path, simulated: bool, communication: float = 0.0) -> list[Panel]:
    """A panel of a step measured in a run (its folder, or its trace.json) and, if `simulated`, one
    of a simulation of the same actions in the same order, each with the mean time of its kind and
    stage."""
    file = path / "trace.json" if os.path.isdir(path) else path
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = "give a trace.json, or the folder of a run with run.trace=true"
        raise UserError("--trace", str(file), f"cannot be read: {error}", remedy) from None
    measured = from_chrome(trace, str(file))
    panels = [Panel("measured", measured, figures(measured, " ms"))]
    if simulated:
        schedule = [[event.action for event in lane] for lane in measured.ranks]
        try:
            check_complete(schedule)
            timeline = Timeline(simulate(schedule, measured_costs(measured, communication)))
        except Fault as error:
            why = f"is not a complete step: {error}"
            raise UserError("--trace", str(path), why, "draw it without --simulated") from None
        title = "simulated, from the mean times measured"
        panels.append(Panel(title, timeline, figures(timeline, " ms")))
    return panels


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
