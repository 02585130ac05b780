"""All figures of one job, as a dictionary and as text."""

from collections.abc import Iterator
from typing import Any

from costs.collectives import Call, wire_bytes
from costs.parameters import num_parameters
from costs.summary import model_flops
from parallel.axes import MeshSizes
from settings.config import Config
from tools.plan.goodput import describe_goodput, goodput
from tools.plan.hardware import GB, Device
from tools.plan.layout import Layout
from tools.plan.memory import Memory, bytes_outside
from tools.plan.time import StepTime, seconds_on_the_wire
from tools.plan.traffic import by_axis, collectives

COMPILED = (
    "planned without train.compile=true, which makes a step a little faster and keeps a little "
    "less memory"
)
OTHER = "efficiencies are those of {}, except those that a file of rates replaces"


def summarise(
    config: Config,
    world: int,
    device: Device,
    tokens: float = 0.0,
    price: float = 0.0,
    imbalance: float = 1.0,
) -> dict[str, Any]:
    """All figures of a job of `world` GPUs.

    Args:
        tokens: the number of tokens of the whole run, for its days, energy and cost; 0: unknown.
        price: of one GPU for one hour, in any currency; 0: unknown.
        imbalance: the experts of each rank receive so many times their share of rows, as those of
            the rank for which all others wait.
    """
    first = Layout(config, world, 0, imbalance=imbalance)
    time = StepTime(first, device)
    ranks = [_rank(time, first.at(rank)) for rank in range(first.sizes.pp)]
    peaks = [rank["peak_memory_bytes"] for rank in ranks]
    outside = [bytes_outside(first.at(rank)) for rank in range(first.sizes.pp)]
    on_host, on_disk = (
        max(each) * device.gpus_of_node(world) for each in zip(*outside, strict=True)
    )
    power = world * device.watts
    plan: dict[str, Any] = {
        "parameters": num_parameters(config.model),
        "world": world,
        "mesh": first.sizes.by_axis(),
        "micro_batches": first.num_microbatches,
        "device": device.name,
        "peak_flops": device.peak_flops,
        "step_seconds": time.step_seconds,
        "tokens_per_second": time.tokens_per_second,
        "tokens_per_second_per_device": time.tokens_per_second / world,
        "mfu": time.mfu(),
        "mfu_full_attention": time.mfu(whole_attention=True),
        "bubble_fraction": time.timeline.bubble_fraction,
        "peak_memory_bytes": peaks,
        "memory_bytes_available": device.room,
        "host_bytes_per_node": on_host,
        "disk_bytes_per_node": on_disk,
        "fits": max(peaks) <= device.room,
        "joules_per_step": time.step_seconds * power,
        "goodput": goodput(config, world, device, time.step_seconds),
        # where the run may differ
        "assumptions": [COMPILED] * config.train.compile
        + [OTHER.format(device.efficiencies_of)] * (device.name != device.efficiencies_of),
        "ranks": ranks,
    }
    if price:
        plan["cost_per_step"] = time.step_seconds / 3600 * world * price
    if tokens:
        seconds = tokens / time.tokens_per_second
        plan["run"] = {
            "tokens": tokens,
            "days": seconds / 86400,
            "megawatt_hours": seconds * power / 3.6e9,
        }
        if price:
            plan["run"]["cost"] = seconds / 3600 * world * price
    return plan


def _rank(time: StepTime, layout: Layout) -> dict[str, Any]:
    """The figures of one pipeline rank, for tp rank 0, which has the largest part of the
    vocabulary, and cp rank 0."""
    memory, calls = Memory(layout), collectives(layout)
    sends = calls[Call("pp", "send", layout.hidden_bytes)]
    seconds = seconds_on_the_wire(time, layout, sends)
    traffic = by_axis(calls)
    for axis, row in traffic.items():
        row["wire_bytes"] = sum(
            number * wire_bytes(call.kind, call.bytes, _ranks(layout, call))
            for call, number in calls.items()
            if call.axis == axis
        )
        if axis in seconds:
            row["wire_seconds"], row["exposed_seconds"] = seconds[axis]
    units = [unit for stage in layout.stages for unit in layout.units(stage)]
    largest = sorted(memory.at_peak.items(), key=lambda item: -item[1])
    # of the axes of weights one contains cp
    names = {layout.sizes.with_cp: f"{layout.sizes.with_cp} × cp"} if layout.sizes.cp > 1 else {}
    return {
        "pp_rank": layout.pp_rank,
        "stages": layout.stages,
        "blocks": len(units) - (layout.embedding in units) - (layout.head in units),
        "parameters": sum(unit.numel for unit in units),
        # of forward and backward, without recomputation
        "flops_per_step": layout.num_microbatches * sum(map(model_flops, units)),
        "peak_memory_bytes": memory.peak,
        "peak_in": str(memory.peak_action or "after the last action"),
        "memory": {category: size for category, size in largest if size},
        "live_micro_batches": time.timeline.peak_live(layout.pp_rank),
        "collectives": {names.get(axis, axis): row for axis, row in traffic.items()},
    }


def _ranks(layout: Layout, call: Call) -> int:
    sizes = layout.sizes
    views = {"cp": sizes.cp, "loss": sizes.dp * sizes.cp, "batch": sizes.dp, "ends": 2}
    return (sizes.of_experts | sizes.of_weights | views).get(call.axis, layout.world)


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
    lines += describe_goodput(plan["goodput"]) + plan["assumptions"]
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
