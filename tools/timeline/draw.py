"""Draws timelines: a lane per rank, a box per action, idle time grey. Also the colours of all
pictures, and how a picture is written; tools/report and docs use it too."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from costs.timeline import NAMES, Timeline
from parallel.pipeline.actions import Kind
from parallel.pipeline.simulate import Event

if TYPE_CHECKING:  # it takes a second to import, and text and traces do without
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2937"
# Colours of curves and bars: each is seen well on a white page and on a dark one.
COLOURS = (
    *("#3b82f6", "#ea580c", "#10976a", "#a855f7", "#b7791f"),
    *("#0891b2", "#db2777", "#ef4444", "#65a30d", "#7c8798"),
)
# Colours of a rank's first stage and of its others; lightness distinguishes kinds of actions for
# the colour-blind.
SHADES = {
    Kind.FORWARD: ("#2a56cc", "#9db4fa"),
    Kind.BACKWARD: ("#8a1f62", "#dd8fbb"),
    Kind.BACKWARD_INPUT: ("#d39400", "#fbe68f"),
    Kind.BACKWARD_WEIGHT: ("#187a3a", "#c4f5d6"),
}
FONT = ["DejaVu Sans", "Verdana", "Arial"]
WIDTH, LANE = 9.0, 0.27  # inches; 1350 pixels
AROUND = 0.75  # inches: the titles above a panel's lanes, and the legend and axis of the picture
NUMBER_SIZE, TEXT_SIZE = 8.0, 9.0  # points
DIGIT = 0.66  # width of a digit with its margin, in parts of its size


class Panel(NamedTuple):
    """One timeline of a picture."""

    title: str
    timeline: Timeline
    caption: str  # its figures


def chunk_of_stage(lane: Sequence[Event]) -> dict[int, int]:
    """The index of each stage among its rank's stages, from 0."""
    stages = sorted({event.action.stage for event in lane})
    return {stage: chunk for chunk, stage in enumerate(stages)}


def draw(panels: Sequence[Panel], unit: str = "", span: float = 0.0) -> "Figure":
    """Draw the panels below each other, on one time axis in `unit` with a length of at least
    `span`."""
    from matplotlib.figure import Figure

    lanes = [len(panel.timeline.ranks) for panel in panels]
    height = AROUND + sum(AROUND + LANE * number for number in lanes)
    figure = Figure((WIDTH, height), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)
    column = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=lanes)[:, 0]
    span = max([span, *(panel.timeline.step_time for panel in panels)])
    for panel, number, axes in zip(panels, lanes, column, strict=True):
        axes.set_title(panel.title, loc="left", pad=19, size=10.5, weight="bold", color=INK)
        above = {"xytext": (0, 5), "xycoords": "axes fraction", "textcoords": "offset points"}
        caption = axes.annotate(panel.caption, (0, 1), **above, size=TEXT_SIZE, color=INK)
        caption.set_in_layout(False)  # a long one is cut, and the lanes keep their width
        axes.set(xlim=(0, span), ylim=(number, 0))
        ranks = [f"rank {rank}" for rank in range(number)]
        axes.set_yticks([rank + 0.5 for rank in range(number)], ranks)
        axes.tick_params(labelsize=TEXT_SIZE, labelcolor=INK, length=0)
        axes.spines[:].set_visible(False)
        _draw_lanes(axes, panel.timeline, span)
    axes.set_xlabel(f"time, {unit}" if unit else "time", size=TEXT_SIZE, color=INK)
    _add_legend(figure, panels)
    return figure


def _draw_lanes(axes: "Axes", timeline: Timeline, span: float) -> None:
    points_per_unit = 72 * (WIDTH - 0.8) / span
    for rank, lane in enumerate(timeline.ranks):
        where = (rank + 0.06, 0.88)
        axes.broken_barh([(0, timeline.step_time)], where, facecolor=INK, alpha=0.1, clip_on=False)
        chunks = chunk_of_stage(lane)
        boxes, colours = [], []
        for action, begin, end in lane:
            start, width = begin - timeline.start, end - begin
            # a gap, so that adjacent boxes can be told apart
            boxes.append((start, width - min(0.6 / points_per_unit, width / 5)))
            colours.append(SHADES[action.kind][chunks[action.stage] > 0])
            number = str(action.microbatch)
            if len(number) * DIGIT * NUMBER_SIZE <= width * points_per_unit:
                place = (start + boxes[-1][1] / 2, rank + 0.5)
                text = axes.text(*place, number, size=NUMBER_SIZE, color=_digits(colours[-1]))
                text.set(ha="center", va="center_baseline")
        axes.broken_barh(boxes, where, facecolors=colours, clip_on=False)


def _digits(colour: str) -> str:
    """White or black, whichever is read better on `colour`."""
    red, green, blue = bytes.fromhex(colour[1:])
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "black"


def _add_legend(figure: "Figure", panels: Sequence[Panel]) -> None:
    """The kinds of actions, with a box per stage if ranks have several; then idle time."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    lanes = [lane for panel in panels for lane in panel.timeline.ranks]
    kinds = {event.action.kind for lane in lanes for event in lane}
    chunks = max(len(chunk_of_stage(lane)) for lane in lanes)
    entries = {
        NAMES[kind]: tuple(Patch(color=colour) for colour in SHADES[kind][:chunks])
        for kind in Kind
        if kind in kinds
    }
    entries["idle"] = (Patch(color=INK, alpha=0.1),)
    if chunks > 1:
        entries["light: a rank's later stage"] = (Patch(alpha=0),)
    boxes = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0)}, "handleheight": 1.1}
    boxes |= {"handlelength": 1.1 * min(chunks, 2), "ncols": len(entries)}
    text = {"fontsize": TEXT_SIZE, "labelcolor": INK, "frameon": False}
    figure.legend(entries.values(), entries, loc="outside upper left", **boxes, **text)


def save(figure: "Figure", path: Path) -> None:
    """Save the figure in the format that the suffix of `path` names, .svg or .png. The same figure
    always gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(figure, path, path.suffix[1:], "path")


def inline(figure: "Figure") -> str:
    """The figure as an <svg> element in a page: transparent, with INK in the page's own colour of
    text, so that it is read on a white page and on a dark one."""
    file = io.StringIO()
    _write(figure, file, "svg", "none", transparent=True)
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _write(
    figure: "Figure", file: Path | io.StringIO, kind: str, text: str, **options: bool
) -> None:
    import matplotlib

    settings = {"svg.hashsalt": "lattice", "svg.fonttype": text, "font.sans-serif": FONT}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type")) if kind == "svg" else {}
    with matplotlib.rc_context(settings):
        figure.savefig(file, format=kind, dpi=150, metadata=nothing, **options)
