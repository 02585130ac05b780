"""The mesh's axes: their names, their order, and how many ranks each has.

    rank = (((pp · dp_replicate_size + dp_replicate) · dp_shard_size + dp_shard) · cp_size + cp)
           · tp_size + tp

The innermost axis, tp, changes fastest, so consecutive ranks form a tensor-parallel group. Tensor
parallelism communicates most, several times per block, and gets the fastest links (inside a node);
context parallelism communicates in the attention of every block; pipeline stages communicate least
and are farthest apart. (Megatron-LM has the same order: Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 3. In Llama 3, https://arxiv.org/abs/2407.21783, section
3.3.2, data parallelism is outermost, outside pp.)

Data-parallel ranks read different rows of the batch, and cp ranks different parts of the same rows;
both have the same weights. So weights know only four axes, `WEIGHT_AXES`, in which cp is a part of
dp_shard: FSDP shards over both.

An axis of size 1 is not a special case: a single process is the mesh `MeshSizes()`.
"""

import math
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property


@dataclass(frozen=True, order=True)
class MeshSizes:
    """The number of ranks on each axis, outermost first."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    _: KW_ONLY
    # not an axis of its own: a part of dp_shard × cp × tp (EXPERT_AXES)
    ep: int = 1
    # The ranks of dp_shard × cp, and for experts those of dp_shard × cp × tp / ep, that hold a
    # replica of each shard: one, and where nothing is sharded (zero_stage 0), all.
    replicas: int = 1
    expert_replicas: int = 1

    @property
    def world(self) -> int:
        return math.prod(self.by_axis().values())

    @property
    def dp(self) -> int:
        """The number of parts that a global batch is split into."""
        return self.dp_replicate * self.dp_shard

    def by_axis(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def with_cp(self) -> str:
        """The axis of weights that contains cp."""
        return "dp_shard" if self.replicas == 1 else "dp_replicate"

    @cached_property
    def of_weights(self) -> dict[str, int]:
        """The number of ranks on each of `WEIGHT_AXES`."""
        sizes = {axis: getattr(self, axis) for axis in WEIGHT_AXES}
        sizes["dp_replicate"] *= self.replicas
        sizes["dp_shard"] = self.dp_shard * self.cp // self.replicas
        return sizes

    @cached_property
    def of_experts(self) -> dict[str, int]:
        """The number of ranks on each of `EXPERT_AXES`."""
        shards = self.dp_shard * self.cp * self.tp // (self.ep * self.expert_replicas)
        sizes = self.of_weights | {"dp_shard": shards, "tp": self.ep}
        sizes["dp_replicate"] = self.dp_replicate * self.expert_replicas
        return dict(zip(EXPERT_AXES, sizes.values(), strict=True))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis."""
        found = {}
        for axis, size in reversed(self.by_axis().items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in AXES}

    def __str__(self) -> str:
        named = {axis: n for axis, n in self.by_axis().items() if axis != "cp" or n > 1}
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return " × ".join(f"{axis} {size}" for axis, size in named.items()) + experts


AXES = tuple(each.name for each in fields(MeshSizes) if not each.kw_only)
WEIGHT_AXES = tuple(axis for axis in AXES if axis != "cp")
# The axes of experts (expert.py), of the same ranks. Those of dp_shard × cp × tp all have different
# tokens: `ep` of them, the innermost, share a layer's experts, and FSDP shards each of the experts
# over the rest, `efsdp`.
#     rank = ((pp · ep_replicate_size + ep_replicate) · efsdp_size + efsdp) · ep_size + ep
_OF_EXPERTS = {"dp_replicate": "ep_replicate", "dp_shard": "efsdp", "tp": "ep"}
EXPERT_AXES = tuple(_OF_EXPERTS.get(axis, axis) for axis in WEIGHT_AXES)
# By whether weights are of experts: the axes over which FSDP replicates and shards them.
FSDP_AXES = {True: ("ep_replicate", "efsdp"), False: ("dp_replicate", "dp_shard")}
assert AXES[AXES.index("cp") - 1] == "dp_shard", "weights see the two as one axis"
