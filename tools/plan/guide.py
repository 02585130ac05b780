"""ZeRO's memory and traffic as guides to data-parallel training count them, next to Lattice's."""

from dataclasses import replace

from costs.parameters import num_parameters
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from settings.config import Config
from tools.command import table
from tools.plan.hardware import GB
from tools.plan.layout import PLAIN, Layout

STAGES = (0, 1, 2, 3)
# Bytes of the optimizer state (two float32), of gradients and of weights (bfloat16), 12 in all:
# each stage shards one more of them (Rajbhandari et al. 2020, figure 1).
GUIDE = (8, 2, 2)
# How often a step of one micro-batch sends the whole model: (gradients, weights). DDP all-reduces
# gradients, which counts twice; ZeRO-1 and ZeRO-2 reduce-scatter gradients and gather weights once;
# ZeRO-3 and FSDP gather weights in forward and in backward.
PASSES = {"ddp": (2, 0), "zero 1": (1, 1), "zero 2": (1, 1), "zero 3": (1, 2)}


def guide_bytes(parameters: float, ranks: int, zero_stage: int) -> float:
    """Bytes per rank by ZeRO's table."""
    return parameters * (sum(GUIDE[:zero_stage]) / ranks + sum(GUIDE[zero_stage:]))


def data_parallel(config: Config, ranks: int, zero_stage: int) -> Layout:
    """The job without any parallelism but that over `ranks` data-parallel ranks."""
    shard, replicate = (1, ranks) if zero_stage == 0 else (ranks, 1)
    given = {"dp_shard": shard, "dp_replicate": replicate, "zero_stage": zero_stage}
    parallel = replace(config.parallel, **PLAIN | given)
    return Layout(replace(config, parallel=parallel), ranks, 0)


def our_bytes(config: Config, ranks: int, zero_stage: int) -> dict[str, float]:
    """Bytes that Lattice holds on each of `ranks` data-parallel ranks between two micro-batches,
    without activations and buffers."""
    layout = data_parallel(config, ranks, zero_stage)
    shard = layout.sizes.dp_shard
    weights = [weight for unit in layout.units(0) for weight in unit.weights]
    numel = sum(weight.numel for weight in weights)
    here = not layout.offloads  # whether the states are in the GPU's memory
    gathers = zero_stage < 3 and not (layout.whole and layout.compute == layout.master)
    return {
        WEIGHTS: numel * layout.master / shard * here,
        MOMENTS: sum(map(layout.bytes_of_states, weights)) / shard * here,
        GATHERED: numel * layout.compute * gathers,
        GRADIENTS: numel * layout.reduce if zero_stage < 2 else 0.0,
        SHARDED_GRADIENTS: numel * max(layout.reduce, layout.master) / shard * (zero_stage >= 2),
    }


def traffic(parameters: float, ranks: int, gradient: int, weight: int) -> str:
    """For each strategy, the GB that one rank sends in a step of one micro-batch with gradients and
    weights of so many bytes. In a ring of n ranks, each sends (n − 1) / n of the tensor per gather
    or scatter."""
    sent = parameters * (ranks - 1) / ranks / GB
    each = PASSES.items()
    return ", ".join(f"{name} {sent * (g * gradient + w * weight):.1f}" for name, (g, w) in each)


def zero_table(config: Config, ranks: int) -> str:
    """The bytes per rank for each ZeRO stage as guides count them, for a round number of
    parameters, and as Lattice holds them; and what a rank sends."""
    model = num_parameters(config.model)
    parameters = round(model, -9) if model >= 1e9 else model
    layout = data_parallel(config, ranks, 3)
    rows = [["zero_stage", "guides", "Lattice", "of which"]]
    for stage in STAGES:
        ours = our_bytes(config, ranks, stage)
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in ours.items() if size)
        guides = guide_bytes(parameters, ranks, stage) / GB
        rows.append([str(stage), f"{guides:.4g}", f"{sum(ours.values()) / GB:.1f}", parts])
    return "\n".join(
        [
            f"{parameters / 1e9:g} billion parameters on {ranks} data-parallel GPUs, in GB on "
            f"each, without activations; Lattice: {model:,} parameters",
            table(rows, left=[3]),
            "traffic that one GPU sends for one micro-batch, in GB:",
            f"  guides, all in bfloat16: {traffic(parameters, ranks, 2, 2)}",
            f"  Lattice, as configured: {traffic(model, ranks, layout.reduce, layout.compute)}",
        ]
    )
