"""Collectives and messages as operators of torch.distributed: what they are called, send, read and
write, and the handle that they return."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from costs.operators import tensors_of

# Operators of torch.distributed → their names in records, and the arguments read and written.
_OPERATORS: dict[str, tuple[str, list[int], list[int]]] = {
    "_allgather_base_": ("all_gather", [1], [0]),
    "_reduce_scatter_base_": ("reduce_scatter", [1], [0]),
    "allreduce_": ("all_reduce", [0], [0]),
    "alltoall_base_": ("all_to_all", [1], [0]),
    "send": ("send", [0], []),
    "recv_": ("receive", [], [0]),
}
_ARGUMENTS = {kind: (reads, writes) for kind, reads, writes in _OPERATORS.values()}


class Call(NamedTuple):
    """A collective or message; `bytes` are those of the whole tensor: the output of a gather, the
    input of a scatter, the larger one of an all-to-all."""

    axis: str
    kind: str
    bytes: int


def silent_group(axis: str, rank: int, size: int) -> dist.ProcessGroup:
    """A group that communicates with nothing and is not registered. Records name its axis."""
    group = dist.ProcessGroup(rank, size)  # type: ignore[call-arg]
    group._set_group_desc(axis)
    return group


def group_of(args: Any) -> dist.ProcessGroup:
    """The group among the arguments of an operator of torch.distributed."""
    boxed = next(
        arg
        for arg in args
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())
    )
    return dist.ProcessGroup.unbox(boxed)


def call_of(func: Any, args: Any) -> tuple[str, int]:
    """The kind of a collective and the bytes of its largest tensor, which is the whole tensor."""
    name = func.name().split(".")[0].removeprefix("c10d::")
    return _OPERATORS.get(name, [name])[0], max(tensor.nbytes for tensor in tensors_of(args))


def arguments_of(kind: str, args: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a collective reads, and those that it writes."""
    if kind not in _ARGUMENTS:
        raise NotImplementedError(f"what {kind} reads and writes is not known, see {__name__}")
    read, written = (list(tensors_of([args[at] for at in each])) for each in _ARGUMENTS[kind])
    return read, written


def rounds(kind: str) -> int:
    """How many times a collective sends all parts but one round its ring."""
    return 2 if kind == "all_reduce" else 1


def wire_bytes(kind: str, size: int, ranks: int) -> float:
    """Bytes that one rank sends over `ranks`: in a gather or scatter all parts but one (a ring), in
    an all-reduce twice that, in an all-to-all all parts but its own if they are equal."""
    if kind in ("send", "receive"):
        return float(size) if kind == "send" else 0.0
    return size * (ranks - 1) / ranks * rounds(kind)


class Work(dist._Work):
    """The handle of a collective that is recorded but not carried out. `is_completed` says no, as
    torch's own does, which it may do until the work is waited for."""

    def __init__(self, waited: Callable[[], None]) -> None:
        super().__init__()
        self.waited = waited

    def wait(self, timeout: Any = None) -> bool:
        self.waited()
        return True


def returned(func: Any, args: Sequence[Any], work: Work) -> Any:
    """What an operator of torch.distributed returns: the handle, perhaps after its tensors."""
    return (args[0], work.boxed()) if len(func._schema.returns) > 1 else work.boxed()
