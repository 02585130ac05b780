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

Keeping the gathered keys and values would take cp times the memory of a rank's own. With activation
checkpointing the recomputation gathers them again; without it, a hook on what autograd saves does.
The two chunks' gradients of a key are added in float32 before they are sent, because many terms are
added to the gradients of a long sequence's first keys.

(All-gather rather than a ring: with grouped queries, keys and values are small, any mask works, and
partial results need no merging: Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2. The
zig-zag: https://github.com/zhuzilin/ring-flash-attention/issues/2.)
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from parallel.collectives import start_all_gather, start_reduce_scatter

# q [S, B, H, E], k and v [S, B, K, E] → [S, B, H, E]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ContextParallel:
    """The cp axis, as attention sees it."""

    size: int = 1
    rank: int = 0
    group: ProcessGroup = None  # type: ignore[assignment]  # the mesh's; not used by one rank
    # Whether backward gathers keys and values again. Otherwise a recomputation does it.
    gathers_again: bool = False

    @classmethod
    def of(cls, mesh: DeviceMesh | None, gathers_again: bool = False) -> "ContextParallel":
        """Describe this rank's cp mesh."""
        if mesh is None:
            return cls()
        return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group(), gathers_again)

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
        attend: for each chunk, attention of its queries to the keys from 0 to the chunk's end.
    """

    cp: ContextParallel
    chunks: Sequence[range]
    attend: Sequence[Attend]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q [S/cp, B, H, E], k and v [S/cp, B, K, E] to [S/cp, B, H, E]."""
        if self.cp.size == 1:
            return self.attend[0](q, k, v)
        gathering = Gathering(self.cp)
        seen = GatherKeysAndValues.apply(k, v, gathering, [part.stop for part in self.chunks])
        queries = q.split([len(part) for part in self.chunks])
        with gathering.instead_of_keeping():
            parts = [
                attend(mine, *keys_and_values)
                for attend, mine, *keys_and_values in zip(
                    self.attend, queries, seen[::2], seen[1::2], strict=True
                )
            ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class Gathering:
    """The keys and values of one attention layer for one micro-batch, gathered in forward and, if
    autograd would keep them, again in backward."""

    def __init__(self, cp: ContextParallel) -> None:
        self.cp = cp
        self.local: Tensor | None = None  # this rank's, keys beside values
        self._whole: Tensor | None = None
        self._is_kept = False

    def whole(self) -> Tensor:
        """Gather [S, B, K, E + E'] in the order of the sequence."""
        assert self.local is not None
        if self._whole is None:
            self._whole = in_order(start_all_gather(self.local, self.cp.group).wait(), self.cp.size)
        return self._whole

    def drop(self) -> None:
        self._whole = None

    def instead_of_keeping(self) -> AbstractContextManager[Any]:
        """A context in which autograd keeps, of a view of the gathered tensor, only its place; its
        numbers are gathered again when backward asks for them."""
        if not self.cp.gathers_again or self._whole is None or not torch.is_grad_enabled():
            self.local = None  # nothing will be gathered again
            self.drop()
            return nullcontext()
        storage = self._whole.untyped_storage()._cdata
        self.drop()

        def pack(x: Tensor) -> Tensor | tuple[Any, ...]:
            if x.untyped_storage()._cdata != storage:
                return x
            return x.shape, x.stride(), x.storage_offset()

        def unpack(kept: Any) -> Tensor:
            return kept if isinstance(kept, Tensor) else self.whole().as_strided(*kept)

        return saved_tensors_hooks(pack, unpack)


class GatherKeysAndValues(torch.autograd.Function):
    """The operation that the top of this file describes: (k, v, gathering, ends) → for each end,
    the keys and the values from 0 to there, views of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, gathering: Gathering, ends: Sequence[int]
    ) -> tuple[Tensor, ...]:
        ctx.gathering, ctx.ends, ctx.width = gathering, ends, k.shape[-1]
        gathering.local = torch.cat((k, v), -1)
        whole = gathering.whole()
        ctx.shape = whole.shape
        k, v = whole[..., : ctx.width], whole[..., ctx.width :]
        return tuple(part[:end] for end in ends for part in (k, v))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathering, width, dtype = ctx.gathering, ctx.width, gradients[0].dtype
        gathering.drop()
        total = gradients[0].new_zeros(ctx.shape, dtype=torch.promote_types(dtype, torch.float32))
        for end, dk, dv in zip(ctx.ends, gradients[::2], gradients[1::2], strict=True):
            total[:end, ..., :width] += dk
            total[:end, ..., width:] += dv
        of_ranks = by_rank(total, gathering.cp.size)
        mine = start_reduce_scatter(of_ranks, gathering.cp.group).wait().to(dtype)
        return mine[..., :width], mine[..., width:], None, None


def in_order(gathered: Tensor, ranks: int) -> Tensor:
    """Map [S, …] with the ranks' parts one after another to the order of the sequence."""
    low, high = gathered.unflatten(0, (ranks, 2, -1)).unbind(1)
    return torch.cat([*low, *reversed(high.unbind())])


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """The inverse of `in_order`."""
    chunks = x.chunk(2 * ranks)
    return torch.cat([chunks[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)])
