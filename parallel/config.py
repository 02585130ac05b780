"""How a run is split over its processes (the section `parallel.` of a configuration file)."""

import math
from collections.abc import Callable
from dataclasses import field
from itertools import accumulate
from typing import Annotated, Any, Literal

from declare import LARGEST, Count, PathOrNone, Text, Whole, between, section
from errors import UserError
from parallel.axes import AXES, MeshSizes
from parallel.pipeline.actions import stage_ranks
from parallel.pipeline.balance import LayerCosts, balanced_split, even_split
from parallel.pipeline.schedules import build_schedule

MAX_RANKS = 2**20  # the largest known runs have a few hundred thousand


@section("parallel")
class ParallelConfig:
    """The size of each mesh axis, and its options. The product of the sizes is the number of
    processes."""

    tp: Count = 1  # tensor parallel: each matrix is sharded over tp ranks; keep them inside a node
    pp: Count = 1  # pipeline parallel: the layers are split into pp · stages_per_rank stages
    # data parallel with sharded weights and optimizer state (FSDP); -1: all remaining ranks
    dp_shard: Annotated[int, between(-1, LARGEST)] = -1
    dp_replicate: Count = 1  # data parallel with replicas of the sharded groups (hybrid sharding)
    cp: Count = 1  # context parallel: each sequence is split over cp ranks, which share attention

    # expert parallel: the experts of a layer are spread over ep ranks, which are a part of the
    # dp_shard · cp · tp ranks (axes.py)
    ep: Count = 1

    # in norms and in the residual stream, each tp rank keeps 1 / tp of the sequence
    sequence_parallel: bool = True
    # With tp, the number of pieces into which the sequence is cut: the product of one is computed
    # while another is gathered or reduced. 1: products wait for their communication.
    tp_pieces: Count = 1
    schedule: Text = "1f1b"  # a name in parallel/pipeline/schedules.py
    stages_per_rank: Count = 1  # pipeline stages on each rank
    # Blocks of each stage, first to last. null: split as evenly as possible; auto: make the slowest
    # rank as fast as possible.
    layers_per_stage: list[Whole] | Literal["auto"] | None = None
    zero_stage: Annotated[int, between(0, 3)] = 1  # see the table in parallel/data.py
    # What FSDP gathers and reduces at once. block: the communication of one block overlaps the
    # computation of another. stage: fewer, larger messages, for blocks so small that latency
    # dominates.
    fsdp_unit: Literal["block", "stage"] = "block"
    # dtype of data-parallel gradient reductions (float64 if train.dtype is float64)
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # Where weights and optimizer states are between uses. host: in the host's memory, with the
    # gradients, and the host updates them. disk: in files of offload_dir (parallel/disk.py).
    offload: Literal["none", "host", "disk"] = "none"
    offload_dir: PathOrNone = ""  # a folder on a local disk of each node
    # Layouts for worlds of different sizes: at each start, the largest that fits is used, and the
    # remaining ranks are spares (settings/layouts.py). Each gives the keys of this section in which
    # it differs, and may give train.micro_batch_size and train.activation_checkpointing. Empty: the
    # world must fit this section.
    layouts: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dp_shard == 0:
            remedy = "-1 takes all remaining ranks"
            raise UserError("parallel.dp_shard", 0, "must be positive, or -1", remedy)
        if (self.offload == "disk") != bool(self.offload_dir):
            why = "goes together with parallel.offload=disk"
            remedy = "give a folder on a local disk of each node, or another parallel.offload"
            raise UserError("parallel.offload_dir", self.offload_dir, why, remedy)
        given, stages = self.layers_per_stage, self.num_stages
        if isinstance(given, list) and len(given) != stages:
            why = f"must have one number for each of the pp · stages_per_rank = {stages} stages"
            remedy = f"give {stages} numbers, null for an even split, or auto for a balanced one"
            raise UserError("parallel.layers_per_stage", given, why, remedy)

    @property
    def num_ranks(self) -> int:
        """The product of the axes; dp_shard must not be -1."""
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    def mesh_sizes(self, world_size: int) -> MeshSizes:
        """The mesh of `world_size` processes, with dp_shard = -1 filled in.

        Raises:
            UserError: the product of the axes is not the world size, or more than any machine has,
                or zero_stage is 0 although data parallelism is sharded.
        """
        given = {axis: getattr(self, axis) for axis in AXES}
        if world_size > MAX_RANKS:
            value, axis = max((size, axis) for axis, size in given.items())
            why = f"makes {world_size:,} ranks: too many"
            raise UserError(f"parallel.{axis}", value, why, "use a smaller number")
        others = math.prod(size for axis, size in given.items() if axis != "dp_shard")
        dp_shard = self.dp_shard if self.dp_shard != -1 else world_size // others
        if others * dp_shard != world_size or dp_shard == 0:
            axes = " · ".join(f"{axis}={size}" for axis, size in given.items())
            auto = self.dp_shard == -1
            fits = f"a multiple of {others}" if auto else f"exactly {others * dp_shard}"
            remedy = f"start {fits} processes, or choose axes whose product is {world_size}: "
            remedy += f"`python -m tools.plan CONFIG --gpus {world_size} --search` lists what fits"
            key = "tp" if world_size % others else "dp_shard"
            if key == "dp_shard":
                remedy = f"set parallel.dp_shard=-1 (here {world_size // others}), or {remedy}"
            why = f"{axes} does not make the world of {world_size} processes"
            raise UserError(f"parallel.{key}", given[key], why, remedy)
        if self.zero_stage == 0 and dp_shard != 1:
            why = f"stage 0 keeps whole replicas, but dp_shard is {dp_shard}"
            remedy = f"set parallel.dp_shard=1 parallel.dp_replicate={self.dp_replicate * dp_shard}"
            raise UserError("parallel.zero_stage", 0, why, remedy + ", or zero_stage 1 to 3")
        folded = dp_shard * self.cp * self.tp
        if folded % self.ep:
            why = f"must divide dp_shard · cp · tp = {dp_shard} · {self.cp} · {self.tp}, of which "
            why += "it is a part"
            divisors = [n for n in range(1, folded + 1) if folded % n == 0]
            raise UserError("parallel.ep", self.ep, why, f"choose one of {divisors}")
        given |= {"dp_shard": dp_shard, "ep": self.ep}
        if self.zero_stage == 0:  # nothing is sharded
            given |= {"replicas": self.cp, "expert_replicas": folded // self.ep}
        return MeshSizes(**given)

    @property
    def ranks_of_stages(self) -> list[int]:
        """The pipeline rank of each stage, first to last. (It does not depend on the number of
        micro-batches.)"""
        p, v = self.pp, self.stages_per_rank
        return stage_ranks(build_schedule(self.schedule, p, v, 2 * p))

    def split_layers(self, num_layers: int, costs: Callable[[], LayerCosts]) -> list[range]:
        """The blocks of each stage, first to last. `costs` gives the costs of the model's layers
        and is called only for `layers_per_stage=auto`."""
        stages, key = self.num_stages, "parallel.layers_per_stage"
        if isinstance(self.layers_per_stage, list):
            counts = self.layers_per_stage
            if 0 in counts[1:-1]:
                why = "a stage between the first and the last would have no parameters"
                raise UserError(key, counts, why, "give each such stage at least one layer")
            if sum(counts) != num_layers:
                why = f"adds up to {sum(counts)} layers, but model.num_layers={num_layers}"
                raise UserError(key, counts, why, "give numbers that add up to model.num_layers")
        elif num_layers < stages:
            why = f"{stages} stages, but the model has only {num_layers} layers"
            remedy = f"use at most {num_layers} stages, or a {key} that begins or ends with 0"
            raise UserError("parallel.pp", self.pp, why, remedy)
        elif self.layers_per_stage == "auto":
            counts = balanced_split(costs(), self.ranks_of_stages)
        else:
            counts = even_split(num_layers, stages)
        return [range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]
