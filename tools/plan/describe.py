"""A plan and the result of a search as text."""

from collections.abc import Iterator
from typing import Any

from parallel.axes import MeshSizes
from tools.command import table
from tools.plan.goodput import describe_goodput
from tools.plan.hardware import GB
from tools.plan.search import SHOWN, Found, Result


def describe_plan(plan: dict[str, Any]) -> str:
    price = f"   cost {plan['cost_per_step']:,.2f} a step" if "cost_per_step" in plan else ""
    lines = [
        f"{plan['parameters']:,} parameters on {plan['world']} × {plan['device']} = "
        f"{MeshSizes(**plan['mesh'])}, {plan['micro_batches']} micro-batches each",
        f"step {plan['step_seconds']:.3f} s   {plan['tokens_per_second']:,.0f} tokens/s   "
        f"{plan['tokens_per_second_per_device']:,.0f} per GPU   bubble "
        f"{plan['bubble_fraction']:.1%}",
        f"MFU {plan['mfu']:.1%} = tokens per second × FLOPs per token / (GPUs × peak); causal "
        f"attention counts as half a square ({plan['peak_flops'] / 1e12:,.0f} TFLOP/s)",
        f"    {plan['mfu_full_attention']:.1%} with attention counted as the whole square",
        f"energy {plan['joules_per_step'] / 1e6:,.2f} MJ a step{price}",
    ]
    if run := plan.get("run"):
        cost = f"   cost {run['cost']:,.0f}" if "cost" in run else ""
        lines.append(
            f"{run['tokens']:.3g} tokens: {run['days']:,.1f} days   {run['megawatt_hours']:,.0f} "
            f"MWh{cost}"
        )
    lines += describe_goodput(plan["goodput"]) + plan["assumptions"] + plan["warnings"]
    fits, on_disk = "fits" if plan["fits"] else "DOES NOT FIT", plan["disk_bytes_per_node"]
    lines += [
        f"memory {max(plan['peak_memory_bytes']) / GB:.2f} GB at most: "
        f"{fits} {plan['memory_bytes_available'] / GB:.0f} GB",
        f"host memory {plan['host_bytes_per_node'] / GB:,.2f} GB at most of one node"
        + (f", local disk {on_disk / GB:,.2f} GB" if on_disk else "")
        + ", with what a save copies",
    ]
    return "\n".join([*lines, *(line for rank in plan["ranks"] for line in _describe_rank(rank))])


def _describe_rank(rank: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\npipeline rank {rank['pp_rank']}, stage {', '.join(map(str, rank['stages']))}: "
        f"{rank['blocks']} blocks, {rank['parameters']:,} parameters, "
        f"{rank['flops_per_step'] / 1e15:.2f} PFLOP a step"
    )
    yield (
        f"  {rank['peak_memory_bytes'] / GB:9.3f} GB  at the peak, in {rank['peak_in']}, "
        f"{rank['live_micro_batches']} micro-batches of a stage alive at most"
    )
    for name, size in rank["memory"].items():
        if size >= 1e6:
            yield f"  {size / GB:9.3f} GB  {name}"
    for axis, row in rank["collectives"].items():
        seconds = ""
        if "wire_seconds" in row:
            wire, exposed = row["wire_seconds"], row["exposed_seconds"]
            seconds = f" in {wire:.3f} s, {exposed:.3f} s of them exposed"
        yield (
            f"  {row['bytes'] / GB:9.3f} GB  over {axis} in {row['count']:,} collectives, "
            f"{row['wire_bytes'] / GB:.3f} GB on the wire{seconds}"
        )


def describe_search(result: Result) -> str:
    shown: dict[tuple[object, ...], Found] = {}  # by what a rank computes
    for one in result.best:
        p, t = one.config.parallel, one.config.train
        work = (p.tp, p.cp, p.ep, p.pp, p.schedule, p.sequence_parallel, t.micro_batch_size,
                t.activation_checkpointing)  # fmt: skip
        shown.setdefault(work, one)
    rows = [["step s", "MFU", "peak GB", "layout"]]
    for one in [*shown.values()][:SHOWN]:
        figures = f"{one.seconds:.3f}", f"{one.step['mfu']:.1%}", f"{one.peak / GB:.2f}"
        rows.append([*figures, str(one)])
    return "\n".join(
        [
            f"{result.layouts:,} layouts, of which {result.counted:,} were counted exactly; the "
            "fastest that fit, fastest first, and of those that differ only in ZeRO stage or in "
            "how layers and data-parallel ranks are divided, the first:",
            table(rows, left=[3]),
            f"the first: {result.best[0].overrides()}",
        ]
    )
