"""Context parallelism: each sequence is split over cp ranks. Every operation but attention treats
tokens one by one, so only attention communicates: queries stay where they are, and each rank
gathers the keys and values of the whole sequence.

    S = 16, cp 2     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15      2 cp chunks
                     rank 0    rank 1     rank 1        rank 0

The later a token, the more keys it sees. So rank r holds chunks r and 2 cp − 1 − r ("zig-zag"), and
all ranks have equally much to compute: (r + 1) + (2 cp − r) chunks of keys for two chunks of
queries. A chunk of queries sees no keys after its own end, so it takes one call of an attention
kernel with the keys from 0 to that end. Rank cp − 1 has two adjacent chunks, which are one.

| pass     | what travels over cp, per attention layer  | collective                               |
|----------|--------------------------------------------|------------------------------------------|
| forward  | keys beside values, in the compute dtype   | all-gather of 2 · S·B·K/tp·E             |
| backward | the same again: they are not kept          | all-gather of 2 · S·B·K/tp·E             |
|          | their gradients, summed in float32         | reduce-scatter of 2 · S·B·K/tp·E         |

(docs/context.md compares a ring and Ulysses with all-gathers.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.asynchronous import Start, Wait
from parallel.collectives import Pending, start_all_gather, start_reduce_scatter
from parallel.mesh import Axis, Mesh

PIECES = 4  # of the heads, at most; more would hide more, but send and compute in smaller parts
# Bytes of a gathered piece, at least. To gather them takes about 0.2 ms over NVLink, as long as to
# launch the twenty kernels that one more piece needs (hardware.py).
LEAST_BYTES = 64 * 2**20

# q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ContextParallel(Axis):
    """The cp axis, as attention sees it."""

    # Whether backward gathers keys and values again. Otherwise a recomputation does it.
    gathers_again: bool = False

    @classmethod
    def of(cls, mesh: Mesh, gathers_again: bool = False) -> "ContextParallel":
        return cls(**vars(mesh.cp), gathers_again=gathers_again)

    def local_length(self, length: int) -> int:
        """The number of positions of a sequence of `length` tokens on one rank."""
        return length // self.size

    def chunks(self, length: int) -> list[range]:
        """The positions of a sequence of `length` tokens that this rank holds, in order."""
        ends = [length * i // (2 * self.size) for i in range(2 * self.size + 1)]
        low, high = self.rank, 2 * self.size - 1 - self.rank
        if high == low + 1:
            return [range(ends[low], ends[high + 1])]
        return [range(ends[i], ends[i + 1]) for i in (low, high)]

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor with whole sequences along `dim`."""
        parts = [x.narrow(dim, part.start, len(part)) for part in self.chunks(x.shape[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class SplitAttention:
    """Attention of this rank's queries to all keys that they see.

    Args:
        cp: the axis.
        chunks: the positions of the queries (`ContextParallel.chunks`).
        of_chunks: for each, attention of its queries to the keys from 0 to the chunk's end.
    """

    cp: ContextParallel
    chunks: Sequence[range]
    of_chunks: Sequence[Attend]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [S/cp, B, H, E], k and v [S/cp, B, K, E] to [S/cp, B, H, E]."""
        return self.of_chunks[0](q, k, v) if self.cp.size == 1 else self._gathered(q, k, v)

    def _gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In long sequences the heads are divided into up to `PIECES` pieces, each with its own
        collectives: while attention is computed for one piece, the keys and values of the next one
        travel, and in backward also the gradients of the piece before."""
        number = number_of_pieces(k.shape[2], (k.nbytes + v.nbytes) * self.cp.size)
        ends = [part.stop for part in self.chunks]
        pieces = [KeysAndValues(self.cp, ends) for _ in range(number)]
        gradients = partial(join_gradients, pieces, (k.shape, v.shape), k.new_empty(()))
        link = Start.apply(partial(start_first, pieces), gradients, k, v)
        ys = [self._of(pieces, i, link, each) for i, each in enumerate(q.chunk(number, 2))]
        return ys[0] if number == 1 else torch.cat(ys, 2)

    def _of(self, pieces: Sequence["KeysAndValues"], i: int, link: Tensor, q: Tensor) -> Tensor:
        """Attention of piece i of the heads."""
        piece = pieces[i]
        keys_and_values = iter(Wait.apply(link, piece.up_to_ends, piece.start_gradients))
        for following in pieces[i + 1 : i + 2]:
            following.start()
        parts = q.split([len(part) for part in self.chunks])
        with piece.instead_of_keeping() as gathers_again:
            ys = [
                attend(mine, next(keys_and_values), next(keys_and_values))
                for attend, mine in zip(self.of_chunks, parts, strict=True)
            ]
        y = ys[0] if len(ys) == 1 else torch.cat(ys)
        if gathers_again and y.requires_grad:
            # Before the backward of a piece, start to gather the piece that follows it in backward;
            # before that of the last, which is the first in backward, also that piece itself. Every
            # rank does it, whatever its kernels have kept.
            for each in reversed(pieces[max(i - 1, 0) : i + 1]):
                y.register_hook(each.start)
        return y


def number_of_pieces(heads: int, gathered: int) -> int:
    """The number of pieces of so many key/value heads, of `gathered` bytes."""
    numbers = range(1, min(PIECES, gathered // LEAST_BYTES) + 1)
    return max([n for n in numbers if heads % n == 0], default=1)


class KeysAndValues:
    """Those of some heads, for one layer and micro-batch: gathered in forward and, if autograd
    would keep them, again in backward. Then their gradients are scattered.

    Keeping the gathered keys and values would take cp times the memory of a rank's own. With
    activation checkpointing the recomputation gathers them again; without it, a hook on what
    autograd saves does, if a micro-batch is one sequence. (Kernels for several need copies, which
    autograd keeps.) The two chunks' gradients of a key are added in float32 before they are sent,
    because many terms are added to the gradients of a long sequence's first keys.

    Forward goes through the pieces of the heads in order, and backward in the reverse order. A
    piece must not refer to another one: the graph refers to pieces, so this may be a cycle.
    """

    def __init__(self, cp: ContextParallel, ends: Sequence[int]) -> None:
        self.cp, self.ends = cp, ends
        self.local: Tensor | None = None  # [S/cp, B, K, E + E'], this rank's keys beside values
        self.widths: Sequence[int] = ()  # E and E'
        self._shape = torch.Size()  # [S, B, K, E + E']
        self._gathering: Pending | None = None
        self._whole: Tensor | None = None
        self._scattering: Pending | None = None

    def start(self, *_: Tensor) -> None:
        """Start to gather, unless that was done. (Also a hook, which is called with a gradient.)"""
        if self._gathering is None and self._whole is None:
            assert self.local is not None
            self._gathering = start_all_gather(self.local, self.cp.group)

    def whole(self) -> Tensor:
        """The gathered [S, B, K, E + E'], in the order of the sequence."""
        if self._whole is None:
            self.start()
            assert self._gathering is not None
            gathered, self._gathering = self._gathering.wait(), None
            self._whole = in_order(gathered, self.cp.size)
        return self._whole

    def up_to_ends(self) -> tuple[Tensor, ...]:
        """For each end of a chunk, the keys and the values from 0 to there, views of one tensor."""
        self._shape = self.whole().shape
        parts = self.whole().split(self.widths, -1)
        return tuple(part[:end] for end in self.ends for part in parts)

    def drop(self) -> None:
        if self._gathering is not None:  # no kernel has asked for it
            self._gathering.wait()
        self._gathering = self._whole = None

    def start_gradients(self, *gradients: Tensor) -> None:
        """Start to sum the gradients of `up_to_ends` over the ranks."""
        self.drop()
        self.local = None  # it is not gathered any more
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        total = gradients[0].new_empty(self._shape, dtype=dtype)
        for i, part in enumerate(total.split(self.widths, -1)):
            sum_by_rank(gradients[i::2], part, self.cp.size)
        self._scattering = start_reduce_scatter(total, self.cp.group)

    def gradients(self) -> Sequence[Tensor]:
        """Those of this rank's keys and values, in at least float32."""
        assert self._scattering is not None
        total, self._scattering = self._scattering.wait(), None
        return total.split(self.widths, -1)

    @contextmanager
    def instead_of_keeping(self) -> Iterator[bool]:
        """A context in which autograd keeps, of a view of the gathered tensor, only its place,
        because it will be gathered again. Yields whether that is so; every rank must agree.
        """
        assert self._whole is not None
        storage, sequences = self._whole.untyped_storage()._cdata, self._whole.shape[1]
        self.drop()
        if not self.cp.gathers_again or sequences > 1 or not torch.is_grad_enabled():
            self.local = None
            yield False
            return

        def pack(x: Tensor) -> Tensor | tuple[Any, ...]:
            if x.untyped_storage()._cdata != storage:
                return x
            return x.shape, x.stride(), x.storage_offset()

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self.whole().as_strided(*kept)

        with saved_tensors_hooks(pack, unpack):
            yield True


def start_first(pieces: Sequence[KeysAndValues], k: Tensor, v: Tensor) -> None:
    """Divide the heads of k [S/cp, B, K, E] and v, and start to gather the first piece."""
    n = len(pieces)
    for piece, *parts in zip(pieces, k.chunk(n, 2), v.chunk(n, 2), strict=True):
        piece.local, piece.widths = torch.cat(parts, -1), [part.shape[-1] for part in parts]
    pieces[0].start()


def join_gradients(
    pieces: Sequence[KeysAndValues], shapes: Sequence[torch.Size], like: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of k and v, of these shapes, from those of all pieces."""
    parts = zip(*(piece.gradients() for piece in pieces), strict=True)
    empty = map(like.new_empty, shapes)
    return tuple(torch.cat(each, 2, out=out) for each, out in zip(parts, empty, strict=True))


def in_order(gathered: Tensor, ranks: int) -> Tensor:
    """Map [S, …] with the ranks' parts one after another to the order of the sequence."""
    low, high = gathered.unflatten(0, (ranks, 2, -1)).unbind(1)
    return torch.cat([*low, *reversed(high.unbind())])


def sum_by_rank(gradients: Sequence[Tensor], total: Tensor, ranks: int) -> None:
    """Sum gradients of the keys from 0 to each chunk's end into `total` [S, …], with the ranks'
    parts one after another: the inverse of `in_order`."""
    low, high = total.unflatten(0, (ranks, 2, -1)).unbind(1)  # [cp, S / 2 cp, …] each
    longest, *others = (x.unflatten(0, (-1, low.shape[1])) for x in reversed(gradients))
    unseen = 2 * ranks - len(longest)
    low.copy_(longest[:ranks])
    high[unseen:].copy_(longest[ranks:].flip(0))
    high[:unseen].zero_()
    for one in others:  # of the low chunk, which sees only low chunks
        low[: len(one)].add_(one)
