"""Accesses to memory by streams and host threads, and whether they are ordered.

    race            one lane writes what another reads or writes, and neither waited for the other
    reused memory   the same, but through the allocator: a tensor was freed while a stream still
                    used it, and its memory may be given to a new tensor

CUDA's caching allocator returns a freed block to the stream that allocated it, at once and without
waiting for any other stream, unless `record_stream` named that stream (c10/cuda/
CUDACachingAllocator.cpp; https://docs.pytorch.org/docs/stable/generated/torch.Tensor.record_stream.html).
Which block a later allocation gets depends on sizes and history. Here every allocation may get
every block that its stream has freed: what was unfinished at the free is checked against the
accesses to all new tensors, so an order that holds here holds for every choice of the allocator.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor

from costs.storages import key_of
from tools.rehearse.device import Lane
from tools.rehearse.findings import RACE, REUSE, Findings

Range = tuple[int, float]  # bytes of a storage: first, and one past the last
WHOLE: Range = (0, float("inf"))


@dataclass(frozen=True, slots=True)
class Access:
    lane: Lane
    number: int  # of the lane's work
    range: Range
    writes: bool
    what: str  # operator and line
    freed: str = ""  # if the block was freed since: the line


@dataclass(slots=True)
class Block:
    """A storage."""

    owner: Lane  # on which it was allocated
    accesses: list[Access]  # that later ones must be ordered after
    recorded: set[Lane] = field(default_factory=set)  # by record_stream


def range_of(tensor: Tensor) -> Range:
    """The bytes between the first and the last element."""
    first = int(tensor.storage_offset())
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


class Accesses:
    """All blocks, by the key of their storage."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.blocks: dict[int, Block] = {}
        self.compared = 0  # pairs of conflicting accesses on two lanes, ordered or not
        # by the lane that owns their memory: accesses that were not finished when it was freed
        self._unfinished: dict[Lane, list[Access]] = defaultdict(list)

    def allocate(self, key: int, owner: Lane, what: str) -> None:
        """Allocate a block on `owner`. For other lanes this is a write: before it, the memory may
        belong to a tensor that `owner` still uses."""
        left = [a for a in self._unfinished[owner] if owner.seen(a.lane) < a.number]
        self._unfinished[owner] = left
        first = Access(owner, owner.done, WHOLE, True, f"the allocation by {what}")
        self.blocks[key] = Block(owner, [first, *left])

    def free(self, key: int, where: str) -> None:
        block = self.blocks.pop(key)
        owner = block.owner
        self._unfinished[owner] += [
            replace(access, freed=where)
            for access in block.accesses
            if not access.freed
            and access.lane not in block.recorded
            and owner.seen(access.lane) < access.number
        ]

    def record_stream(self, tensor: Tensor, lane: Lane) -> None:
        self.blocks[key_of(tensor)].recorded.add(lane)

    def access(self, lane: Lane, what: str, tensors: Iterable[tuple[Tensor, bool]]) -> int:
        """Add one piece of work to `lane`, which reads (False) or writes (True) `tensors`: check
        and remember that, and return its number. Memory that is not watched is ignored."""
        lane.done = number = lane.done + 1
        for tensor, writes in tensors:
            block = self.blocks.get(key_of(tensor))
            if block is None or not tensor.numel():
                continue
            new = Access(lane, number, range_of(tensor), writes, what)
            kept = []
            for old in block.accesses:
                self._check(old, new)
                # what is ordered after `new` is then ordered after `old` too
                covered = new.range[0] <= old.range[0] and old.range[1] <= new.range[1]
                replaces = covered and (writes or not old.writes)
                if not (replaces and lane.seen(old.lane) >= old.number):
                    kept.append(old)
            block.accesses = [*kept, new]
        return number

    def _check(self, old: Access, new: Access) -> None:
        apart = old.range[1] <= new.range[0] or new.range[1] <= old.range[0]
        if old.lane is new.lane or apart or not (old.writes or new.writes):
            return
        self.compared += 1
        if new.lane.seen(old.lane) >= old.number:
            return
        if old.freed:
            uses = f"{_of(new)} may use memory that {_of(old)} has not finished with"
            self.findings[REUSE, f"{uses}, freed at {old.freed}"] += 1
        else:
            self.findings[RACE, f"{_of(new)} does not wait for {_of(old)}"] += 1


def _of(access: Access) -> str:
    does = "writing" if access.writes else "reading"
    return f"{access.what} ({does} on {access.lane.name})"
