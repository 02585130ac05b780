"""Compare copies that must be equal: weights, moments and the biases of routers, bit for bit,
between the ranks that hold the same numbers.

    copies over dp_replicate       everything that a rank holds but experts, at every zero_stage
    copies over ep_replicate       experts
    copies over tp                 norms, routers, and key/value heads that tp ranks share
    copies over dp_shard           biases of routers
    copies over pp                 tied embeddings, between the first and the last stage

Once copies differ, nothing makes them equal again: after a bit flip in one rank's memory, or an
update made on only one rank, training would continue with two models. Each rank hashes its copies
on its device, and the hashes (8 bytes each) are gathered over the world. The ranks that differ from
the hash of most are named; if there is none, as with two copies, all are.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

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


MOST = 20  # ranks that a message names

# the axis, and the first rank of a group of copies on it → the hash of this rank's
Hashes = dict[tuple[str, int], int]


@torch.no_grad()
def check_replicas(train: TrainStep) -> None:
    """Compare all copies; every rank calls it between steps. Waits for the device. Raises
    ReplicasDiffer."""
    copied_over: dict[str, list[DTensor]] = defaultdict(list)
    for held in held_tensors(train):
        for axis in replicated_over(held.tensor):
            copied_over[axis].append(held.tensor)
    kernels = train.config.kernels_of_states
    hashes: Hashes = {}
    for axis, tensors in copied_over.items():
        copies = dist.get_process_group_ranks(train.mesh.views[axis].group)
        if len(copies) > 1:
            local = (tensor.to_local() for tensor in tensors)
            hashes[axis, copies[0]] = int(hash_of(local, kernels).item())
    if train.tied_group is not None:
        (tied,), first = train.tied, dist.get_process_group_ranks(train.tied_group)[0]
        of_tied = f"model.{tied.global_name}", f"optimizer.{tied.global_name}."
        local = (h.tensor.to_local() for h in held_tensors(train) if h.name.startswith(of_tied))
        hashes["pp", first] = int(hash_of(local, kernels).item())
    everyone = [hashes] * dist.get_world_size()
    dist.all_gather_object(everyone, hashes)
    if found := odd_copies(everyone):
        remedy = "Restart from the last checkpoint, without the machine of that rank"
        raise ReplicasDiffer(few(found, "; ") + f". {remedy}")


def few(items: Iterable[object], separator: str = ", ") -> str:
    """At most MOST items: with thousands of ranks, a pipe or a webhook would not take all."""
    named = [*map(str, items)]
    return separator.join(named[:MOST]) + f" and {len(named) - MOST} more" * (len(named) > MOST)


def odd_copies(everyone: list[Hashes]) -> list[str]:
    """Describe the ranks that differ from their copies, from the hashes of all ranks."""
    groups: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # … → rank → hash
    for rank, hashes in enumerate(everyone):
        for group, value in hashes.items():
            groups[group][rank] = value
    found = []
    for (axis, _), values in sorted(groups.items()):
        ranks = few(values)
        common, count = Counter(values.values()).most_common(1)[0]
        odd = [rank for rank, value in values.items() if value != common]
        if 2 * count <= len(values):  # nobody knows which is right
            found.append(f"ranks {ranks}, copies over {axis}, hold different numbers")
        else:
            found += [f"rank {r} differs from its copies over {axis} (ranks {ranks})" for r in odd]
    return found
