"""Sees every collective and every tensor of a computation, below autograd and FSDP, where
operations are dispatched."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.axes import AXES
from parallel.mesh import Mesh

KINDS = {  # c10d's operator → what it is; the whole tensor of each is its largest
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "recv",
}


@dataclass(frozen=True)
class Seen:
    """One collective: over which axis of the mesh, which kind, and the bytes of the whole
    (gathered, unscattered) tensor."""

    axis: str
    kind: str
    bytes: int


class Listener(TorchDispatchMode):
    """Collectives over groups of more than one rank, operations by name, and the largest tensor
    made.

    A collective over one rank moves nothing and is not listed. Where an axis is the whole world,
    one group may serve both, and the axis is named.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.axes = {dist.group.WORLD.group_name: "world", mesh.loss.get_group().group_name: "loss"}
        self.axes |= {
            mesh.root[axis].get_group().group_name: axis
            for axis in AXES
            if mesh.root[axis].size() > 1
        }
        self.collectives: list[Seen] = []
        self.operations: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations[func.name().split(".")[0]] += 1
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        namespace, _, name = func.name().split(".")[0].partition("::")
        if namespace == "c10d":
            group = next(
                dist.ProcessGroup.unbox(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and is_group(a)
            )
            self._saw(name, group.group_name, group.size(), tensors)
        # DTensor's reduction of partial sums
        elif namespace == "_c10d_functional" and name == "all_reduce":
            group = _resolve_process_group(args[2])
            self._saw(name, group.group_name, group.size(), tensors)
        else:
            self.largest = max([self.largest, *(t.numel() for t in tensors)])
        return result

    def _saw(self, name, group_name, ranks, tensors):
        if ranks > 1:
            axis = self.axes.get(group_name, "other")
            self.collectives.append(
                Seen(axis, KINDS.get(name, name), max(t.nbytes for t in tensors))
            )

    def count(self, axis: str | None = None) -> dict[str, tuple[int, int]]:
        """Of each kind over `axis` (or over all): how many, and how many bytes together."""
        table: dict[str, tuple[int, int]] = {}
        for seen in self.collectives:
            if axis in (None, seen.axis):
                number, size = table.get(seen.kind, (0, 0))
                table[seen.kind] = number + 1, size + seen.bytes
        return table


def is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
