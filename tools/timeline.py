"""Shows what each rank of a pipeline does when: simulated from a schedule, or measured in a training run.

    python -m tools.timeline --schedule 1f1b --stages 4 --micro-batches 8                      as text
    python -m tools.timeline --schedule 1f1b zb_v --stages 4 --micro-batches 8 --out both.svg  below each other, on one axis
    python -m tools.timeline --trace runs/laptop --out step.svg --simulated                    a measured step, and a simulated

A step is measured with `run.trace=true`, which writes trace.json into the run's folder. --out FILE.json writes the same format
from a simulation, a unit of time as a millisecond; https://ui.perfetto.dev opens either.

In text, F0 is the forward of micro-batch 0 and B0 its backward, or I0 and W0 its input and its weight gradient where backward
is split. Capitals are a rank's first stage (third, …), small letters its second.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from errors import UserError
from parallel.pipeline.actions import Schedule
from parallel.pipeline.check import Fault, check_complete
from parallel.pipeline.chrome import from_chrome, measured_costs, to_chrome
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from parallel.pipeline.simulate import Costs, Stuck, Timeline, simulate
from tools.draw_timeline import Panel, chunk_of_stage, draw, save

UNIT_CHARACTERS = 3
SUFFIXES = (".svg", ".png", ".json")


def ascii_timeline(schedule: Schedule, costs: Costs, columns: int | None = None) -> list[str]:
    """A line per rank, three characters for a unit of time; cut to `columns` characters, the last then being …"""
    return ascii_lanes(simulate(schedule, costs), 1.0, columns)


def ascii_lanes(timeline: Timeline, unit: float, columns: int | None = None) -> list[str]:
    """The same of a timeline, three characters for every `unit` of its time."""
    lines = []
    for rank, lane in enumerate(timeline.ranks):
        line = ""
        chunks = chunk_of_stage(lane)
        for action, start, end in lane:
            first, after = (round((time - timeline.start) / unit * UNIT_CHARACTERS) for time in (start, end))
            letter = action.kind.value.lower() if chunks[action.stage] % 2 else action.kind.value
            label = f"{letter}{action.microbatch}"[: max(after - first, 0)]
            rest = after - first - len(label)
            line = line.ljust(first)[:first] + label + "─" * (rest - 1) + " " * (rest > 0)
        name = f"rank {rank}".ljust(len(f"rank {len(timeline.ranks) - 1}"))
        lines.append(f"{name} ▏{line.rstrip()}")
    return [line if columns is None or len(line) <= columns else line[: columns - 1] + "…" for line in lines]


def figures(timeline: Timeline, unit: str = "") -> str:
    """Step time, bubble, and the activations held, in micro-batches of all of a rank's stages."""
    held = [f"{timeline.peak_live(rank) / len(chunk_of_stage(lane)):.4g}" for rank, lane in enumerate(timeline.ranks)]
    times = (
        f"step time {timeline.step_time:.4g}{unit} · bubble {timeline.bubble:.4g}{unit} · idle {timeline.bubble_fraction:.1%}"
    )
    return f"{times} · holds at most {', '.join(held)} micro-batches"


def simulated_panels(
    names: Sequence[str],
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: Sequence[int] = (),
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
    communication: float = 0.0,
) -> list[Panel]:
    """A panel for each schedule, all of the same model on the same ranks.

    `costs` are the F, I and W of a stage of the largest number of stages per rank; where a rank has fewer, each is longer.
    """
    per_rank = stages_per_rank or [stages_needed(name, num_ranks, num_microbatches) for name in names]
    panels = []
    for name, v in zip(names, per_rank, strict=True):
        forward, input_grad, weight_grad = (cost * max(per_rank) / v for cost in costs)
        stage_costs = Costs.equal(num_ranks * v, forward, input_grad, weight_grad, communication)
        timeline = simulate(build_schedule(name, num_ranks, v, num_microbatches), stage_costs)
        size = f"{num_ranks} ranks × {v} stage{'s' * (v > 1)}, {num_microbatches} micro-batches"
        panels.append(Panel(f"{name}: {size}", timeline, figures(timeline)))
    return panels


def stages_needed(name: str, num_ranks: int, num_microbatches: int) -> int:
    """The stages per rank that the schedule takes: one, or else two."""
    try:
        build_schedule(name, num_ranks, 1, num_microbatches)
    except UserError as error:
        if error.key != "parallel.stages_per_rank":
            raise
        return 2
    return 1


def read_trace(path: Path) -> Timeline:
    """The timeline of a trace, or of a run's folder."""
    file = path / "trace.json" if path.is_dir() else path
    try:
        trace = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        remedy = "give a trace.json, or the folder of a run with run.trace=true"
        raise UserError("--trace", str(file), f"cannot be read ({error.strerror})", remedy) from None
    except ValueError as error:
        raise UserError("--trace", str(file), f"is no JSON: {error}", "trace again: it may have been cut off") from None
    return from_chrome(trace, str(file))


