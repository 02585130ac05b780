"""Decides which operations may run, and finds those that never will. Pure: no torch, no sockets."""

from collections import defaultdict
from collections.abc import Iterable
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
class _Rank:
    """What the referee knows of a rank."""

    waits_for: int | None = None  # the operation for which its main thread waits
    gone: bool = False
    posted: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by queue
    said: dict[int, str] = field(default_factory=dict)  # what each operation is
    ended: set[int] = field(default_factory=set)
    # by queue: the communicator and the operation that has begun and may not run yet
    begun: dict[str, tuple[str, Operation]] = field(default_factory=dict)

    @property
    def is_stuck(self) -> bool:
        """Nothing changes on this rank unless another rank does something."""
        if self.gone:
            return True
        if self.waits_for is None or self.waits_for in self.ended:
            return False
        return all(q in self.begun or each <= self.ended for q, each in self.posted.items())


class Referee:
    """Told of everything that ranks post, begin, end and wait for.

    Args:
        world: number of ranks.
    """

    def __init__(self, world: int) -> None:
        self.ranks = [_Rank() for _ in range(world)]
        self.members: dict[str, list[int]] = {}  # communicator → ranks
        # of operations that have begun: which of their sends and receives have a partner
        self._matched: dict[tuple[int, str], set[int]] = defaultdict(set)

    def posts(self, rank: int, queue: str, number: int, what: str) -> None:
        self.ranks[rank].posted[queue].add(number)
        self.ranks[rank].said[number] = what

    def waits(self, rank: int, number: int | None) -> None:
        """The main thread waits for its operation `number`; None: no longer."""
        self.ranks[rank].waits_for = number

    def ends(self, rank: int, number: int) -> None:
        self.ranks[rank].ended.add(number)

    def leaves(self, rank: int) -> None:
        self.ranks[rank].gone = True

    def begins(
        self, rank: int, queue: str, communicator: str, members: list[int], operation: Operation
    ) -> list[tuple[int, str]]:
        """An operation is at the head of its queue. Returns the (rank, queue) of all operations
        that may now run.

        Raises:
            Wrong: it does not fit what another rank has begun.
        """
        self.members.setdefault(communicator, members)
        self.ranks[rank].begun[queue] = communicator, operation
        heads = self._heads(communicator)
        if operation.collective:
            return self._collective(communicator, heads)
        return self._match(communicator, heads)

    def _heads(self, communicator: str) -> dict[int, tuple[str, Operation]]:
        """By rank: the queue and the operation that has begun on this communicator."""
        return {
            rank: (queue, operation)
            for rank in self.members[communicator]
            for queue, (name, operation) in self.ranks[rank].begun.items()
            if name == communicator
        }

    def _collective(
        self, communicator: str, heads: dict[int, tuple[str, Operation]]
    ) -> list[tuple[int, str]]:
        found = {rank: each for rank, (_, each) in heads.items() if each.collective}
        if len({each.collective for each in found.values()}) > 1:
            raise Wrong(f"ranks of {communicator} run different collectives:\n{_lines(found)}")
        self._compare_rows(communicator, found)
        if len(found) < len(self.members[communicator]):
            return []
        return self._release((rank, queue) for rank, (queue, _) in heads.items())

    def _compare_rows(self, communicator: str, found: dict[int, Operation]) -> None:
        """A rank must expect as many rows as another sends to it."""
        ranks = self.members[communicator]
        for rank, other in permutations(found, 2):
            if found[rank].sends:
                sent = found[rank].sends[ranks.index(other)]
                expected = found[other].receives[ranks.index(rank)]
                if sent != expected:
                    raise Wrong(
                        f"rank {rank} sends {sent} rows over {communicator}, and rank {other} "
                        f"expects {expected}:\n{_lines(found)}"
                    )

    def _match(
        self, communicator: str, heads: dict[int, tuple[str, Operation]]
    ) -> list[tuple[int, str]]:
        ranks = self.members[communicator]
        for rank, (queue, operation) in heads.items():
            for i, (sends, peer, what) in enumerate(operation.peers):
                other = ranks[peer]
                if not sends or other not in heads or i in self._matched[rank, queue]:
                    continue
                there, theirs = heads[other]
                wanted = (False, ranks.index(rank))
                for j, answer in enumerate(theirs.peers):
                    if answer[:2] == wanted and j not in self._matched[other, there]:
                        if answer.what != what:
                            raise Wrong(
                                f"rank {rank} sends {what} over {communicator}, and rank {other} "
                                f"receives {answer.what}"
                            )
                        self._matched[rank, queue].add(i)
                        self._matched[other, there].add(j)
                        break
        whole = [
            (rank, queue)
            for rank, (queue, operation) in heads.items()
            if operation.peers and len(self._matched[rank, queue]) == len(operation.peers)
        ]
        return self._release(whole)

    def _release(self, found: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        released = list(found)
        for rank, queue in released:
            del self.ranks[rank].begun[queue]
            self._matched.pop((rank, queue), None)
        return released

    def check(self) -> None:
        """Raises Wrong if no rank can ever go on."""
        ranks = self.ranks
        if all(rank.is_stuck for rank in ranks) and not all(rank.gone for rank in ranks):
            lines = []
            for number, rank in enumerate(ranks):
                waits = "has ended"
                if not rank.gone and rank.waits_for is not None:
                    waits = f"waits for {rank.said[rank.waits_for]}"
                begun = [f"{name}: {operation}" for name, operation in rank.begun.values()]
                lines.append(f"  rank {number} {waits}; has begun: {'; '.join(begun) or 'nothing'}")
            raise Wrong("deadlock: every rank waits for another\n" + "\n".join(lines))


def _lines(found: dict[int, Operation]) -> str:
    return "\n".join(f"  rank {rank}: {operation}" for rank, operation in sorted(found.items()))
