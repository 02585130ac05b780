"""How a run is split over its processes (the section `parallel.` of a configuration file)."""

from itertools import accumulate
from typing import Annotated, Literal

from errors import UserError
from parallel.axes import MeshSizes
from parallel.pipeline.actions import stage_ranks
from parallel.pipeline.balance import LayerCosts, balanced_split, even_split
from parallel.pipeline.schedules import build_schedule
from settings import LARGEST, Count, OneOf, Text, Whole, between, section


@section("parallel")
class ParallelConfig:
    """Sizes of the mesh axes and the options of each. tp · pp · dp_shard · dp_replicate is the
    number of processes."""

    tp: Count = 1  # tensor parallel: each matrix is cut tp ways; keep it inside a node
    pp: Count = 1  # pipeline parallel: the layers are cut into pp · stages_per_rank stages
    dp_shard: Annotated[
        int, between(-1, LARGEST)
    ] = -1  # data parallel, weights and optimizer sharded (FSDP); -1: what is left of the world
    dp_replicate: Count = 1  # data parallel, whole replicas of the sharded groups (hybrid sharding)

    # between the matrices of a block, each tp rank keeps 1 / tp of the sequence
    sequence_parallel: bool = True
    schedule: Text = "1f1b"  # a name in parallel/pipeline/schedules.py
    stages_per_rank: Count = 1  # pipeline stages each rank holds
    # Blocks of each stage, first to last; null: as even as possible; auto: the slowest as fast as
    # possible.
    layers_per_stage: list[Whole] | Literal["auto"] | None = None
    zero_stage: Annotated[Literal[0, 1, 2, 3], OneOf] = 1  # see the table in parallel/data.py
    # What FSDP gathers and reduces at once. block: one moves while another computes. stage: few
    # messages, for blocks so small that a message costs more than its bytes do.
    fsdp_unit: Literal["block", "stage"] = "block"
    # of data-parallel gradient reductions (float64 in float64 runs)
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # parameters, gradients and optimizer state live in host memory between uses
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        if self.dp_shard == 0:
            raise UserError(
                "parallel.dp_shard",
                0,
                "must be positive, or -1",
                "-1 takes what is left of the world",
            )
        if (
            isinstance(self.layers_per_stage, list)
            and len(self.layers_per_stage) != self.num_stages
        ):
            raise UserError(
                "parallel.layers_per_stage",
                self.layers_per_stage,
                f"must have one number for each of the pp · stages_per_rank = {self.num_stages} stages",
                f"give {self.num_stages} numbers, null for an even split, or auto for a balanced one",
            )

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """The mesh of `world_size` processes, with dp_shard = -1 filled in.

        Raises:
            UserError: the axes do not multiply to the world, or zero_stage 0 meets sharded data
                parallelism.
        """
        others = self.tp * self.pp * self.dp_replicate
        dp_shard = self.dp_shard if self.dp_shard != -1 else world_size // others
        if others * dp_shard != world_size or dp_shard == 0:
            given = f"tp={self.tp} · pp={self.pp} · dp_replicate={self.dp_replicate} · dp_shard={self.dp_shard}"
            search = f"`python -m tools.plan CONFIG --gpus {world_size} --search` lists what fits"
            if world_size % others == 0:
                key, value = "parallel.dp_shard", self.dp_shard
                remedy = f"set parallel.dp_shard=-1, which takes the {world_size // others} that are left, or start exactly "
                remedy += f"{others * dp_shard} processes; {search}"
            else:
                key, value = "parallel.tp", self.tp
                fits = (
                    f"a multiple of {others}"
                    if self.dp_shard == -1
                    else f"exactly {others * self.dp_shard}"
                )
                remedy = f"start {fits} processes, or choose axes whose product is {world_size}: {search}"
            raise UserError(
                key, value, f"{given} does not make the world of {world_size} processes", remedy
            )
        if self.zero_stage == 0 and dp_shard != 1:
            raise UserError(
                "parallel.zero_stage",
                0,
                f"stage 0 keeps whole replicas, but dp_shard is {dp_shard}",
                f"set parallel.dp_shard=1 parallel.dp_replicate={self.dp_replicate * dp_shard}, or zero_stage 1 to 3",
            )
        return MeshSizes(pp=self.pp, dp_replicate=self.dp_replicate, dp_shard=dp_shard, tp=self.tp)

    @property
    def ranks_of_stages(self) -> list[int]:
        """The pipeline rank of each stage, first to last. (It does not depend on the number of
        micro-batches.)"""
        return stage_ranks(
            build_schedule(self.schedule, self.pp, self.stages_per_rank, 2 * self.pp)
        )

    def split_layers(self, num_layers: int, costs: LayerCosts) -> list[range]:
        """The blocks of each stage, first to last; `costs` are those of the model, for
        `layers_per_stage=auto`."""
        stages = self.num_stages
        if isinstance(self.layers_per_stage, list):
            counts = self.layers_per_stage
            if 0 in counts[1:-1]:
                why = "a stage between the first and the last would have no parameters"
                raise UserError(
                    "parallel.layers_per_stage", counts, why, "give every stage in between a layer"
                )
            if sum(counts) != num_layers:
                raise UserError(
                    "parallel.layers_per_stage",
                    counts,
                    f"adds up to {sum(counts)} layers, but model.num_layers={num_layers}",
                    "give numbers that add up to model.num_layers",
                )
        else:
            if num_layers < stages:
                raise UserError(
                    "parallel.pp",
                    self.pp,
                    f"{stages} stages, but the model has only {num_layers} layers",
                    f"use at most {num_layers} stages, or a parallel.layers_per_stage whose first or last has none",
                )
            balanced = self.layers_per_stage == "auto"
            counts = (
                balanced_split(num_layers, costs, self.ranks_of_stages)
                if balanced
                else even_split(num_layers, stages)
            )
        return [
            range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)
        ]
