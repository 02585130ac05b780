"""The charts of a run: what each shows, and how it is drawn.

Titles and legends are in the page, which escapes them. Of the run's own text only the names of
data stages are drawn, and not as formulas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from tools.report.run import Points, Run, can_be_drawn
from tools.timeline.draw import COLOURS, INK

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.figure import Figure

BINS = 500  # the most points of a line: two for every three pixels of a wide screen
FEW = 60  # so many points of a line are marked
FAR_ABOVE = 1.5  # the beginning is cut off if the whole range is more than this × the later range
LOG_FROM = 100.0  # an axis may be logarithmic from this ratio of largest to smallest value on
WIDE, NARROW, PICTURE = (11.2, 2.9), (5.5, 2.1), (8.0, 4.5)  # inches
GIB = 2**30

# Title, unit, kind of axis (Chart.axis), and the lines: name → key in metrics.jsonl
OVER_STEPS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("Loss", "nats per token", "tail", {"training": "loss", "held-out": "eval_loss"}),
    ("Gradient norm", "before clipping", "log", {"norm": "grad_norm"}),
    ("Learning rate", "", "zero", {"rate": "lr"}),
    ("Speed", "tokens per second", "zero", {"all devices": "tokens_per_second"}),
    ("Step time", "seconds", "zero", {"step": "step_seconds", "of it data": "data_seconds"}),
    ("Model FLOPs utilization", "% of dense bf16 peak", "zero", {"MFU": "mfu"}),
    ("Slowest rank", "its products' time / its peers'", "", {"rank": "slowest_rank_factor"}),
    ("Load of experts", "times an even share", "zero", {"largest": "largest_expert_share"}),
    ("Router losses", "all layers, weighted", "zero",
     {"balance": "router_balance_loss", "z": "router_z_loss"}),
)  # fmt: skip
OF_TASKS = (  # title, unit, and the end of each task's key
    ("Tasks: accuracy", "% of examples, per byte", "/accuracy_per_byte"),
    ("Tasks: text", "bits per byte", "/bits_per_byte"),
)


@dataclass(frozen=True)
class Chart:
    """Lines over steps, or bars over ranks.

    axis: "zero" begins at 0; "log" is logarithmic if all values are positive and their ratio is at
    least LOG_FROM; "tail" cuts off values at the beginning that are far above all later ones.
    """

    title: str
    unit: str
    axis: str
    series: dict[str, Points]  # by name; none is empty
    x: str = "step"

    @property
    def is_wide(self) -> bool:
        """Whether it has a row of its own."""
        return self.title == "Loss"

    @property
    def legend(self) -> list[tuple[str, str, str]]:
        """The name, colour and last value of every line."""
        last = [points[-1][1] for points in self.series.values()]
        values = [f"{y:,.0f}" if abs(y) >= 1000 else f"{y:.4g}" for y in last]
        return [*zip(self.series, cycle(COLOURS), values if self.x == "step" else [""])]

    @property
    def is_log(self) -> bool:
        values = [y for points in self.series.values() for _, y in points]
        return self.axis == "log" and 0 < min(values) * LOG_FROM <= max(values)

    @property
    def top(self) -> float | None:
        """Where the axis ends if the beginning is cut off: above all but the first tenth."""
        values = [y for _, y in sorted(p for points in self.series.values() for p in points)]
        low, high = min(values), max(values[len(values) // 10 :])
        is_far = max(values) - low > FAR_ABOVE * (high - low) > 0
        return high + 0.25 * (high - low) if self.axis == "tail" and is_far else None

    @property
    def scale(self) -> str:
        """The axis in words."""
        return "logarithmic" if self.is_log else "the beginning cut off" if self.top else ""


def charts(run: Run) -> list[Chart]:
    """Those that have data."""
    table = list(OVER_STEPS)
    keys = sorted({key for record in run.records for key in record if key.startswith("task/")})
    for title, unit, end in OF_TASKS:
        ours = [key for key in keys if key.endswith(end)]
        lines = {key.removeprefix("task/").removesuffix(end): key for key in ours}
        table.append((title, unit, "", lines))
    memory = run.last("memory")
    peaks = memory["peak_bytes"] if isinstance(memory.get("peak_bytes"), list) else []
    by_rank = [(rank, peak / GIB) for rank, peak in enumerate(peaks) if can_be_drawn(peak)]
    found = []
    for title, unit, axis, lines in table:
        scale = 100.0 if unit.startswith("%") else 1.0
        series = {name: run.points(key, scale) for name, key in lines.items()}
        found.append(Chart(title, unit, axis, {name: p for name, p in series.items() if p}))
    if by_rank:
        unit = f"GiB, up to step {memory.get('step', '?')}"
        found.append(Chart("Peak memory by rank", unit, "zero", {"peak": by_rank}, "rank"))
    return [chart for chart in found if chart.series]


def thin(points: Points, bins: int = BINS) -> np.ndarray:
    """x and the mean, the smallest and the largest y of at most `bins` groups of neighbouring
    points, so that no extreme is lost."""
    groups = np.array_split(np.array(points, dtype=float), min(bins, len(points)))
    return np.array([(*g.mean(axis=0), g[:, 1].min(), g[:, 1].max()) for g in groups]).T


def draw(chart: Chart, size: tuple[float, float], data_stages: Mapping[float, str]) -> "Figure":
    """Draw a chart without title and legend. `data_stages`: step → name of a vertical line."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    axes = figure.add_subplot()
    for (name, points), colour in zip(chart.series.items(), cycle(COLOURS)):
        x, mean, low, high = thin(points)
        if chart.x == "rank":
            axes.bar(x, mean, color=colour, label=name)
            continue
        marker = "o" if len(x) <= FEW else ""
        axes.plot(x, mean, color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=name)
        if (low < high).any():
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.margins(x=0.01)
    first, last = axes.get_xlim()
    for x, name in data_stages.items():
        if first < x < last:
            axes.axvline(x, color=INK, linestyle=":", linewidth=1, gid="data_stage")
            if chart.is_wide:
                place = {"xytext": (3, -9), "textcoords": "offset points"}
                place |= {"xycoords": axes.get_xaxis_transform(), "annotation_clip": False}
                axes.annotate(name, (x, 1), color=INK, size=8, parse_math=False, **place)
    if chart.is_log:
        axes.set_yscale("log")
    elif chart.axis == "zero":
        axes.set_ylim(bottom=min(0, axes.dataLim.y0))
    axes.set_ylim(top=chart.top)
    axes.xaxis.get_major_locator().set_params(integer=True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: short(value))
    axes.grid(color=INK, alpha=0.15, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=INK)
    axes.spines[:].set_visible(False)
    return figure


def picture_of_loss(run: Run, unigram: float | None) -> "Figure":
    """The whole curve, with the held-out loss of a unigram model."""
    chart = replace(charts(run)[0], axis="")
    figure = draw(chart, PICTURE, run.data_stages)
    (axes,) = figure.axes
    if unigram is not None:
        label = f"a unigram model on held-out text: {unigram:.2f}"
        axes.axhline(unigram, color=INK, linestyle="--", linewidth=1.2, label=label)
    title = f"{run.name}: loss over {run.records[-1]['step']:,} steps"
    axes.set_title(title, loc="left", size=11, parse_math=False)
    axes.set(xlabel="step", ylabel=f"loss, {chart.unit}")
    axes.legend(frameon=False, fontsize=9)
    return figure


def short(value: float) -> str:
    """Formats a number for an axis: 0, 0.25, 4.5, 1,200, 35k, 2M, 3e-05."""
    size = abs(value)
    if size >= 1e4:
        for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g}{name}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
