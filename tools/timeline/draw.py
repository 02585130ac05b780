"""Draws timelines: a lane per rank, a box per action, idle time hatched. tools/plan, tools/report
and docs use it too."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from parallel.pipeline.actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Kind
from parallel.pipeline.simulate import Event, Timeline
from runtime.profiling.chrome import NAMES

if TYPE_CHECKING:  # it takes a second to import, and text and traces do without
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, IDLE, HATCH, PAPER = "#1f2937", "#6b7280", "#f3f4f6", "#c5cad3", "#ffffff"
# Colours of a rank's first stage and of its last; lightness distinguishes kinds of actions for the
# colour-blind.
SHADES = {
    FORWARD: ("#1740a8", "#8ba6f7"),
    BACKWARD: ("#5e1040", "#cf6aa3"),
    BACKWARD_INPUT: ("#d39400", "#fbe68f"),
    BACKWARD_WEIGHT: ("#187a3a", "#c4f5d6"),
}
FONT = ["DejaVu Sans", "Verdana", "Arial"]
WIDTH = 9.0  # inches; 900 pixels
LANE, HEAD, FOOT, AXIS, LEGEND = 0.27, 0.34, 0.32, 0.42, 0.32  # inches high
LEFT, RIGHT = 0.62, 0.12
NUMBER_SIZE, TEXT_SIZE = 8.0, 9.0  # points
DIGIT = 0.66  # width of a digit with its margin, in parts of its size


class Panel(NamedTuple):
    """One timeline of a picture."""

    title: str
    timeline: Timeline
    caption: str  # the figures below it


def chunk_of_stage(lane: Sequence[Event]) -> dict[int, int]:
    """The index of each stage among its rank's stages, from 0."""
    return {
        stage: chunk for chunk, stage in enumerate(sorted({event.action.stage for event in lane}))
    }


def draw(panels: Sequence[Panel], unit: str = "", span: float = 0.0) -> "Figure":
    """Draw the panels below each other, on one time axis in `unit` with a length of at least
    `span`."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(
        {"font.family": "sans-serif", "font.sans-serif": FONT, "hatch.linewidth": 0.7}
    )
    heights = [HEAD + LANE * len(panel.timeline.ranks) + FOOT for panel in panels]
    height = LEGEND + sum(heights) + AXIS
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    span = max([span, *(panel.timeline.step_time for panel in panels)])
    top = height - LEGEND
    for panel, panel_height in zip(panels, heights, strict=True):
        lanes = len(panel.timeline.ranks)
        bottom = top - HEAD - LANE * lanes
        axes = figure.add_axes(
            (LEFT / WIDTH, bottom / height, 1 - (LEFT + RIGHT) / WIDTH, LANE * lanes / height)
        )
        axes.set_xlim(0, span)
        axes.set_ylim(lanes, 0)
        _draw_lanes(axes, panel.timeline, points_per_unit=72 * (WIDTH - LEFT - RIGHT) / span)
        _dress(axes, lanes)
        figure.text(
            LEFT / WIDTH,
            (bottom + LANE * lanes + 0.07) / height,
            panel.title,
            size=10.5,
            weight="bold",
            color=INK,
        )
        figure.text(
            LEFT / WIDTH, (bottom - 0.19) / height, panel.caption, size=TEXT_SIZE, color=INK
        )
        top -= panel_height
    _draw_axis(figure, span, unit, y=AXIS / height)
    _draw_legend(figure, panels, y=(height - LEGEND / 2) / height)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Save the figure in the format that the suffix of `path` names, .svg or .png. The same figure
    always gives the same bytes."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "lattice", "svg.fonttype": "path"}):
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_lanes(axes: "Axes", timeline: Timeline, points_per_unit: float) -> None:
    """Draw the boxes. All boxes of one colour are one path, which keeps the file small."""
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    boxes: dict[str, list[Outline]] = {}
    for rank, lane in enumerate(timeline.ranks):
        idle = Rectangle((0, rank + 0.06), timeline.step_time, 0.88)
        idle.set(facecolor=IDLE, edgecolor=HATCH, hatch="////", linewidth=0)
        axes.add_patch(idle)
        chunks = chunk_of_stage(lane)
        for action, begin, end in lane:
            start, width = begin - timeline.start, end - begin
            colour = shade(action.kind, chunks[action.stage], len(chunks))
            # a gap, so that adjacent boxes can be told apart
            gap = min(0.6 / points_per_unit, width / 5)
            corners = [(start, rank + 0.06), (start + width - gap, rank + 0.06)]
            corners += [
                (start + width - gap, rank + 0.94),
                (start, rank + 0.94),
                (start, rank + 0.06),
            ]
            boxes.setdefault(colour, []).append(Outline(corners, closed=True))
            number = str(action.microbatch)
            if len(number) * DIGIT * NUMBER_SIZE <= width * points_per_unit:
                ink = PAPER if _lightness(colour) < 0.5 else INK
                text = axes.text(
                    start + (width - gap) / 2, rank + 0.5, number, color=ink, size=NUMBER_SIZE
                )
                text.set(ha="center", va="center_baseline")
    for colour, outlines in boxes.items():
        axes.add_patch(
            PathPatch(Outline.make_compound_path(*outlines), facecolor=colour, linewidth=0)
        )


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of a kind of action; lighter for later stages of the rank."""
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    dark, light = (_channels(colour) for colour in SHADES[kind])
    return "#" + "".join(
        f"{round(255 * (d + part * (b - d))):02x}" for d, b in zip(dark, light, strict=True)
    )


