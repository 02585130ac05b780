"""Draws the results of tools/plan: memory of every pipeline rank, and layouts by time and
memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tools.plan.hardware import GB
from tools.timeline.draw import FONT, INK, MUTED, PAPER, TEXT_SIZE, WIDTH

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.figure import Figure

    from tools.plan.search import Found

# Lightness decreases along the list, so that neighbours differ for the colour-blind too.
COLOURS = (
    "#fbe68f",
    "#c5cad3",
    "#8ba6f7",
    "#cf6aa3",
    "#d39400",
    "#187a3a",
    "#1740a8",
    "#5e1040",
    "#6b7280",
    "#1f2937",
    "#c4f5d6",
)


def draw_memory(plan: dict[str, Any]) -> "Figure":
    """Draw a bar per pipeline rank, divided by category, and a line at the available memory."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"font.family": "sans-serif", "font.sans-serif": FONT})
    ranks = plan["ranks"]
    names = list(dict.fromkeys(name for rank in ranks for name in rank["memory"]))
    figure = Figure(figsize=(WIDTH, 1.6 + 0.34 * len(ranks)), facecolor=PAPER, layout="constrained")
    axes = figure.add_subplot()
    assert len(names) <= len(COLOURS)
    for name, colour in zip(names, COLOURS, strict=False):
        sizes = [rank["memory"].get(name, 0) / GB for rank in ranks]
        left = [
            sum(rank["memory"].get(before, 0) for before in names[: names.index(name)]) / GB
            for rank in ranks
        ]
        axes.barh(
            [rank["pp_rank"] for rank in ranks],
            sizes,
            left=left,
            color=colour,
            label=name,
            height=0.8,
        )
    axes.axvline(plan["memory_bytes_available"] / GB, color=INK, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_yticks(
        [rank["pp_rank"] for rank in ranks],
        [f"pp rank {rank['pp_rank']}" for rank in ranks],
        size=TEXT_SIZE,
    )
    axes.set_xlabel("GB at the peak; dashed: available", size=TEXT_SIZE, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, fontsize=TEXT_SIZE - 1, frameon=False)
    return figure


def draw_frontier(frontier: Sequence["Found"], room: float) -> "Figure":
    """Draw the layouts that no other layout beats in both time and memory."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"font.family": "sans-serif", "font.sans-serif": FONT})
    figure = Figure(figsize=(WIDTH, 4.2), facecolor=PAPER, layout="constrained")
    axes = figure.add_subplot()
    memory, seconds = [one.peak / GB for one in frontier], [one.seconds for one in frontier]
    axes.plot(memory, seconds, "o-", color="#1740a8", drawstyle="steps-post")
    for one, x, y in zip(frontier, memory, seconds, strict=True):
        p = one.config.parallel
        label = (
            f"tp {p.tp} pp {p.pp} zero {p.zero_stage} {p.schedule}, "
            f"{one.config.train.activation_checkpointing}"
        )
        axes.annotate(
            label, (x, y), xytext=(4, 5), textcoords="offset points", size=TEXT_SIZE - 2, color=INK
        )
    axes.axvline(room / GB, color=INK, linestyle="--", linewidth=1)
    axes.set_xlabel("GB at the peak", size=TEXT_SIZE, color=MUTED)
    axes.set_ylabel("seconds of a step", size=TEXT_SIZE, color=MUTED)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
