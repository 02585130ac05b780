"""A plan and the result of a search as text, and a picture of a plan's memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parallel.axes import MeshSizes
from parallel.memory import ACTIVATIONS
from tools.plan.goodput import describe_goodput
from tools.plan.hardware import GB
from tools.plan.search import Found, Result, describe_alike

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.figure import Figure

ALIKE = 0.01  # of a step's seconds; the order of two layouts that differ by less is uncertain


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
    ordered: list[list[Found]] = []
    for one in found:
        alike = (row for row in ordered if _work(row[0]) == _work(one))
        row = next((row for row in alike if one.seconds <= (1 + ALIKE) * row[0].seconds), None)
        if row is None:
            ordered.append([one])
        else:
            row.append(one)
    return ordered


def _work(found: Found) -> tuple[object, ...]:
    p, t = found.config.parallel, found.config.train
    return (p.tp, p.cp, p.ep, p.pp, p.schedule, p.sequence_parallel, t.micro_batch_size,
            t.activation_checkpointing)  # fmt: skip


def draw_memory(plan: dict[str, Any]) -> "Figure":
    """Draw a bar per pipeline rank, divided by category, and a line at the available memory."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    ranks = plan["ranks"]
    names = list(dict.fromkeys(name for rank in ranks for name in rank["memory"]))
    figure = Figure(figsize=(8, 1.6 + 0.34 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    places, left = [f"pp rank {rank['pp_rank']}" for rank in ranks], [0.0] * len(ranks)
    for number, name in enumerate(names):
        # its lightness changes along the list, so that neighbours differ for the colour-blind too
        colour = colormaps["viridis_r"](number / len(names))
        sizes = [rank["memory"].get(name, 0) / GB for rank in ranks]
        axes.barh(places, sizes, left=left, color=colour, edgecolor="white", label=name)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(plan["memory_bytes_available"] / GB, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("GB at the peak; dashed: available")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure
