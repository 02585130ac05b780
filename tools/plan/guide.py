"""ZeRO's memory and traffic as guides to data-parallel training count them, next to Lattice's."""

from dataclasses import replace
from typing import Literal

from model.transformer import num_parameters
from parallel.memory import GATHERED, GRADIENTS, MOMENTS, SHARDED_GRADIENTS, WEIGHTS
from tools.plan.hardware import GB
from tools.plan.layout import Layout
from training.config import Config

ZeroStage = Literal[0, 1, 2, 3]
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
GUIDE = {"weights": 2, "gradients": 2, "optimizer": 8}  # bytes: bfloat16, bfloat16, two float32


def guide_bytes(parameters: float, ranks: int, zero_stage: int) -> float:
    """Bytes per rank by ZeRO's table (Rajbhandari et al. 2020, figure 1), with 12 bytes per
    parameter: stage 1 shards the optimizer state, stage 2 also the gradients, stage 3
    everything."""
    sharded = {0: (), 1: ("optimizer",), 2: ("optimizer", "gradients"), 3: tuple(GUIDE)}[zero_stage]
    return sum(
        size * parameters / (ranks if name in sharded else 1) for name, size in GUIDE.items()
    )


def our_bytes(config: Config, ranks: int, zero_stage: ZeroStage) -> dict[str, float]:
    """Bytes that Lattice holds on each of `ranks` data-parallel ranks between two micro-batches,
    without activations and buffers."""
    shard, replicate = (1, ranks) if zero_stage == 0 else (ranks, 1)
    parallel = replace(config.parallel, tp=1, pp=1, cp=1, ep=1, schedule="1f1b", stages_per_rank=1,
                       layers_per_stage=None, dp_shard=shard, dp_replicate=replicate,
                       zero_stage=zero_stage)  # fmt: skip
    layout = Layout(replace(config, parallel=parallel), ranks, 0)
    numel = sum(unit.numel for unit in layout.units(0))
    table = {
        WEIGHTS: numel * layout.master / shard,
        MOMENTS: layout.states_per_weight * numel * layout.master / shard,
    }
    table[GATHERED] = numel * layout.compute if zero_stage < 3 else 0.0
    table[GRADIENTS] = numel * layout.reduce if zero_stage < 2 else 0.0
    table[SHARDED_GRADIENTS] = numel * layout.reduce / shard if zero_stage >= 2 else 0.0
    return table


def guide_traffic(parameters: float, ranks: int, strategy: str) -> float:
    """Bytes that one rank sends in a step of one micro-batch. In a ring of n ranks, each sends
    (n − 1) / n of the tensor per gather or scatter.

    DDP all-reduces bfloat16 gradients, which is twice the model. ZeRO-3 and FSDP gather weights in
    forward and in backward and reduce-scatter gradients: three times the model. ZeRO-1 and ZeRO-2
    reduce-scatter gradients and gather weights once: twice the model, as in DDP.
    """
    times = {"ddp": 2, "zero 1": 2, "zero 2": 2, "zero 3": 3}[strategy]
    return parameters * 2 * times * (ranks - 1) / ranks


def our_traffic(config: Config, ranks: int, strategy: str) -> float:
    """The same for Lattice, which reduces gradients in parallel.reduce_dtype (an all-reduce counts
    twice, a reduce-scatter once) and gathers weights in train.dtype."""
    parallel = replace(config.parallel, tp=1, pp=1, cp=1, ep=1, schedule="1f1b", stages_per_rank=1,
                       layers_per_stage=None, dp_shard=ranks, dp_replicate=1)  # fmt: skip
    layout = Layout(replace(config, parallel=parallel), ranks, 0)
    passes = {"ddp": (2, 0), "zero 1": (1, 1), "zero 2": (1, 1), "zero 3": (1, 2)}
    reduced, gathered = passes[strategy]
    width = reduced * layout.reduce + gathered * layout.compute
    return num_parameters(config.model) * width * (ranks - 1) / ranks


def zero_table(config: Config, ranks: int) -> str:
    """A table as text: the bytes per rank for each ZeRO stage as guides count them, for a round
    number of parameters, and as Lattice holds them."""
    model = num_parameters(config.model)
    parameters = round(model, -9) if model >= 1e9 else model
    lines = [
        f"{parameters / 1e9:g} billion parameters on {ranks} data-parallel GPUs, in GB on each; "
        "activations come on top",
        "guides: weights 2, gradients 2, optimizer 8 bytes a parameter (no float32 weights, which "
        "training in bfloat16 needs)",
        f"Lattice: {model:,} parameters; float32 weights and moments, bfloat16 copies to compute "
        "with, float32 gradients",
        "zero_stage   guides   Lattice   of which",
    ]
    for stage in STAGES:
        ours = our_bytes(config, ranks, stage)
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in ours.items() if size)
        lines.append(
            f"{stage:10d} {guide_bytes(parameters, ranks, stage) / GB:8.4g} "
            f"{sum(ours.values()) / GB:9.1f}   {parts}"
        )
    lines.append("traffic that one GPU sends for one micro-batch, in GB:")
    names = ("ddp", "zero 1", "zero 2", "zero 3")
    guides = ", ".join(
        f"{name} {guide_traffic(parameters, ranks, name) / GB:.1f}" for name in names
    )
    ours_sent = ", ".join(f"{name} {our_traffic(config, ranks, name) / GB:.1f}" for name in names)
    lines += [
        f"  guides, all in bfloat16: {guides}",
        f"  Lattice, gradients in {config.parallel.reduce_dtype}: {ours_sent}",
    ]
    return "\n".join(lines)
