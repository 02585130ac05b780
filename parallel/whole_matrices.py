"""Computing with whole matrices whose parts are spread over ranks. Each matrix has an *owner* among
the ranks that hold a part of it: it receives the parts, computes, and returns a part of the result
to each.

    matrices a b, cut over 2 ranks      there         compute         back
    rank 0      a₀ b₀                ─┐            ┌─► f(a) ─┐              f(a)₀ f(b)₀
    rank 1      a₁ b₁                ─┘ all-to-all └─► f(b) ─┘ all-to-all   f(a)₁ f(b)₁

A matrix that is cut over FSDP and tp travels in two hops: the parts of its tp slice meet on one
FSDP rank, and the slices on one tp rank. Ranks with equal parts (dp_replicate) share the work: the
owner has its part already, and its result goes to all. So each matrix is computed once.

Matrices are computed in rounds, about one for each rank. While those of one round are computed,
those of the next arrive, and the results of the last return:

    round 0   there ─ compute ─ back
    round 1           there ─── compute ─ back
    round 2                     there ─── compute ─ back

A rank sends P·(n−1)/n numbers there and as many back, over each axis of n ranks that cuts its P.
(Sums over ranks of the products of parts would need no owner, but min(out, in)² numbers of each
matrix in every iteration. That is less only for matrices that are cut along one side which is more
than 2.5 times, with five iterations, as long as the other.)
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from parallel.collectives import Pending, start_all_to_all
from parallel.placement import chunk_range, dim_of

Shape = tuple[int, int]
Compute = Callable[[list[Tensor]], list[Tensor]]  # whole matrices → as many of the same shapes

ROUND_NUMBERS = 32 << 20  # of the matrices that one rank computes at once, if one has not more


@dataclass(frozen=True)
class Hop:
    """An axis over which matrices travel to their owners."""

    group: ProcessGroup | str  # or the name of the axis, to plan with
    size: int
    rank: int
    dim: int | None  # which the axis cuts, of a weight or matrix; None: its ranks have equal parts

    def part(self, shape: Shape, rank: int) -> Shape:
        """The shape of a rank's part of a matrix of this shape."""
        if self.dim is None:
            return shape
        width = len(chunk_range(shape[self.dim], self.size, rank))
        return (width, shape[1]) if self.dim == 0 else (shape[0], width)


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


def matrices_of(weight: DTensor) -> list[Matrix]:
    """The matrices of this rank's part of a weight."""
    mesh, axes = weight.device_mesh, []
    for axis, placement in enumerate(weight.placements):
        dim = None if placement.is_replicate() else dim_of(placement)
        axes.append(Hop(mesh.get_group(axis), mesh.size(axis), mesh.get_local_rank(axis), dim))
    return matrices_over(weight.shape, weight.to_local().shape, axes)


def matrices_over(shape: Sequence[int], part: Sequence[int], axes: Iterable[Hop]) -> list[Matrix]:
    """The matrices [out, in] of a rank's part of a weight [out, in], or of experts [X, out, in], of
    these shapes and over these axes. An axis that divides experts has whole matrices, others on
    each rank."""
    outer = len(shape) - 2
    hops = [h if h.dim is None else replace(h, dim=h.dim - outer) for h in axes]
    over = tuple(hop for hop in hops if hop.dim is None or hop.dim >= 0)
    return [Matrix((shape[-2], shape[-1]), over)] * prod(part[:outer])


class Round:
    """Matrices that travel together, all over the same hops.

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
        for number, hop in enumerate(matrices[0].hops):  # `here`: what is on this rank by then
            of_axis = [owners[i][number] for i in here]
            self.levels.append(Level(hop, [shapes[i][number + 1] for i in here], of_axis))
            here = [i for i in here if owners[i][number] == hop.rank]

    def sends(self) -> Iterator[tuple[str, int]]:
        """The axis, and the numbers that this rank sends or receives, of each all-to-all."""
        for level in self.levels:
            if level.hop.size > 1:
                for there in (False,) if level.hop.dim is None else (True, False):
                    yield str(level.hop.group), max(map(sum, level.splits(there)))

    def travel(self, parts: list[Tensor], compute: Compute) -> Generator[None, None, list[Tensor]]:
        """Returns this rank's parts of the results. It stops where another round may go on."""
        empty = parts[0].new_empty(0)
        for level in self.levels:
            pending = level.start_there(parts, empty)
            yield
            parts = level.there(pending.wait(), parts)
        results = compute(parts)
        yield
        for level in reversed(self.levels):
            pending = level.start_back(results, empty)
            yield
            results = level.back(pending.wait())
        return results


