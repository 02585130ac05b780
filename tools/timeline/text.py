"""Prints timelines as text: a line per rank, a fixed number of characters per unit of time."""

import shutil
import sys
from collections.abc import Sequence

from parallel.pipeline.simulate import Timeline
from tools.timeline.draw import Panel, chunk_of_stage

UNIT_CHARACTERS = 3


def ascii_lanes(timeline: Timeline, unit: float = 1.0, columns: int | None = None) -> list[str]:
    """Return a line per rank, three characters per `unit` of time. Lines longer than `columns` are
    cut and end in `…`."""
    lines = []
    for rank, lane in enumerate(timeline.ranks):
        line = ""
        chunks = chunk_of_stage(lane)
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
    # the lower quartile: short actions stay readable, and a very short one does not stretch the
    # rest
    scale = durations[len(durations) // 4]
    for panel in panels:
        print(
            panel.title, *ascii_lanes(panel.timeline, scale, columns), panel.caption, "", sep="\n"
        )
    print(f"{UNIT_CHARACTERS} characters: time {scale:.3g} {unit}".rstrip())
