"""Packed documents: a sequence of the data holds several documents, and with `data.document_mask` a
token attends only to tokens of its own document.

    tokens       …  x  y  ]  [  a  b  c  ]  [  ]  [  d …       [ is bos, which begins every document
    positions    0  1  2  3  0  1  2  3  4  0  1  0  1 …       they restart in each document
    boundaries   0           4              9    11    …  T    where each begins, counted through
                                                               the micro-batch's sequences

The tokens before the first bos of a sequence are the end of a document that began in another
sequence; they count as a separate document here. The loss does not change: at its eos a document
still predicts the bos of the next one.

The mask prevents documents that are in one sequence by chance from being each other's context
(Llama 3, section 3.2, https://arxiv.org/abs/2407.21783; Zhao et al. 2024,
https://arxiv.org/abs/2402.13991).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.backend import next_power_of_2
from parallel.mesh import to_device


class Documents(NamedTuple):
    """The documents of a part of each sequence, and the keys that its tokens see: from the start
    of the first document, which may lie before the part, to the part's end. Counted through the
    micro-batch's sequences, one after another."""

    queries: Tensor  # [N + 1] int32: where each of the N documents begins in the part, and the end
    keys: Tensor  # [N + 1] int32: where it begins in the keys, and the end
    first_keys: tuple[int, ...]  # of each sequence: the position of the first key
    # no document has more queries, and keys; rounded up, so that few values occur
    longest: tuple[int, int]


def find_documents(
    tokens: Tensor, bos_id: int, device: str, parts: Sequence[range], compiled: bool = False
) -> tuple[Tensor, list[Documents]]:
    """Find the documents in tokens [B, S] on the host. Returns, on `device`, positions [S, B] int64
    and the documents of each of `parts`, ranges of positions.

    N is part of a shape, and kernels take the longest document as a number: if they were found on a
    GPU, the host would have to wait for it.

    compiled: torch.compile compiles the blocks, and would compile them again, in the middle of a
        run, when the longest document is first rounded to another number: it is then the part.
    """
    assert tokens.device.type == "cpu", "find documents before tokens are copied to the device"
    begins = _begins(tokens, bos_id)
    index = torch.arange(tokens.shape[1])
    # [B, S]: where the document of each token begins
    begin_of = torch.where(begins, index, 0).cummax(dim=1).values
    positions = (index - begin_of).T.contiguous()
    documents = []
    for part in parts:
        mine = begins[:, part.start : part.stop].clone()
        mine[:, 0] = True
        ends = _bounds(mine)
        first_keys = begin_of[:, part.start]
        # Of each sequence, part.start − first_keys keys lie before the part. A sequence's first
        # document includes its own; the other documents come after them.
        before = functional.pad((part.start - first_keys).cumsum(0), (1, 0))
        keys = ends + before[ends // len(part) + (ends % len(part) > 0)]
        of_q, of_k = (to_device(each.to(torch.int32), device) for each in (ends, keys))
        longest = len(part), part.stop
        if not compiled:
            longest = _at_most(ends, len(part)), _at_most(keys, part.stop)
        documents.append(Documents(of_q, of_k, tuple(first_keys.tolist()), longest))
    return to_device(positions, device), documents


def mean_length(tokens: Tensor, bos_id: int) -> float:
    """The mean, over tokens [B, S] on the host, of the length of each one's document."""
    lengths = _bounds(_begins(tokens, bos_id)).diff().double()
    return float(lengths.square().sum() / tokens.numel())


def _begins(tokens: Tensor, bos_id: int) -> Tensor:
    """Where a document begins in tokens [B, S], as each sequence does."""
    begins = tokens == bos_id
    begins[:, 0] = True
    return begins


def _bounds(begins: Tensor) -> Tensor:
    """Where each document begins, counted through all sequences, and the end."""
    return functional.pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel())


def _at_most(bounds: Tensor, length: int) -> int:
    """An upper bound of the differences of `bounds`: a power of two, at least a kernel's tile, or
    the length of the sequence. Flash attention launches blocks for this length for each document,
    and those beyond a document's end have nothing to do."""
    return min(max(128, next_power_of_2(int(bounds.diff().max()))), length)