@dataclass(frozen=True)
class Level:
    """One hop of a round: of matrices of these shapes, once their parts are together."""

    hop: Hop
    shapes: Sequence[Shape]
    owners: Sequence[int]  # the rank on the hop's axis

    @property
    def _group(self) -> ProcessGroup:
        assert isinstance(self.hop.group, ProcessGroup)
        return self.hop.group

    def owned_by(self, rank: int) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner == rank]

    def splits(self, there: bool) -> tuple[list[int], list[int]]:
        """How many numbers this rank sends to each rank, and receives from it."""
        hop, ranks = self.hop, range(self.hop.size)

        def numbers(rank: int, owner: int) -> int:  # that a rank has of the owner's matrices
            return sum(prod(hop.part(self.shapes[i], rank)) for i in self.owned_by(owner))

        mine, others = [numbers(hop.rank, r) for r in ranks], [numbers(r, hop.rank) for r in ranks]
        return (mine, others) if there else (others, mine)

    def start_there(self, parts: Sequence[Tensor], empty: Tensor) -> Pending:
        """Send each part to the matrix's owner."""
        if self.hop.dim is None:
            return Pending(empty)
        flat = [parts[i].flatten() for rank in range(self.hop.size) for i in self.owned_by(rank)]
        return start_all_to_all(torch.cat([empty, *flat]), self._group, *self.splits(there=True))

    def there(self, arrived: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank owns."""
        hop, mine = self.hop, self.owned_by(self.hop.rank)
        if hop.dim is None:
            return [parts[i] for i in mine]
        shapes = [hop.part(self.shapes[i], rank) for rank in range(hop.size) for i in mine]
        received = views(arrived, shapes)
        return [torch.cat(received[i :: len(mine)], hop.dim) for i in range(len(mine))]

    def start_back(self, results: Sequence[Tensor], empty: Tensor) -> Pending:
        """Send each rank its part of the results of this rank's matrices."""
        hop, flat = self.hop, [empty]
        for rank in range(hop.size):
            for whole in results:
                part = whole
                if hop.dim is not None:
                    at = chunk_range(whole.shape[hop.dim], hop.size, rank)
                    part = whole.narrow(hop.dim, at.start, len(at))
                flat.append(part.flatten())
        return start_all_to_all(torch.cat(flat), self._group, *self.splits(there=False))

    def back(self, arrived: Tensor) -> list[Tensor]:
        """This rank's parts of all results."""
        order = [i for rank in range(self.hop.size) for i in self.owned_by(rank)]
        shapes = [self.hop.part(self.shapes[i], self.hop.rank) for i in order]
        found = dict(zip(order, views(arrived, shapes), strict=True))
        return [found[i] for i in range(len(order))]


def views(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors of these shapes that follow each other in `flat`."""
    parts = flat.split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def rounds_of(matrices: Sequence[Matrix]) -> list[list[Round]]:
    """Divide matrices into rounds, in which each goes to the rank that has the least to do; those
    of a list over the same hops. All ranks that have parts of the matrices find the same rounds."""
    found = []
    for hops in dict.fromkeys(each.hops for each in matrices):
        sizes = [hop.size for hop in hops]
        work = [0] * prod(sizes)  # of each rank
        rounds: list[Round] = []
        mine = sorted(
            (i for i, each in enumerate(matrices) if each.hops == hops),
            key=lambda i: _sides(matrices[i]),
            reverse=True,
        )
        for (short, long), group in groupby(mine, lambda i: _sides(matrices[i])):
            alike = list(group)
            count = len(work) * max(1, ROUND_NUMBERS // (short * long))
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
