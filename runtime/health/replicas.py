"""Compare copies that must be equal: weights, moments and the biases of routers, bit for bit,
between the ranks that hold the same numbers.

    copies over dp_replicate       everything that a rank holds but experts, at every zero_stage
    copies over ep_replicate       experts
    copies over tp                 norms, routers, and key/value heads that tp ranks share
    copies over dp_shard           biases of routers

Once copies differ, nothing makes them equal again: after a bit flip in one rank's memory, or an
update made on only one rank, training would continue with two models. Each rank hashes its copies
on its device, and the hashes (8 bytes each) are gathered within each group of copies. The ranks
that differ from the hash of most are named; if there is none, as with two copies, all are.
"""

from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from errors import RunFailed
from model.kernels.bit_hash import hash_of
from parallel.placement import replicated_over
from runtime.trainer_state import held_tensors
from training.step import TrainStep


class ReplicasDiffer(RunFailed):
    """Copies differ; the message names the ranks."""


@torch.no_grad()
def check_replicas(train: TrainStep) -> None:
    """Compare all copies; every rank calls it between steps. Waits for the device once. Raises
    ReplicasDiffer."""
    mesh = train.mesh
    copied_over: dict[str, list[DTensor]] = defaultdict(list)
    for held in held_tensors(train):
        for axis in replicated_over(held.tensor):
            copied_over[axis].append(held.tensor)
    odd = [line for axis in mesh.views for line in _odd_ones(axis, copied_over[axis], train)]
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, odd)
    found = sorted({line for lines in everyone if lines for line in lines})
    if found:
        remedy = "Restart from the last checkpoint, without the machine of that rank"
        raise ReplicasDiffer("; ".join(found) + f". {remedy}")


def _odd_ones(axis: str, tensors: list[DTensor], train: TrainStep) -> list[str]:
    """Describe the ranks of this rank's group on `axis` that differ from the others."""
    mesh = train.mesh
    group = mesh.views[axis].group
    if group.size() == 1 or not tensors:
        return []
    mine = hash_of((tensor.to_local() for tensor in tensors), train.config.kernels_of_states).to(
        mesh.device
    )
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)  # int64 scalars
    values: list[int] = torch.stack(hashes).tolist()
    ranks = dist.get_process_group_ranks(group)
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return []
    if 2 * count > len(values):  # else nobody knows which is right
        others = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
        return [
            f"rank {rank} differs from its copies over {axis} (ranks {_listed(ranks)})"
            for rank in others
        ]
    return [f"ranks {_listed(ranks)}, copies over {axis}, hold different numbers"]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
