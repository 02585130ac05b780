"""Tied embeddings across a pipeline: one global tensor, with a copy on the first and on the last
stage.

One `nn.Parameter` cannot be in two FSDP units (it would silently become two), so each stage holds
its own copy, initialised identically. After the last backward the two sharded gradients are summed
over the pair of ranks that hold them. Both copies then have the same gradient, take the same
optimizer step and stay equal bit for bit. The gradient norm and checkpoints count only one copy.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel.parameter import NamedWeight


def first_and_last_stage_group(
    root: DeviceMesh, ranks_of_stages: Sequence[int]
) -> ProcessGroup | None:
    """The group of the two pipeline ranks that hold the first and the last stage and have this
    rank's other coordinates; None on all other ranks, and if one rank holds both stages. Every rank
    of the mesh must call it. The first axis of `root` is pp."""
    first, last = ranks_of_stages[0], ranks_of_stages[-1]
    mine = None
    if first != last:
        # for each combination of the other coordinates, the ranks along pp
        for line in root.mesh.reshape(root.shape[0], -1).T.tolist():
            group = dist.new_group([line[first], line[last]])
            if dist.get_rank() in (line[first], line[last]):
                mine = group
    return mine


@torch.no_grad()
def sum_tied_gradients(copies: Sequence[NamedWeight], group: ProcessGroup | None) -> None:
    """Give both copies of the tied weight, of which this rank has none, one or both, the sum of
    their sharded gradients; call it after the last backward."""
    gradients = [copy.gradient.to_local() for copy in copies]
    if len(gradients) == 2:  # one rank has both
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
    elif gradients:
        assert group is not None
        dist.all_reduce(gradients[0], group=group)  # [V / (tp · dp_shard), D] over the pair
