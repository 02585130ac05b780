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
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
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

    group: ProcessGroup
    size: int
    rank: int
    dim: int | None  # of a matrix, which the axis cuts; None: its ranks have equal parts

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
    """The matrices [out, in] of this rank's part of a weight [out, in], or of experts [X, out, in].
    An axis that divides experts has whole matrices on each rank, others than the rest."""
    mesh, outer, hops = weight.device_mesh, weight.ndim - 2, []
    for axis, placement in enumerate(weight.placements):
        dim = None if placement.is_replicate() else dim_of(placement) - outer
        if dim is None or dim >= 0:
            at = mesh.get_local_rank(axis)
            hops.append(Hop(mesh.get_group(axis), mesh.size(axis), at, dim))
    shape = (weight.shape[-2], weight.shape[-1])
    return [Matrix(shape, tuple(hops))] * prod(weight.to_local().shape[:outer])


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
        self.numbers, self.hops = numbers, matrices[0].hops
        self._shapes, self._owners = [each.shapes() for each in matrices], owners

    def travel(self, parts: list[Tensor], compute: Compute) -> Generator[None, None, list[Tensor]]:
        """Returns this rank's parts of the results. It stops where another round may go on."""
        empty, levels = parts[0].new_empty(0), []
        here = range(len(parts))  # the matrices of which this rank has a part
        for number, hop in enumerate(self.hops):
            shapes = [self._shapes[i][number + 1] for i in here]
            level = Level(hop, shapes, [self._owners[i][number] for i in here], empty)
            levels.append(level)
            pending = level.start_there(parts)
            yield
            parts = level.there(pending.wait(), parts)
            here = [here[i] for i in level.owned_by(hop.rank)]
        results = compute(parts)
        yield
        for level in reversed(levels):
            pending = level.start_back(results)
            yield
            results = level.back(pending.wait())
        return results


@dataclass(frozen=True)
class Level:
    """One hop of a round: of matrices of these shapes, once their parts are together."""

    hop: Hop
    shapes: Sequence[Shape]
    owners: Sequence[int]  # the rank on the hop's axis
    empty: Tensor

    def owned_by(self, rank: int) -> list[int]:
        return [i for i, owner in enumerate(self.owners) if owner == rank]

    def numbers(self, of_rank: int, owner: int) -> int:
        """The numbers that a rank has of the matrices of an owner."""
        return sum(prod(self.hop.part(self.shapes[i], of_rank)) for i in self.owned_by(owner))

    def start_there(self, parts: Sequence[Tensor]) -> Pending:
        """Send each part to the matrix's owner."""
        hop, ranks = self.hop, range(self.hop.size)
        if hop.dim is None:
            return Pending(self.empty)
        flat = [parts[i].flatten() for rank in ranks for i in self.owned_by(rank)]
        send = [self.numbers(hop.rank, owner) for owner in ranks]
        receive = [self.numbers(rank, hop.rank) for rank in ranks]
        return start_all_to_all(torch.cat([self.empty, *flat]), hop.group, send, receive)

    def there(self, arrived: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
        """The matrices that this rank owns."""
        hop, mine = self.hop, self.owned_by(self.hop.rank)
        if hop.dim is None:
            return [parts[i] for i in mine]
        shapes = [hop.part(self.shapes[i], rank) for rank in range(hop.size) for i in mine]
        received = views(arrived, shapes)
        return [torch.cat(received[i :: len(mine)], hop.dim) for i in range(len(mine))]

    def start_back(self, results: Sequence[Tensor]) -> Pending:
        """Send each rank its part of the results of this rank's matrices."""
        hop, ranks, flat = self.hop, range(self.hop.size), [self.empty]
        for rank in ranks:
            for whole in results:
                part = whole
                if hop.dim is not None:
                    at = chunk_range(whole.shape[hop.dim], hop.size, rank)
                    part = whole.narrow(hop.dim, at.start, len(at))
                flat.append(part.flatten())
        send = [self.numbers(rank, hop.rank) for rank in ranks]
        receive = [self.numbers(hop.rank, owner) for owner in ranks]
        return start_all_to_all(torch.cat(flat), hop.group, send, receive)

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
    digits = []
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