def _channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _lightness(colour: str) -> float:
    red, green, blue = _channels(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _dress(axes: "Axes", lanes: int) -> None:
    axes.set_yticks(
        [i + 0.5 for i in range(lanes)],
        [f"rank {i}" for i in range(lanes)],
        size=TEXT_SIZE,
        color=INK,
    )
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)


def _draw_axis(figure: "Figure", span: float, unit: str, y: float) -> None:
    """Draw the time axis below the last panel."""
    axes = figure.add_axes((LEFT / WIDTH, y, 1 - (LEFT + RIGHT) / WIDTH, 1e-6))
    axes.set_xlim(0, span)
    axes.set_yticks([])
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(labelsize=TEXT_SIZE - 1, color=MUTED, labelcolor=MUTED, length=3)
    axes.set_xlabel(f"time, {unit}" if unit else "time", size=TEXT_SIZE, color=MUTED, labelpad=1)


def _draw_legend(figure: "Figure", panels: Sequence[Panel], y: float) -> None:
    """Draw the legend: F, B, I, W, with a box per stage if ranks have several; then idle time."""
    from matplotlib.patches import Rectangle

    lanes = [lane for panel in panels for lane in panel.timeline.ranks]
    kinds = {event.action.kind for lane in lanes for event in lane}
    chunks = max(len(chunk_of_stage(lane)) for lane in lanes)
    entries: list[tuple[str, list[dict[str, str]]]] = []
    for kind in Kind:
        if kind in kinds:
            entries.append(
                (
                    NAMES[kind],
                    [{"facecolor": shade(kind, chunk, chunks)} for chunk in range(chunks)],
                )
            )
    entries.append(("idle", [{"facecolor": IDLE, "edgecolor": HATCH, "hatch": "////"}]))
    if chunks > 1:
        entries.append(("light: a rank's later stage", []))
    height, side, x = figure.get_figheight(), 0.15, LEFT
    for words, looks in entries:
        for look in looks:
            corner = (x / WIDTH, y - side / 2 / height)
            figure.add_artist(Rectangle(corner, side / WIDTH, side / height, linewidth=0, **look))  # type: ignore[arg-type]
            x += side + 0.02
        figure.text(
            (x + 0.04) / WIDTH,
            y,
            words,
            size=TEXT_SIZE,
            color=INK if looks else MUTED,
            va="center_baseline",
        )
        x += 0.22 + 0.069 * len(words)
