"""A plan and the result of a search as text, and a picture of a plan's memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallel.axes import MeshSizes
from parallel.memory import ACTIVATIONS
from tools.plan.goodput import describe_goodput
from tools.plan.hardware import GB
from tools.plan.search import Found, Result, describe_alike
from tools.plan.time import Part
from tools.timeline.draw import FONT, INK, MUTED, PAPER, TEXT_SIZE, WIDTH

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.figure import Figure

ALIKE = 0.01  # of a step's seconds; the order of two layouts that differ by less is uncertain

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


def describe_plan(plan: dict[str, Any]) -> str:
    mesh = str(MeshSizes(**plan["mesh"]))
    lines = [
        f"{plan['parameters']:,} parameters on {plan['world']} × {plan['device']} = {mesh}, "
        f"{plan['micro_batches']} micro-batches each",
        f"step {plan['step_seconds']:.3f} s   {plan['tokens_per_second']:,.0f} tokens/s   "
        f"{plan['tokens_per_second_per_device']:,.0f} per GPU   bubble "
        f"{plan['bubble_fraction']:.1%}",
        f"MFU {plan['mfu']:.1%} = {plan['mfu_formula']} ({plan['peak_flops'] / 1e12:,.0f} TFLOP/s)",
        f"    {plan['mfu_full_attention']:.1%} with attention counted as the whole square",
        f"energy {plan['joules_per_step'] / 1e6:,.2f} MJ a step"
        + (f"   cost {plan['cost_per_step']:,.2f} a step" if "cost_per_step" in plan else ""),
    ]
    if run := plan.get("run"):
        cost = f"   cost {run['cost']:,.0f}" if "cost" in run else ""
        lines.append(
            f"{run['tokens']:.3g} tokens: {run['days']:,.1f} days   {run['megawatt_hours']:,.0f} "
            f"MWh{cost}"
        )
    lines += describe_goodput(plan["goodput"]) + plan["assumptions"] + plan["warnings"]
    fits = "fits" if plan["fits"] else "DOES NOT FIT"
    lines.append(
        f"memory {max(plan['peak_memory_bytes']) / GB:.2f} GB at most: "
        f"{fits} {plan['memory_bytes_available'] / GB:.0f} GB"
    )
    for rank in plan["ranks"]:
        stages = ", ".join(map(str, rank["stages"]))
        lines.append(
            f"\npipeline rank {rank['pp_rank']}, stage {stages}: {rank['blocks']} blocks, "
            f"{rank['parameters']:,} parameters, "
            f"{rank['flops_per_step'] / 1e15:.2f} PFLOP a step"
        )
        live = f", {rank['live_micro_batches']} micro-batches of a stage alive at most"
        lines.append(
            f"  {rank['peak_memory_bytes'] / GB:9.3f} GB  at the peak, in {rank['peak_in']}{live}"
        )
        for name, size in rank["memory"].items():
            if size >= 1e6:
                lines.append(f"  {size / GB:9.3f} GB  {name}")
                kinds = rank["activations"] if name == ACTIVATIONS else {}
                lines += [
                    f"  {part / GB:15.3f} GB  {kind}" for kind, part in kinds.items() if part >= 1e6
                ]
        for axis, row in rank["collectives"].items():
            lines.append(
                f"  {row['bytes'] / GB:9.3f} GB  over {axis} in {row['count']:,} collectives, "
                f"{row['wire_bytes'] / GB:.3f} GB on the wire{_seconds(row)}; {row['hidden']}"
            )
    return "\n".join(lines)


def _seconds(row: dict[str, Any]) -> str:
    if "wire_seconds" not in row:
        return ""
    return f" in {row['wire_seconds']:.3f} s, {row['exposed_seconds']:.3f} s of them exposed"


def describe_search(result: Result) -> str:
    found = rows([*result.best, *result.also])[: len(result.best)]
    lines = [
        f"{result.layouts:,} layouts, of which {result.counted:,} were counted exactly; "
        "the fastest that fit, fastest first, with layouts that "
        f"differ by less than {ALIKE:.0%} of a step in one row:",
        "            step s           MFU      peak GB",
    ]
    for i, row in enumerate(found):
        seconds = _range([one.seconds for one in row], 3)
        mfu = _range([one.time.mfu * 100 for one in row], 1) + "%"
        size = _range([one.peak / GB for one in row], 2)
        number = f"  ({len(row)} layouts)" if len(row) > 1 else ""
        lines.append(
            f"{i + 1:2d} {seconds:>15}  {mfu:>10}  {size:>11}  {describe_alike(row)}{number}"
        )
    if len(found) > 1:
        lines.append(f"the second loses {why_not(found[0][0], found[1][0])}")
    lines.append(f"the first: {found[0][0].overrides()}")
    return "\n".join(lines + result.space)


def _range(numbers: list[float], digits: int) -> str:
    """The smallest and the largest number as `14.707-14.735`, or one number if they print alike."""
    ends = dict.fromkeys(f"{number:.{digits}f}" for number in (min(numbers), max(numbers)))
    return "-".join(ends)


def rows(found: Sequence[Found]) -> list[list[Found]]:
    """Group layouts, given in the order of their seconds, into rows of layouts that hardly differ.

    The layouts of a row compute the same (tp, cp, ep, pp, schedule, micro-batch, recomputation) and
    take at most 1% longer than its first. They may differ in how layers and data-parallel ranks are
    divided, and in the ZeRO stage.
    """
    together: dict[tuple[object, ...], list[list[Found]]] = {}
    ordered: list[list[Found]] = []
    for one in found:
        p, t = one.config.parallel, one.config.train
        work = (p.tp, p.cp, p.ep, p.pp, p.schedule, p.sequence_parallel, t.micro_batch_size,
                t.activation_checkpointing)  # fmt: skip
        alike = together.setdefault(work, [])
        row = next((row for row in alike if one.seconds <= (1 + ALIKE) * row[0].seconds), None)
        if row is None:
            row = []
            alike.append(row)
            ordered.append(row)
        row.append(one)
    return ordered


def why_not(best: Found, other: Found) -> str:
    """Explain where the second layout loses time."""
    a, b = best.time, other.time
    work = []  # of a rank, on average
    for time in (a, b):
        parts = map(Part, time.costs.forward, time.costs.input_grad, time.costs.weight_grad)
        work.append(
            sum(part.total for part in parts) * time.layout.num_microbatches / time.layout.sizes.pp
        )
    pipeline = [t.timeline.step_time for t in (a, b)]
    idle = [
        one.bubble_fraction * seconds for one, seconds in zip((best, other), pipeline, strict=True)
    ]
    tail = [one.seconds - seconds for one, seconds in zip((best, other), pipeline, strict=True)]
    reasons = {
        "in the actions themselves (computation, tp, exposed gathers)": work[1] - work[0],
        "waiting in the pipeline": idle[1] - idle[0],
        "after the last action (reductions, optimizer)": tail[1] - tail[0],
    }
    text = ", ".join(
        f"{seconds:+.3f} s {what}" for what, seconds in reasons.items() if abs(seconds) >= 5e-4
    )
    return f"{other.seconds - best.seconds:+.3f} s: {text or 'they are alike'}"


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
