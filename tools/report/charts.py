"""The charts of a run: what each shows, and how it is drawn."""

from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from data.tokenizer import clean
from tools.report.run import Points, Run
from tools.timeline.draw import COLOURS, INK

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.figure import Figure

BINS = 500  # the most points of a line: two for every three pixels of a wide screen
FEW = 60  # so many points of a line are marked
LOG_FROM = 100.0  # an axis may be logarithmic from this ratio of largest to smallest value on
WIDE, NARROW, PICTURE = (11.2, 2.9), (5.5, 2.1), (8.0, 4.5)  # inches

# Title, unit, kind of axis (Chart.axis), and the lines: name → key in metrics.jsonl
OVER_STEPS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("Loss", "nats per token", "tail", {"training": "loss", "held-out": "eval_loss"}),
    ("Gradient norm", "before clipping", "log", {"norm": "grad_norm"}),
    ("Learning rate", "", "zero", {"rate": "lr"}),
    ("Speed", "tokens per second, all devices", "zero", {"speed": "tokens_per_second"}),
    ("Step time", "seconds", "zero", {"step": "step_seconds", "of it data": "data_seconds"}),
    ("Model FLOPs utilization", "% of dense bf16 peak", "zero", {"MFU": "mfu"}),
    ("Slowest rank", "its products' time / its peers'", "", {"rank": "slowest_rank_factor"}),
    ("Load of experts", "largest, times an even share", "zero",
     {"largest": "largest_expert_share"}),
    ("Router losses", "all layers, weighted", "zero",
     {"balance": "router_balance_loss", "z": "router_z_loss"}),
)  # fmt: skip
OF_TASKS = (  # title, unit, and the end of each task's key
    ("Tasks: accuracy", "% of examples, per byte", "/accuracy_per_byte"),
    ("Tasks: text", "bits per byte", "/bits_per_byte"),
)


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    axis: "zero" begins at 0; "log" is logarithmic if all values are positive and their ratio is at
    least LOG_FROM; "tail" ends above all values but those of the first tenth.
    """

    title: str
    unit: str
    axis: str
    series: dict[str, Points]  # by name; none is empty


def charts(run: Run) -> list[Chart]:
    """Those that have data."""
    keys = sorted({key for record in run.records for key in record if key.startswith("task/")})
    of_tasks = [
        (title, unit, "", {key[len("task/") : -len(end)]: key for key in keys if key.endswith(end)})
        for title, unit, end in OF_TASKS
    ]
    found = []
    for title, unit, axis, lines in (*OVER_STEPS, *of_tasks):
        scale = 100.0 if unit.startswith("%") else 1.0
        series = {clean(name): run.points(key, scale) for name, key in lines.items()}
        found.append(Chart(title, unit, axis, {name: p for name, p in series.items() if p}))
    return [chart for chart in found if chart.series]


def thin(points: Points) -> np.ndarray:
    """x and the mean, the smallest and the largest y of at most BINS groups of neighbouring
    points, so that no extreme is lost."""
    groups = np.array_split(np.array(points, dtype=float), min(BINS, len(points)))
    return np.array([(*g.mean(axis=0), g[:, 1].min(), g[:, 1].max()) for g in groups]).T


def draw(chart: Chart, size: tuple[float, float]) -> "Figure":
    """Draw a chart without its title."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(chart.series.items(), cycle(COLOURS)):
        x, mean, low, high = thin(points)
        marker = "o" if len(x) <= FEW else ""
        axes.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=name)
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.margins(x=0.01)
    if len(chart.series) > 1 or chart.title.startswith(("Tasks", "Router")):
        with matplotlib.rc_context({"text.parse_math": False}):  # a task may have any name
            axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    values = [y for points in chart.series.values() for _, y in points]
    if chart.axis == "log" and 0 < min(values) * LOG_FROM <= max(values):
        axes.set_yscale("log")
    elif chart.axis == "zero":
        axes.set_ylim(bottom=min(0, *values))
    elif chart.axis == "tail":
        late = [y for points in chart.series.values() for _, y in points[len(points) // 10 :]]
        margin = 0.05 * (max(late) - min(values) or 1.0)
        axes.set_ylim(min(values) - margin, max(late) + margin)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.6g}")
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=INK)
    axes.spines[:].set_visible(False)
    return figure


def picture_of_loss(run: Run) -> "Figure":
    """The whole curve."""
    chart = replace(charts(run)[0], axis="")
    figure = draw(chart, PICTURE)
    (axes,) = figure.axes
    title = f"{run.name}: loss over {run.records[-1]['step']:,} steps"
    axes.set_title(title, loc="left", size=11, parse_math=False)
    axes.set(xlabel="step", ylabel=f"loss, {chart.unit}")
    return figure
