"""Decides which operations may run, and finds those that never will. Pure: no torch, no sockets."""

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple


class Peer(NamedTuple):
    """One send or receive."""

    sends: bool
    peer: int  # rank in the communicator
    what: str  # shape and dtype


class Operation(NamedTuple):
    """What a rank has begun: a collective, or sends and receives that run together."""

    collective: str = ""  # with everything that must be equal on all ranks
    peers: tuple[Peer, ...] = ()
    # of an all-to-all: the rows to, and from, each rank of the communicator
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def __str__(self) -> str:
        each = (f"{'send to' if p.sends else 'receive from'} {p.peer} {p.what}" for p in self.peers)
        rows = f", {self.sends} rows there, {self.receives} from there" if self.sends else ""
        return self.collective + rows or ", ".join(each)


class Wrong(Exception):
    """What NCCL would hang on, or answer with wrong numbers."""


@dataclass
class _Head:
    """An operation that has begun, at the head of its queue, and may not run yet."""

    queue: str
    communicator: str
    operation: Operation
    matched: set[int] = field(default_factory=set)  # which of its peers have a partner


@dataclass
class _Rank:
    """What the referee knows of a rank."""

    waits_for: int | None = None  # the operation for which its main thread waits
    gone: bool = False
    # operations that have been posted and have not ended: queue → number → what it is
    posted: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    begun: dict[str, _Head] = field(default_factory=dict)  # by queue

    @property
    def waits(self) -> str:
        """What its main thread waits for; empty if for nothing, or if that has ended."""
        return next((q[self.waits_for] for q in self.posted.values() if self.waits_for in q), "")

    @property
    def is_stuck(self) -> bool:
        """Nothing changes on this rank unless another rank does something."""
        if self.gone or not self.waits:
            return self.gone
        return all(name in self.begun or not queue for name, queue in self.posted.items())


class Referee:
    """Told of everything that ranks post, begin, end and wait for.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.ranks = [_Rank() for _ in range(world)]

    def posts(self, rank: int, queue: str, number: int, what: str) -> None:
        self.ranks[rank].posted[queue][number] = what

    def waits(self, rank: int, number: int | None) -> None:
        """The main thread waits for its operation `number`; None: no longer."""
        self.ranks[rank].waits_for = number

    def ends(self, rank: int, number: int) -> None:
        for queue in self.ranks[rank].posted.values():
            queue.pop(number, None)

    def leaves(self, rank: int) -> None:
        self.ranks[rank].gone = True

    def fails(self, rank: int, why: str) -> None:
        raise Wrong(why)

    def begins(
        self, rank: int, queue: str, communicator: str, members: list[int], operation: Operation
    ) -> list[tuple[int, str]]:
        """An operation is at the head of its queue. Returns the (rank, queue) of all operations
        that may now run.

        Raises:
            Wrong: it does not fit what another rank has begun.
        """
        self.ranks[rank].begun[queue] = _Head(queue, communicator, operation)
        heads = {  # by rank: what has begun on this communicator
            member: head
            for member in members
            for head in self.ranks[member].begun.values()
            if head.communicator == communicator
        }
        if operation.collective:
            found = {r: head.operation for r, head in heads.items() if head.operation.collective}
            _compare(communicator, members, found)
            ready = [*heads] if len(found) == len(members) else []
        else:
            _match(rank, members, heads)
            ready = [
                member
                for member, head in heads.items()
                if head.operation.peers and len(head.matched) == len(head.operation.peers)
            ]
        for member in ready:
            del self.ranks[member].begun[heads[member].queue]
        return [(member, heads[member].queue) for member in ready]

    def check(self) -> None:
        """Raises Wrong if no rank can ever go on."""
        ranks = self.ranks
        if all(rank.is_stuck for rank in ranks) and not all(rank.gone for rank in ranks):
            lines = []
            for number, rank in enumerate(ranks):
                waits = "has ended" if rank.gone else f"waits for {rank.waits}"
                begun = [f"{head.communicator}: {head.operation}" for head in rank.begun.values()]
                lines.append(f"  rank {number} {waits}; has begun: {'; '.join(begun) or 'nothing'}")
            raise Wrong("deadlock: every rank waits for another\n" + "\n".join(lines))


def _compare(communicator: str, members: list[int], found: dict[int, Operation]) -> None:
    """Collectives must be the same on all ranks; in an all-to-all, a rank must expect as many rows
    as another sends to it."""
    lines = "\n".join(f"  rank {rank}: {operation}" for rank, operation in sorted(found.items()))
    if len({each.collective for each in found.values()}) > 1:
        raise Wrong(f"ranks of {communicator} run different collectives:\n{lines}")
    for rank, other in permutations(found, 2):
        if found[rank].sends:
            sent = found[rank].sends[members.index(other)]
            expected = found[other].receives[members.index(rank)]
            if sent != expected:
                raise Wrong(
                    f"rank {rank} sends {sent} rows over {communicator}, and rank {other} "
                    f"expects {expected}:\n{lines}"
                )


def _match(rank: int, members: list[int], heads: dict[int, _Head]) -> None:
    """Find partners for what `rank` has begun: its first send to another rank is that rank's first
    receive from it that has no partner yet, and so on."""
    mine = heads[rank]
    for i, (sends, peer, what) in enumerate(mine.operation.peers):
        other = members[peer]
        if i in mine.matched or other not in heads:
            continue
        theirs = heads[other]
        wanted = (not sends, members.index(rank))
        for j, answer in enumerate(theirs.operation.peers):
            if answer[:2] == wanted and j not in theirs.matched:
                if answer.what != what:
                    here, there = f"rank {rank}", f"rank {other}"
                    if sends:
                        why = f"{here} sends {what}, and {there} receives {answer.what}"
                    else:
                        why = f"{there} sends {answer.what}, and {here} receives {what}"
                    raise Wrong(f"over {mine.communicator}, {why}")
                mine.matched.add(i)
                theirs.matched.add(j)
                break
