"""Copies that must be equal are compared: weights and moments, bit for bit, between ranks that hold
the same numbers.

    copies over dp_replicate       all that a rank holds, under every zero_stage
    copies over tp                 norm weights, and key/value heads that tp ranks share

Nothing makes them equal again once they differ: a bit that flipped in one rank's memory, or an
update made on one rank alone, stays, and training goes on with two models. Each rank hashes what it
holds, on its device, and the hashes (8 bytes each) are gathered within each group of copies. Of
three or more the odd one out is named; of two, both.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from errors import RunFailed
from parallel.axes import AXES
from parallel.mesh import Mesh
from parallel.placement import replicated_over
from runtime.checkpoint import held_tensors
from training.step import TrainStep

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HASHED_AT_ONCE = 1 << 24  # numbers; the products take 8 bytes each
# 2⁶⁴ / golden ratio, as int64 (Knuth, The Art of Computer Programming, section 6.4)
ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class ReplicasDiffer(RunFailed):
    """Says which ranks hold other numbers than their copies."""


@torch.no_grad()
def check_replicas(train: TrainStep) -> None:
    """Between steps, on every rank. Raises ReplicasDiffer. Waits for the device once."""
    mesh = train.mesh
    copied_over: dict[str, list[DTensor]] = defaultdict(list)
    for held in held_tensors(train):
        for axis in replicated_over(held.tensor):
            copied_over[axis].append(held.tensor)
    odd = [line for axis in AXES for line in _odd_ones(axis, copied_over[axis], mesh)]
    everyone: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, odd)
    found = sorted({line for lines in everyone if lines for line in lines})
    if found:
        remedy = "Start again from the last checkpoint, without the machine of that rank"
        raise ReplicasDiffer("; ".join(found) + f". {remedy}")


def _odd_ones(axis: str, tensors: list[DTensor], mesh: Mesh) -> list[str]:
    """Which ranks of this rank's group on `axis` hold other numbers than the rest."""
    group = mesh.root[axis].get_group()
    if group.size() == 1 or not tensors:
        return []
    mine = hash_of(tensor.to_local() for tensor in tensors).to(mesh.device)
    hashes = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(hashes, mine, group=group)  # int64 scalars
    values = [int(value) for value in torch.stack(hashes).tolist()]
    ranks = dist.get_process_group_ranks(group)
    common, count = Counter(values).most_common(1)[0]
    if count == len(values):
        return []
    if count > 1:
        others = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
        return [
            f"rank {rank} holds other numbers than its copies over {axis} ({_listed(ranks)})"
            for rank in others
        ]
    return [f"ranks {_listed(ranks)}, copies over {axis}, hold different numbers"]


def hash_of(tensors: Iterable[Tensor]) -> Tensor:
    """An int64 scalar that depends on every bit of the tensors and on its place: Σ bits · odd
    number of the place, mod 2⁶⁴.

    A change of one number always changes it, since an odd factor can be undone.
    """
    total = torch.zeros((), dtype=torch.int64)
    for number, tensor in enumerate(tensors):
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()]).flatten()
        total = total.to(bits.device)
        for start in range(0, bits.numel(), HASHED_AT_ONCE):
            piece = bits[start : start + HASHED_AT_ONCE].long()
            places = torch.arange(start, start + piece.numel(), device=bits.device)
            total = total + (piece * ((places * ODD + number * 2654435761) | 1)).sum()
    return total


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
