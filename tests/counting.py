"""Record every collective and the largest tensor of a computation, where operations are
dispatched, below autograd and FSDP."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.mesh import Mesh

KINDS = {  # c10d's operator → kind; the largest tensor of each call is the whole tensor
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
    "recv_": "recv",
}


@dataclass(frozen=True)
class Seen:
    """One collective: its mesh axis, its kind, and the bytes of the whole tensor (after a gather,
    before a scatter)."""

    axis: str
    kind: str
    bytes: int


class Listener(TorchDispatchMode):
    """Records collectives over more than one rank, counts of operations by name, and the number of
    elements of the largest tensor.

    A collective over one rank moves nothing and is not recorded. Where an axis spans the whole
    world, one group may serve both; it is then recorded under the axis.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.axes = {dist.group.WORLD.group_name: "world", mesh.loss.get_group().group_name: "loss"}
        views = {axis: view for axis, view in mesh.views().items() if axis != "batch"}
        self.axes |= {
            view.get_group().group_name: axis
            for axis, view in reversed(views.items())
            if axis != "loss" and view.size() > 1
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
        # how DTensor reduces partial sums
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
        """Kind → (number of collectives, their total bytes), over `axis` or over all axes."""
        table: dict[str, tuple[int, int]] = {}
        for seen in self.collectives:
            if axis in (None, seen.axis):
                number, size = table.get(seen.kind, (0, 0))
                table[seen.kind] = number + 1, size + seen.bytes
        return table


def is_group(value: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(value._type())
