"""Build this rank's model from a configuration and a mesh: meta device → activation checkpointing
and compile → FSDP → memory → initial weights."""

import torch

from model.initialise import initialise
from model.kernels.attention import OPERATORS
from model.transformer import Transformer
from parallel.activation import gathers_again, wrap_blocks
from parallel.context import ContextParallel
from parallel.data import allocate_on_disk
from parallel.expert import ExpertParallel
from parallel.fsdp_units import input_buffers, shard
from parallel.layer import TensorParallel
from parallel.mesh import Mesh
from settings.config import Config


def build_stages(config: Config, mesh: Mesh) -> dict[int, Transformer]:
    """This rank's pipeline stages by global index, sharded and initialised, on the mesh's device
    (or where parallel.offload keeps them)."""
    split = config.split_layers()
    stages = {}
    for s, rank in enumerate(config.parallel.ranks_of_stages):
        if rank == mesh.pp.rank:
            stages[s] = build_stage(config, mesh, split[s], first=s == 0, last=s == len(split) - 1)
    return stages


def build_stage(config: Config, mesh: Mesh, layers: range, first: bool, last: bool) -> Transformer:
    """Build one stage, ready to train."""
    precision = config.precision
    parallel, train = config.parallel, config.train
    tp = TensorParallel.of(mesh, parallel.sequence_parallel, parallel.tp_pieces)
    cp = ContextParallel.of(mesh, gathers_again(train.activation_checkpointing))
    ep = ExpertParallel.of(mesh)
    stage = Transformer(config.model, layers, first, last, tp, cp, ep).to(precision.master)
    blocks = list(stage.blocks.values())
    mode, apart = train.activation_checkpointing, cp.size > 1 or config.clips_logits
    wrap_blocks(blocks, mode, train.compile, tp.size, OPERATORS, apart)
    units: list[list[torch.nn.Module]] = [[block] for block in blocks]
    if stage.embedding is not None:
        units.insert(0, [stage.embedding])
    if stage.norm is not None and stage.head is not None:
        units.append([stage.norm, stage.head])
    if parallel.fsdp_unit == "stage":
        units = [[module for unit in units for module in unit]]
    shard(
        stage,
        units,
        mesh,
        compute_dtype=precision.compute,
        reduce_dtype=precision.reduce,
        offload=parallel.offload,
        input_buffers=input_buffers(parallel.zero_stage),
    )
    if parallel.offload == "disk":
        allocate_on_disk(stage, parallel.offload_dir)
    else:
        stage.to_empty(device=mesh.device if parallel.offload == "none" else "cpu")
    initialise(stage, train.seed)
    return stage
