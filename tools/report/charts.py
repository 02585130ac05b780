"""The report page's charts: SVG that stretches with the page, with labels in HTML, so that a small
screen does not shrink them.

Every chart is drawn in a box of 1000 × 100 units. The page's script (assets/report.js) looks up the
value under the pointer in the chart's `data-chart`. Text is escaped here, because a run's files are
not trusted.
"""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from parallel.pipeline.actions import Kind
from parallel.pipeline.simulate import Timeline
from runtime.profiling.chrome import NAMES
from tools.timeline.draw import chunk_of_stage, shade

WIDTH, HEIGHT = 1000, 100  # units of a chart's box
BINS = 500  # the most points of a line: two for every three pixels of a wide screen
POINTER = '<i class="rule" hidden></i><div class="tip" hidden></div>'  # shown by the script
FAR_ABOVE = 1.5  # the beginning is cut off if the whole range is more than this × the later range
LOG_FROM = 100.0  # an axis may be logarithmic from this ratio of largest to smallest value on


@dataclass(frozen=True)
class Series:
    """The points drawn in one colour. `colour` is a class of the page's style: c1, c2, …"""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]  # x, y, both finite; x ascending
    kind: str = "line"  # line, dots or bars


@dataclass(frozen=True)
class Bin:
    """A group of neighbouring points."""

    x: float
    low: float
    mean: float
    high: float


def escape(text: Any) -> str:
    return html.escape(str(text), quote=True)


def thin(points: Sequence[tuple[float, float]], bins: int = BINS) -> list[Bin]:
    """Groups points into at most `bins` bins, over equal parts of x. A bin keeps its smallest and
    largest values, so no extreme is lost."""
    if len(points) <= bins:
        return [Bin(x, y, y, y) for x, y in points]
    first = points[0][0]
    span = points[-1][0] - first or 1.0
    parts: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        parts.setdefault(min(int((x - first) / span * bins), bins - 1), []).append((x, y))
    found = []
    for part in parts.values():
        ys = [y for _, y in part]
        found.append(Bin(sum(x for x, _ in part) / len(part), min(ys), sum(ys) / len(ys), max(ys)))
    return found


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [
        i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    ]


def log_ticks(low: float, high: float) -> list[float]:
    """At most six powers of ten from `low` to `high`."""
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    return [10.0**power for power in powers[:: max(1, math.ceil(len(powers) / 6))]]


def short(value: float) -> str:
    """Formats a number for an axis: 0, 0.25, 4.5, 1,200, 35k, 2M, 3e-05."""
    size = abs(value)
    if size >= 1e4:
        for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.4g}{name}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def line_chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    *,
    x_name: str = "step",
    log: bool = False,
    zero: bool = False,
    tail: bool = False,
    wide: bool = False,
    boundaries: Mapping[float, str] = MappingProxyType({}),
) -> str:
    """A chart as an HTML figure; empty if no series has a point.

    log: use a logarithmic axis if all values are positive and their ratio is at least LOG_FROM.
    zero: begin the axis at 0.
    tail: cut off values at the beginning that are far above all those after the first tenth.
    wide: give the figure a separate row.
    boundaries: x → text of a vertical line.
    """
    series = [one for one in series if one.points]
    if not series:
        return ""
    thinned = {one.name: thin(one.points) for one in series}
    every = [b for bins in thinned.values() for b in bins]
    bars = any(one.kind == "bars" for one in series)
    x0, x1 = min(b.x for b in every) - 0.5 * bars, max(b.x for b in every) + 0.5 * bars
    x1 = x1 if x1 > x0 else x0 + 1
    low, high = min(b.low for b in every), max(b.high for b in every)
    log = log and low > 0 and high / low >= LOG_FROM
    if zero or bars:
        low = min(low, 0.0)
    later = [b.high for b in every if b.x >= x0 + 0.1 * (x1 - x0)]
    cut = tail and bool(later) and high - low > FAR_ABOVE * (max(later) - low)
    if cut:
        high = max(later) + 0.25 * (max(later) - low)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    if log:
        bottom, top = math.log10(low) - 0.05, math.log10(high) + 0.05
        marks = [(math.log10(tick), short(tick)) for tick in log_ticks(low, high)]
    else:
        bottom, top = low if low == 0 else low - margin, high + margin
        marks = [(tick, short(tick)) for tick in ticks(bottom, top)]

    def x_of(x: float) -> float:
        return round((x - x0) / (x1 - x0) * WIDTH, 1)

    def y_of(y: float) -> float:
        return round((top - (math.log10(y) if log else y)) / (top - bottom) * HEIGHT, 2)

    heights = [round((top - y) / (top - bottom) * HEIGHT, 2) for y, _ in marks]
    drawn = [f'<path class="grid" d="{"".join(f"M0 {height}H{WIDTH}" for height in heights)}"/>']
    drawn += [
        f'<path class="boundary" d="M{x_of(x)} 0V{HEIGHT}"><title>{escape(text)}</title></path>'
        for x, text in boundaries.items()
        if x0 < x < x1
    ]
    for one in series:
        drawn += _draw(one, thinned[one.name], x_of, y_of)
    labels = [
        f'<span class="y" style="top:{(top - y) / (top - bottom):.2%}">{text}</span>'
        for y, text in marks
    ]
    whole = [tick for tick in ticks(x0, x1, 5) if tick == int(tick)]
    labels += [
        f'<span class="x" style="left:{(x - x0) / (x1 - x0):.2%}">{short(x)}</span>' for x in whole
    ]
    legend = _legend(series)
    means = {name: [(b.x, float(f"{b.mean:.6g}")) for b in bins] for name, bins in thinned.items()}
    data = {
        "x": [x0, x1],
        "name": x_name,
        "series": [[s.name, s.colour, *zip(*means[s.name], strict=True)] for s in series],
    }
    scale = ", logarithmic" if log else ", the beginning cut off" if cut else ""
    return (
        f'<figure class="{"wide" if wide else ""}"><figcaption><b>{escape(title)}</b> '
        f"<small>{escape(unit)}{scale}</small>"
        f"{legend}</figcaption>"
        f'<div class="plot" data-chart="{escape(json.dumps(data, separators=(",", ":")))}">'
        f'<svg class="{"cut" if cut else ""}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}">{"".join(drawn)}</svg>{"".join(labels)}{POINTER}</div></figure>'
    )


