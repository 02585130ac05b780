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
from functools import cached_property
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel.collectives import Pending, start_all_to_all
from parallel.placement import chunk_range, dim_of

Shape = tuple[int, int]
Compute = Callable[[list[Tensor]], list[Tensor]]  # whole matrices → as many of the same shapes

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

    def cuts_beside(self, dims: Sequence[int]) -> bool:
        """Whether the axis cuts a weight in another dimension than these."""
        return self.size > 1 and self.dim is not None and self.dim not in dims


@dataclass(frozen=True)
class Matrix:
    """One of the matrices of a weight, as this rank sees it."""

    shape: Shape
    hops: tuple[Hop, ...]  # in the order in which it travels there

    def shapes(self) -> list[Shape]:
        """Of this rank's part, and of what is together after each hop. The last axis cuts first."""
        shapes = [self.shape]
        for hop in reversed(self.hops):
            shapes.insert(0, hop.part(shapes[0], hop.rank))
        return shapes


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


class Round:
    """Matrices that travel together, over the same axes.

    Args:
        numbers: which of all matrices they are.
        matrices: they themselves.
        owners: of each, the rank on each hop's axis.
    """

    def __init__(
        self, numbers: Sequence[int], matrices: Sequence[Matrix], owners: Sequence[Sequence[int]]
    ) -> None:
        self.numbers, self.matrices, self.owners = numbers, matrices, owners
        self.levels: list[Level] = []
        shapes, here = [each.shapes() for each in matrices], list(range(len(matrices)))
        for number, axis in enumerate(matrices[0].hops):  # `here`: what is on this rank by then
            if axis.size == 1:
                continue
            of_axis = [owners[i][number] for i in here]
            hops = [matrices[i].hops[number] for i in here]
            self.levels.append(Level(axis, hops, [shapes[i][number + 1] for i in here], of_axis))
            here = [i for i in here if owners[i][number] == axis.rank]

    def sends(self) -> Iterator[tuple[str, int]]:
        """The axis, and the numbers that this rank sends or receives, of each all-to-all."""
        for level in self.levels:
            for there in (False,) if level.axis.dim is None else (True, False):
                yield level.axis.group, max(map(sum, level.splits[there]))

    def travel(self, parts: list[Tensor], compute: Compute) -> Generator[None, None, list[Tensor]]:
        """Returns this rank's parts of the results. It stops where another round may go on."""
        empty = parts[0].new_empty(0)
        for level in self.levels:
            pending = level.start_there(parts, empty)
            yield
            parts = level.there(pending.wait(), parts)
            del pending  # so that only whole matrices are kept while they are computed
        parts = compute(parts)
        for level in reversed(self.levels):
            pending = level.start_back(parts, empty)
            yield
            parts = level.back(pending.wait())
        return parts


