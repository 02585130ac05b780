"""Draws the timelines of docs/pipeline.md and docs/schedules.md, docs/images/pipeline_*.svg:
`python -m docs.draw_pipeline`

All have four ranks and eight micro-batches, on axes of one length, so that they can be compared.
The unit of time is a forward of all of a rank's layers, and I and W take as long as that forward.
With two stages per rank, each of the three takes half a unit per stage.
"""

from pathlib import Path

from tools.timeline.draw import draw, save
from tools.timeline.panels import simulated_panels

RANKS, MICRO_BATCHES = 4, 8
PICTURES = {  # name → schedules, and the stages per rank of each
    "gpipe": {"gpipe": 1, "1f1b": 1},
    "smaller_stages": {"interleaved_1f1b": 2, "breadth_first": 2},
    "zero_bubble": {"zb_h1": 1},
    "v": {"zb_v": 2, "dualpipe_v": 2},
}


def draw_pictures(folder: Path) -> list[Path]:
    """Draw all pictures into `folder`, and return their paths."""
    panels = {}
    for name, schedules in PICTURES.items():
        cost = 1 / max(schedules.values())
        panels[name] = simulated_panels(
            list(schedules),
            RANKS,
            MICRO_BATCHES,
            list(schedules.values()),
            costs=(cost, cost, cost),
        )
    span = max(panel.timeline.step_time for of_picture in panels.values() for panel in of_picture)
    paths = []
    for name, of_picture in panels.items():
        paths.append(folder / f"pipeline_{name}.svg")
        save(draw(of_picture, "in forwards of all of a rank's layers", span), paths[-1])
    return paths


if __name__ == "__main__":
    for path in draw_pictures(Path(__file__).parent / "images"):
        print(f"wrote {path}")
