"""From a configuration and a mesh to this rank's model: meta device → checkpointing → compile →
FSDP → memory → weights."""

import os

import torch
import torch.distributed as dist

from errors import UserError
from model.cost import layer_costs
from model.initialise import initialise
from model.transformer import Transformer
from parallel.activation import wrap_blocks
from parallel.data import shard
from parallel.mesh import Mesh
from parallel.pipeline.balance import even_split, imbalance
from parallel.pipeline.tied import TiedEmbedding, first_and_last_stage_group
from parallel.topology import describe_nodes, tp_between_nodes, tp_bytes_per_step
from training.config import Config
from training.optimizers import state_bytes
from training.precision import Precision


def build_stages(config: Config, mesh: Mesh) -> dict[int, Transformer]:
    """This rank's pipeline stages by global index, sharded and initialised, on the mesh's device
    (or offloaded to the host)."""
    split = config.split_layers()
    stages = {}
    for s, rank in enumerate(config.parallel.ranks_of_stages):
        if rank == mesh.pp_rank:
            stages[s] = build_stage(config, mesh, split[s], first=s == 0, last=s == len(split) - 1)
    return stages


def check_fits(config: Config, device: str) -> None:
    """Raises UserError where weights and optimizer states are more than a rank's share of the
    memory: what is certain, before anything is allocated. (What else a step needs, `tools.plan`
    says.)"""
    parallel, world = config.parallel, dist.get_world_size()
    needed = config.model.num_parameters * state_bytes(config) * parallel.dp_replicate / world
    if device == "cuda" and not parallel.cpu_offload:
        memory = torch.cuda.get_device_properties().total_memory
    else:
        memory = (
            os.sysconf("SC_PAGE_SIZE")
            * os.sysconf("SC_PHYS_PAGES")
            // int(os.environ.get("LOCAL_WORLD_SIZE", world))
        )
    if needed > memory:
        why = f"weights and optimizer states are {needed / 1e9:,.1f} GB of each rank, which has {memory / 1e9:,.1f} GB"
        remedy = "use more processes (parallel.dp_shard, tp, pp) or a smaller model; `python -m tools.plan` says what fits"
        raise UserError("model", f"{config.model.num_parameters:,} parameters", why, remedy)


def describe_places(config: Config, mesh: Mesh, ranks_per_node: int) -> str:
    """What of the mesh lies inside a node, and what it costs if tensor parallelism does not: one
    line, or two."""
    model, train, tp = config.model, config.train, config.parallel.tp
    sent = tp_bytes_per_step(
        tp,
        tokens=train.global_batch_size * train.seq_len // mesh.dp_size,
        dim=model.dim,
        layers=-(-model.num_layers // config.parallel.pp),
        bytes_per_number=Precision.of(config).compute.itemsize,
        sequence_parallel=config.parallel.sequence_parallel,
    )
    return f"{describe_nodes(mesh.sizes, ranks_per_node)}\n{tp_between_nodes(tp, ranks_per_node, sent)}".strip()


def build_stage(config: Config, mesh: Mesh, layers: range, first: bool, last: bool) -> Transformer:
    """One stage, ready to train."""
    precision = Precision.of(config)
    stage = Transformer(
        config.model, layers, first, last, mesh.tp, config.parallel.sequence_parallel
    ).to(precision.master)
    blocks = list(stage.blocks.values())
    wrap_blocks(
        blocks,
        config.train.activation_checkpointing,
        config.train.compile,
        config.model.dim,
        mesh.tp.size(),
    )
    units: list[list[torch.nn.Module]] = [[block] for block in blocks]
    if stage.embedding is not None:
        units.insert(0, [stage.embedding])
    if stage.norm is not None and stage.head is not None:
        units.append([stage.norm, stage.head])
    if config.parallel.fsdp_unit == "stage":
        units = [[module for unit in units for module in unit]]
    shard(
        stage,
        units,
        mesh.fsdp,
        compute_dtype=precision.compute,
        reduce_dtype=precision.reduce,
        cpu_offload=config.parallel.cpu_offload,
    )
    stage.to_empty(device="cpu" if config.parallel.cpu_offload else mesh.device)
    initialise(stage, config.train.seed)
    return stage


def describe_stages(config: Config) -> str:
    """How the blocks are split, for the log: `4 stages of 8, 9, 9, 6 blocks: the slowest rank
    computes 5% more than the mean (even split: 19%)`."""
    costs = layer_costs(config.model, config.train.seq_len, config.train.activation_checkpointing)
    split = [len(layers) for layers in config.split_layers()]
    even = even_split(config.model.num_layers, len(split))
    over, over_even = (
        imbalance(s, costs, config.parallel.ranks_of_stages) - 1 for s in (split, even)
    )
    blocks = (
        f"{split[0]} blocks each"
        if len(set(split)) == 1
        else f"{', '.join(map(str, split))} blocks"
    )
    beside = "" if split == even else f" (even split: {over_even:.0%})"
    return f"{len(split)} stages of {blocks}: the slowest rank computes {over:.0%} more than the mean{beside}"


def build_tied_embedding(
    config: Config, mesh: Mesh, stages: dict[int, Transformer]
) -> TiedEmbedding:
    """The tied weight's copies on this rank; no copies where embeddings are not tied. Every rank
    must call it."""
    if not config.model.tie_embeddings:
        return TiedEmbedding([], None)
    copies = []
    for stage in stages.values():
        copies += [module.weight for module in (stage.embedding, stage.head) if module is not None]
    return TiedEmbedding(
        copies, first_and_last_stage_group(mesh.root, config.parallel.ranks_of_stages)
    )