def traced_panels(path: Path, simulated: bool, communication: float = 0.0) -> list[Panel]:
    """A measured step and, if `simulated`, its ranks' actions in the same order, each as long as its like were on average."""
    measured = read_trace(path)
    panels = [Panel("measured", measured, figures(measured, " ms"))]
    if simulated:
        schedule = [[event.action for event in lane] for lane in measured.ranks]
        try:
            check_complete(schedule)
            timeline = simulate(schedule, measured_costs(measured, communication))
        except (Fault, Stuck) as error:
            raise UserError("--trace", str(path), f"is no whole step: {error}", "draw it without --simulated") from None
        panels.append(Panel("simulated, from the mean times measured", timeline, figures(timeline, " ms")))
    return panels


def print_panels(panels: Sequence[Panel], unit: str) -> None:
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    lanes = [lane for panel in panels for lane in panel.timeline.ranks]
    durations = sorted(end - start for lane in lanes for _, start, end in lane if end > start)
    scale = durations[len(durations) // 4]  # short actions can still be read, and one very short does not stretch the rest
    for panel in panels:
        print("\n".join([panel.title, *ascii_lanes(panel.timeline, scale, columns), panel.caption, ""]))
    print(f"{UNIT_CHARACTERS} characters: time {scale:.3g} {unit}".rstrip())


def write(panels: Sequence[Panel], unit: str, out: Path) -> None:
    if out.suffix not in SUFFIXES:
        raise UserError("--out", str(out), "is neither a picture's nor a trace's name", f"end it in {', '.join(SUFFIXES)}")
    if out.suffix == ".json" and len(panels) > 1:
        raise UserError("--out", str(out), f"a trace holds one timeline, not {len(panels)}", "give each a file of its own")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".json":
            out.write_text(json.dumps(to_chrome(panels[0].timeline), indent=1) + "\n", encoding="utf-8")
        else:
            save(draw(panels, unit), out)
    except OSError as error:
        raise UserError("--out", str(out), f"cannot be written ({error.strerror})", "choose another place") from None


def parse_costs(text: str) -> tuple[float, float, float]:
    try:
        forward, input_grad, weight_grad = (float(cost) for cost in text.split(","))
    except ValueError:
        raise UserError("--costs", text, "is not three numbers", "give F,I,W, for example 1,1,1") from None
    if not (0 < forward < float("inf") and 0 <= input_grad < float("inf") and 0 <= weight_grad < float("inf")):
        raise UserError("--costs", text, "F must be positive, I and W not negative", "give F,I,W, for example 1,1,1")
    return forward, input_grad, weight_grad


def panels_of(options: argparse.Namespace) -> list[Panel]:
    """What the command line asks for."""
    if not 0 <= options.communication < float("inf"):
        raise UserError("--communication", options.communication, "must be a time, 0 or more", "give a number such as 0.2")
    if options.trace is not None:
        return traced_panels(options.trace, options.simulated, options.communication)
    if options.simulated:
        raise UserError("--simulated", True, "belongs to --trace, and a schedule is always simulated", "leave it out")
    for name in options.schedule:
        if name not in SCHEDULES:
            raise UserError("--schedule", name, "there is no such schedule", f"choose of {', '.join(SCHEDULES)}")
    per_rank = options.stages_per_rank or []
    sizes = [("--stages", options.stages), ("--micro-batches", options.micro_batches)]
    for key, size in sizes + [("--stages-per-rank", v) for v in per_rank]:
        if size is None or size < 1:
            raise UserError(key, size, "a schedule needs a positive number", f"give one, for example {key} 4")
    if len(per_rank) not in (0, 1, len(options.schedule)):
        why = f"there are {len(options.schedule)} schedules"
        raise UserError("--stages-per-rank", per_rank, why, "give one number for all, or one for each")
    if len(per_rank) == 1:
        per_rank = per_rank * len(options.schedule)
    costs = parse_costs(options.costs)
    return simulated_panels(options.schedule, options.stages, options.micro_batches, per_rank, costs, options.communication)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", nargs="+", metavar="NAME", help=f"one or several of {', '.join(SCHEDULES)}")
    source.add_argument(
        "--trace", type=Path, metavar="RUN", help="a measured step: a run's folder, or a trace.json (its first pipeline)"
    )
    parser.add_argument("--stages", type=int, metavar="P", help="ranks of the pipeline, each with V stages")
    parser.add_argument("--micro-batches", type=int, metavar="M", help="per step")
    per_rank = "stages of each rank: one number, or one per schedule (default: what the schedule takes, 1 or else 2)"
    parser.add_argument("--stages-per-rank", type=int, nargs="+", metavar="V", help=per_rank)
    costs = (
        "time of a stage's forward, input gradient and weight gradient (default: %(default)s); a whole backward takes I + W. "
        "If schedules with different V are compared: of a stage of the largest V; where a rank has fewer, each is longer"
    )
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W", help=costs)
    message = "time of a message between ranks (default: %(default)s)"
    parser.add_argument("--communication", type=float, default=0.0, metavar="C", help=message)
    parser.add_argument("--simulated", action="store_true", help="with --trace: the simulation of the same actions below it")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture (.svg, .png) or a trace (.json); without, text")
    options = parser.parse_args(arguments)
    unit = "" if options.trace is None else "ms"
    try:
        panels = panels_of(options)
        if options.out is None:
            print_panels(panels, unit)
        else:
            write(panels, unit, options.out)
            print("\n".join(f"{panel.title}\n  {panel.caption}" for panel in panels) + f"\nwrote {options.out}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
