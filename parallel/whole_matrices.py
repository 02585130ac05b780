"""Computing with whole matrices whose parts are spread over ranks. Each matrix has an *owner* among
the ranks that hold a part of it: it receives the parts, computes, and returns a part of the result
to each.

    matrices a b, cut over 2 ranks      there         compute         back
    rank 0      a₀ b₀                ─┐            ┌─► f(a) ─┐              f(a)₀ f(b)₀
    rank 1      a₁ b₁                ─┘ all-to-all └─► f(b) ─┘ all-to-all   f(a)₁ f(b)₁

A matrix that is cut over FSDP and tp travels in two hops: the parts of its tp slice meet on one
FSDP rank, and the slices on one tp rank. Ranks with equal parts (dp_replicate) share the work: the
owner has its part already, and its result goes to all. So each matrix is computed once.

Matrices are computed in rounds. In a round each rank computes one matrix, or several small ones.
While it does, those of the next round arrive, and the results of the round before return:

    round 0   there ─ compute ─ back
    round 1           there ─── compute ─ back
    round 2                     there ─── compute ─ back

A rank that holds P numbers sends P·(n−1)/n there and as many back, over each axis of n ranks that
cuts them. (Sums over n ranks of the products of parts would need no owner, but in each iteration an
all-reduce of min(out, in)² numbers. With five iterations a rank would send less only if the side
that is cut were 5·n times as long as the other.)
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.collectives import Pending, start_all_to_all
from parallel.placement import chunk_range, dim_of

K = TypeVar("K")
Shape = tuple[int, int]
Compute = Callable[[list[Tensor]], list[Tensor]]  # whole matrices → as many of the same shapes
Travel = Generator[None, None, list[Tensor]]  # stops where another round may go on

ROUND_ELEMENTS = 32 << 20  # of one rank's matrices in a round; a larger matrix is alone in it


@dataclass(frozen=True)
class Hop:
    """An axis over which matrices travel to their owners."""

    group: Any  # the process group; to plan with, the name of the axis
    size: int
    rank: int
    dim: int | None  # which the axis cuts, of a weight or matrix; None: its ranks have equal parts

    def part(self, shape: Shape, rank: int) -> Shape:
        """The shape of a rank's part of a matrix of this shape."""
        if self.dim is None:
            return shape
        width = len(chunk_range(shape[self.dim], self.size, rank))
        return (width, shape[1]) if self.dim == 0 else (shape[0], width)

    def cut(self, matrix: Tensor, rank: int) -> Tensor:
        """A rank's part of a matrix."""
        if self.dim is None:
            return matrix
        at = chunk_range(matrix.shape[self.dim], self.size, rank)
        return matrix.narrow(self.dim, at.start, len(at))

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The matrix of which these are all ranks' parts."""
        assert self.dim is not None
        return torch.cat(parts, self.dim)

    @property
    def cuts(self) -> bool:
        """Whether its ranks have different parts."""
        return self.dim is not None

    def cuts_beside(self, dims: Sequence[int]) -> bool:
        """Whether the axis cuts a weight in another dimension than these."""
        return self.size > 1 and self.dim is not None and self.dim not in dims


@dataclass(frozen=True)
class Matrix:
    """One of the matrices of a weight, as this rank sees it."""

    shape: Shape
    hops: tuple[Hop, ...]  # in the order in which it travels there

    @property
    def axes(self) -> tuple[tuple[object, bool], ...]:
        """Over which it travels, and whether their ranks have equal parts."""
        return tuple((hop.group, hop.dim is None) for hop in self.hops)

    def part(self, hop: int, rank: int) -> Shape:
        """The shape of a rank's part of it on the axis of a hop, once the hops before are done. The
        last axis cuts first."""
        shape = self.shape
        for later in reversed(self.hops[hop + 1 :]):
            shape = later.part(shape, later.rank)
        return self.hops[hop].part(shape, rank)


def axes_of(weight: DTensor) -> list[Hop]:
    """The axes over which a weight is cut, or equal."""
    mesh, found = weight.device_mesh, []
    for axis, placement in enumerate(weight.placements):
        dim = None if placement.is_replicate() else dim_of(placement)
        found.append(Hop(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), dim))
    return found


def matrices_of(weight: DTensor) -> list[Matrix]:
    """The matrices of this rank's part of a weight."""
    return matrices_over(weight.shape, weight.to_local().shape, axes_of(weight))


def matrices_over(shape: Sequence[int], part: Sequence[int], axes: Iterable[Hop]) -> list[Matrix]:
    """The matrices [out, in] of a rank's part of a weight [out, in], or of experts [X, out, in], of
    these shapes and over these axes. An axis that divides experts has whole matrices, others on
    each rank."""
    outer = len(shape) - 2
    hops = [h if h.dim is None else replace(h, dim=h.dim - outer) for h in axes]
    over = tuple(hop for hop in hops if hop.dim is None or hop.dim >= 0)
    return [Matrix((shape[-2], shape[-1]), over)] * prod(part[:outer])


class Owned(NamedTuple):
    """A matrix in a round."""

    owner: tuple[int, ...]  # the rank on each hop's axis
    number: int  # which of all matrices it is
    matrix: Matrix