def _draw(one: Series, bins: Sequence[Bin], x_of: Any, y_of: Any) -> list[str]:
    """The SVG paths of a series: a line with the band of its extremes; or dots, drawn as lines of
    zero length, which stay round when stretched; or bars."""
    if one.kind == "bars":
        half = min(0.4, 0.5 - 1e-3)
        boxes = (
            f"M{x_of(b.x - half)} {y_of(0)}V{y_of(b.mean)}H{x_of(b.x + half)}V{y_of(0)}Z"
            for b in bins
        )
        return [f'<path class="fill {one.colour}" d="{"".join(boxes)}"/>']
    line = "M" + "L".join(f"{x_of(b.x)} {y_of(b.mean)}" for b in bins)
    drawn = []
    if any(b.high > b.low for b in bins):
        edge = [f"{x_of(b.x)} {y_of(b.high)}" for b in bins] + [
            f"{x_of(b.x)} {y_of(b.low)}" for b in reversed(bins)
        ]
        drawn.append(f'<path class="band {one.colour}" d="M{"L".join(edge)}Z"/>')
    if one.kind == "dots" or len(bins) == 1:
        dots = "".join(f"M{x_of(b.x)} {y_of(b.mean)}h0" for b in bins)
        drawn.append(f'<path class="line thin {one.colour}" d="{line}"/>')
        drawn.append(f'<path class="dot {one.colour}" d="{dots}"/>')
    else:
        drawn.append(f'<path class="line {one.colour}" d="{line}"/>')
    return drawn


def _legend(series: Iterable[Series]) -> str:
    """The legend: the name of every series, with its last value."""
    entries = []
    for one in series:
        last = one.points[-1][1]
        value = (
            "" if one.kind == "bars" else f" {last:,.0f}" if abs(last) >= 1000 else f" {last:.4g}"
        )
        entries.append(f'<span class="key {one.colour}">{escape(one.name)}{value}</span>')
    return "".join(entries)


def timeline_figure(timeline: Timeline, name: str) -> str:
    """A pipeline's step as an HTML figure: a lane per rank, a box per action, in milliseconds;
    empty space is idle time."""
    lanes, kinds = [], set()
    several = max(len(chunk_of_stage(lane)) for lane in timeline.ranks) > 1
    for rank, lane in enumerate(timeline.ranks):
        chunks = chunk_of_stage(lane)
        boxes: dict[str, list[str]] = {}
        marks: list[list[Any]] = []
        for action, begin, end in lane:
            kinds.add(action.kind)
            start, width = begin - timeline.start, end - begin
            x, w = start / timeline.step_time * WIDTH, width / timeline.step_time * WIDTH
            colour = shade(action.kind, chunks[action.stage], len(chunks))
            boxes.setdefault(colour, []).append(
                f"M{x:.2f} 0h{max(w - min(0.6, w / 5), 0.2):.2f}V{HEIGHT}H{x:.2f}Z"
            )
            said = (
                f"{NAMES[action.kind]}, micro-batch {action.microbatch}, stage {action.stage}: "
                f"{width:.3g} ms"
            )
            marks.append([round(start, 3), round(start + width, 3), said])
        paths = "".join(
            f'<path fill="{colour}" d="{"".join(found)}"/>' for colour, found in boxes.items()
        )
        data = {"x": [0, timeline.step_time], "boxes": marks}
        lanes.append(
            f'<div class="lane"><span>rank {rank}</span><div class="plot" '
            f'data-chart="{escape(json.dumps(data))}">'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="rank {rank}">{paths}</svg>'
            f"{POINTER}</div></div>"
        )
    legend = "".join(
        f'<span class="key" style="--c:{shade(kind, 0, 1)}">{NAMES[kind]}</span>'
        for kind in Kind
        if kind in kinds
    )
    marks_below = "".join(
        f'<span style="left:{tick / timeline.step_time:.2%}">{short(tick)}</span>'
        for tick in ticks(0, timeline.step_time, 6)
    )
    return (
        '<figure class="wide timeline"><figcaption><b>Pipeline timeline</b> '
        f"<small>{escape(name)}; one step of "
        f"{timeline.step_time:,.1f} ms, {timeline.bubble_fraction:.1%} of it idle</small>{legend}"
        f"{'<small>light: a later stage of the rank</small>' if several else ''}</figcaption>"
        f'{"".join(lanes)}<div class="lane '
        f'axis"><span>ms</span><div>{marks_below}</div></div></figure>'
    )