@dataclass(frozen=True, eq=False)
class Level:
    """One hop of a round: of matrices of these shapes, once their parts are together."""

    axis: Hop  # all but its `dim` is that of each matrix's hop
    hops: Sequence[Hop]  # of each matrix
    shapes: Sequence[Shape]
    owners: Sequence[int]  # the rank on the axis

    @cached_property
    def of_ranks(self) -> list[list[int]]:
        """The matrices that each rank owns."""
        found: list[list[int]] = [[] for _ in range(self.axis.size)]
        for i, owner in enumerate(self.owners):
            found[owner].append(i)
        return found

    def part(self, i: int, rank: int) -> Shape:
        return self.hops[i].part(self.shapes[i], rank)

    @cached_property
    def splits(self) -> dict[bool, tuple[list[int], list[int]]]:
        """How many elements this rank sends to each rank, and receives from it: on the way there
        (True) and back (False)."""
        me, ranks = self.axis.rank, range(self.axis.size)

        def numbers(rank: int, owner: int) -> int:  # that a rank has of the owner's matrices
            return sum(prod(self.part(i, rank)) for i in self.of_ranks[owner])

        mine, others = [numbers(me, r) for r in ranks], [numbers(r, me) for r in ranks]
        return {True: (mine, others), False: (others, mine)}

    def start_there(self, parts: Sequence[Tensor], empty: Tensor) -> Pending:
        """Send each part to the matrix's owner."""
        if self.axis.dim is None:
            return Pending(empty)
        flat = [parts[i].flatten() for of_rank in self.of_ranks for i in of_rank]
        return start_all_to_all(torch.cat([empty, *flat]), self.axis.group, *self.splits[True])

    def there(self, arrived: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank owns."""
        mine = self.of_ranks[self.axis.rank]
        if self.axis.dim is None:
            return [parts[i] for i in mine]
        ranks = range(self.axis.size)
        received = views(arrived, [self.part(i, rank) for rank in ranks for i in mine])
        each = [received[number :: len(mine)] for number in range(len(mine))]
        return [
            torch.cat(of_it, self.hops[i].dim or 0) for i, of_it in zip(mine, each, strict=True)
        ]

    def start_back(self, results: Sequence[Tensor], empty: Tensor) -> Pending:
        """Send each rank its part of the results of this rank's matrices."""
        flat, mine = [empty], self.of_ranks[self.axis.rank]
        for rank in range(self.axis.size):
            for i, part in zip(mine, results, strict=True):
                if (dim := self.hops[i].dim) is not None:
                    at = chunk_range(part.shape[dim], self.axis.size, rank)
                    part = part.narrow(dim, at.start, len(at))
                flat.append(part.flatten())
        return start_all_to_all(torch.cat(flat), self.axis.group, *self.splits[False])

    def back(self, arrived: Tensor) -> list[Tensor]:
        """This rank's parts of all results."""
        order = [i for of_rank in self.of_ranks for i in of_rank]
        found = views(arrived, [self.part(i, self.axis.rank) for i in order])
        return [part for _, part in sorted(zip(order, found, strict=True), key=itemgetter(0))]


def views(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of these shapes that follow each other in `flat`."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def rounds_of(matrices: Sequence[Matrix]) -> list[list[Round]]:
    """Divide matrices into rounds, one list for those over the same axes. Each matrix goes to the
    rank that has the least to do so far. All ranks that have parts of the matrices find the same.

    Run one list after another. Rounds of two lists must not be interleaved: a rank may have no
    matrices of one list, and would then send in another order than its peers."""
    lists: dict[tuple[tuple[object, bool], ...], list[int]] = {}
    for i, each in enumerate(matrices):
        axes = tuple((hop.group, hop.dim is None) for hop in each.hops)
        lists.setdefault(axes, []).append(i)
    found = []
    for mine in lists.values():
        sizes = [hop.size for hop in matrices[mine[0]].hops]
        work = [0] * prod(sizes)  # of each rank
        rounds: list[Round] = []
        mine.sort(key=lambda i: _sides(matrices[i]), reverse=True)
        for (short, long), group in groupby(mine, lambda i: _sides(matrices[i])):
            alike = list(group)
            count = len(work) * max(1, ROUND_ELEMENTS // (short * long))
            for start in range(0, len(alike), count):
                numbers, owners = alike[start : start + count], []
                for _ in numbers:
                    owner = work.index(min(work))
                    work[owner] += short * short * long
                    owners.append(coordinates(owner, sizes))
                rounds.append(Round(numbers, [matrices[i] for i in numbers], owners))
        found.append(rounds)
    return found


def _sides(matrix: Matrix) -> tuple[int, int]:
    return min(matrix.shape), max(matrix.shape)


def coordinates(number: int, sizes: Sequence[int]) -> list[int]:
    """The digits of a number, the last of which counts fastest."""
    digits: list[int] = []
    for size in reversed(sizes):
        number, digit = divmod(number, size)
        digits.insert(0, digit)
    return digits


def interleave(rounds: Iterable[Generator[None, None, None]]) -> None:
    """Run rounds, each one stop behind the one before it. At each stop the newest goes first, so
    what it sends travels while an older one computes."""
    coming, running = iter(rounds), deque[Generator[None, None, None]]()
    end = object()
    while True:
        running.extendleft(new for new in [next(coming, None)] if new is not None)
        if not running:
            return
        for each in list(running):
            if next(each, end) is end:
                running.remove(each)