class Round:
    """Matrices that travel together, over the same axes. They, their parts and their results are in
    the order of their owners, so what a rank sends to another one is together."""

    def __init__(self, owned: Sequence[Owned]) -> None:
        self.owned = here = owned  # `here`: those of which this rank has parts by then
        self.legs: list[Leg] = []
        for hop, axis in enumerate(owned[0].matrix.hops):
            if axis.size > 1:
                self.legs.append(Leg(hop, axis, here))
            here = [each for each in here if each.owner[hop] == axis.rank]
        self.mine = here  # those that this rank owns

    def sends(self) -> Iterator[tuple[str, int]]:
        """The axis, and the numbers that this rank sends or receives, of each all-to-all."""
        for leg in self.legs:
            for _ in range(1 if leg.axis.dim is None else 2):  # back; there and back
                yield leg.axis.group, max(sum(leg.sent), sum(leg.received))

    def travel(self, parts: list[Tensor], compute: Compute) -> Travel:
        """Takes this rank's parts of the matrices, and returns its parts of the results."""
        empty = parts[0].new_empty(0)  # from a rank that has nothing to send
        for leg in self.legs:
            parts = yield from leg.there(parts, empty)
        parts = compute(parts)
        for leg in reversed(self.legs):
            parts = yield from leg.back(parts, empty)
        return parts


class Leg:
    """One hop of a round: parts go to the matrix's owner on an axis, and parts of the result back.

    Args:
        hop: its number.
        axis: the hop of each matrix, but for its `dim`.
        here: the matrices of which this rank has parts before it.
    """

    def __init__(self, hop: int, axis: Hop, here: Sequence[Owned]) -> None:
        self.axis, self.owners = axis, [each.owner[hop] for each in here]
        mine = [each.matrix for each in here if each.owner[hop] == axis.rank]
        self.hops = [matrix.hops[hop] for matrix in mine]  # of the matrices that this rank owns
        # the shapes of this rank's parts of all, and of each rank's parts of its own matrices
        self.parts = [each.matrix.part(hop, axis.rank) for each in here]
        self.of_ranks = [[each.part(hop, rank) for each in mine] for rank in range(axis.size)]
        # how many numbers this rank sends to each rank on the way there, and receives from it
        self.sent, self.received = [0] * axis.size, [sum(map(prod, of)) for of in self.of_ranks]
        for owner, shape in zip(self.owners, self.parts, strict=True):
            self.sent[owner] += prod(shape)

    def there(self, parts: list[Tensor], empty: Tensor) -> Travel:
        """Sends this rank's parts to their owners; returns the matrices that it owns."""
        if self.axis.dim is None:  # they are there
            yield
            both = zip(self.owners, parts, strict=True)
            return [part for owner, part in both if owner == self.axis.rank]
        coming = self.start([empty, *parts], self.sent, self.received)
        yield
        by_rank = zip(coming.wait().split(self.received), self.of_ranks, strict=True)
        by_matrix = zip(*(views(flat, shapes) for flat, shapes in by_rank), strict=True)
        return [hop.join(each) for hop, each in zip(self.hops, by_matrix, strict=True)]

    def back(self, results: list[Tensor], empty: Tensor) -> Travel:
        """Sends each rank its parts of the results; returns this rank's parts of all results."""
        both, ranks = list(zip(self.hops, results, strict=True)), range(self.axis.size)
        parts = [hop.cut(result, rank) for rank in ranks for hop, result in both]
        coming = self.start([empty, *parts], self.received, self.sent)
        yield
        return views(coming.wait(), self.parts)

    def start(self, parts: list[Tensor], send: list[int], receive: list[int]) -> Pending:
        flat = torch.cat([part.flatten() for part in parts])
        return start_all_to_all(flat, self.axis.group, send, receive)


def views(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of these shapes that follow each other in `flat`."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def rounds_of(matrices: Sequence[Matrix]) -> list[list[Round]]:
    """Divide matrices into rounds, one list for those over the same axes. Each matrix goes to the
    rank that has the least to do so far. All ranks that have parts of the matrices find the same.

    Run one list after another. Rounds of two lists must not be interleaved: a rank may have no
    matrices of one list, and would then send in another order than its peers."""
    found = []
    for mine in grouped(range(len(matrices)), lambda i: matrices[i].axes).values():
        ranks = product(*(range(hop.size) for hop in matrices[mine[0]].hops))
        work = [(0, rank) for rank in ranks]  # a heap: first the rank that has the least to do
        rounds: list[Round] = []
        by_sides = grouped(mine, lambda i: tuple(sorted(matrices[i].shape)))
        for (short, long), alike in sorted(by_sides.items(), reverse=True):
            count = len(work) * max(1, ROUND_ELEMENTS // (short * long))
            for start in range(0, len(alike), count):
                owned = []
                for number in alike[start : start + count]:
                    so_far, owner = work[0]
                    heapreplace(work, (so_far + short * short * long, owner))
                    owned.append(Owned(owner, number, matrices[number]))
                rounds.append(Round(sorted(owned)))
        found.append(rounds)
    return found


def grouped(numbers: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Numbers by a key of theirs. They, and the keys, stay in the order in which they come."""
    found: dict[K, list[int]] = {}
    for number in numbers:
        found.setdefault(key(number), []).append(number)
    return found


def interleave(rounds: Iterable[Generator[None, None, None]]) -> None:
    """Run rounds, each one stop behind the one before it. At each stop the newest goes first, so
    what it sends travels while an older one computes."""
    coming, running = deque(rounds), deque[Generator[None, None, None]]()
    while coming or running:
        if coming:
            running.appendleft(coming.popleft())
        for each in list(running):
            if next(each, "ended") == "ended":
                running.remove(each)
