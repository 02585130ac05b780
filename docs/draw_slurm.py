"""Draws docs/images/slurm.svg: three days of a job that requeues itself, and adds up its
hours. `python -m docs.draw_slurm`

The hours are invented; the events, their order and what is lost are those of slurm/train_70b.sh.
"""

from typing import NamedTuple

from docs import svg
from docs.svg import INK, MUTED, arrow, rectangle, text

WIDTH, HEIGHT = 960, 356
LEFT, TOP, LANE, TALL = 96, 112, 66, 30
LOOKS = {  # what the time is spent on → colour
    "steps": "#15803d",
    "repeated steps": "#fdba74",
    "preflight, start": "#60a5fa",
    "down": "#e5e7eb",
}


class Span(NamedTuple):
    start: int  # number of the job's start, drawn as a row
    kind: str
    hours: float
    event: str = ""  # the event that ends it, if any


DAYS = (
    Span(0, "preflight, start", 0.4),
    Span(0, "steps", 6.0, "a rank is killed"),
    Span(0, "preflight, start", 0.2),
    Span(0, "repeated steps", 1.2),
    Span(0, "steps", 16.2, "time is nearly up: USR1, save"),
    Span(1, "down", 2.0),
    Span(1, "preflight, start", 0.4),
    Span(1, "steps", 17.0, "a node dies"),
    Span(2, "down", 1.0),
    Span(2, "preflight, start", 0.4),
    Span(2, "repeated steps", 0.9),
    Span(2, "steps", 22.0, "finished"),
)


def hours(kind: str) -> float:
    return sum(span.hours for span in DAYS if span.kind == kind)


def total() -> float:
    return sum(span.hours for span in DAYS)


def draw() -> str:
    scale = (WIDTH - LEFT - 120) / total()
    parts = [
        text(24, 38, "One job, three starts: who does what when something ends", 20, weight=700),
        text(
            24,
            62,
            "torchrun starts again in place; the script requeues itself; Slurm requeues what lost "
            "a node",
            14,
            MUTED,
        ),
    ]
    at = 0.0
    for i, span in enumerate(DAYS):
        x, y = LEFT + at * scale, TOP + LANE * span.start
        if i == 0 or DAYS[i - 1].start != span.start:
            parts.append(text(24, y + TALL / 2 + 5, f"start {span.start}", 14, weight=600))
        parts.append(rectangle(x, y, span.hours * scale, TALL, LOOKS[span.kind]))
        at += span.hours
        if span.event:
            end = LEFT + at * scale
            parts.append(arrow(end, y - 12, end, y, INK))
            parts.append(text(end + 4, y - 8, span.event, 13, INK))
            if i + 1 < len(DAYS) and DAYS[i + 1].start != span.start:
                parts.append(arrow(end, y + TALL, end, y + LANE, MUTED))
    y = TOP + 3 * LANE + 10
    for i, (kind, colour) in enumerate(LOOKS.items()):
        x = 24 + 230 * i
        parts.append(rectangle(x, y, 16, 16, colour))
        parts.append(text(x + 24, y + 13, f"{kind}: {hours(kind) / total():.1%}", 13))
    return svg.picture("One job under Slurm, three starts", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    for kind in LOOKS:
        print(f"{kind:18} {hours(kind):5.1f} h  {hours(kind) / total():5.1%}")
    svg.save("slurm", draw)
