"""One launch over many tensors: a table maps each program of the grid to its part of a tensor.

A model has hundreds of parameters, most of them too small to keep a GPU busy, and with a launch for
each it would be idle between launches. So the tensors are divided into blocks of BLOCK elements
(the last block of a tensor may be shorter), and the grid has one program for every block.

    places [programs, 2]        int32: program → which tensor, and which block of it
    table  [tensors, fields]    int64: number of elements, addresses, and other values that differ
                                       between tensors (a float64 as its bits)

The places depend only on the tensors' sizes, so they are computed once and stay on the device. The
addresses change, because gradients are allocated anew in every step. So the table is written for
each launch, to pinned memory, and copied asynchronously. Each launch takes a new pinned buffer, and
PyTorch's allocator reuses one only when all copies from it are complete, so no buffer is
overwritten while it is read.

    bytes moved in addition to the tensors: 8 per block, and 8 · fields per tensor

An address has no type, so the kernel casts it to a typed pointer. All tensors of one field share a
dtype and are contiguous. If all of them start at a multiple of 16 bytes, ALIGNED is set, and whole
blocks move in 16-byte accesses per thread. Alignment is not guaranteed: FSDP's sharded gradients
are slices of one buffer, and after one of odd size the next may start at any element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from model.kernels.backend import INTERPRETED, cdiv, jit, tl


@dataclass(frozen=True)
class Launch:
    """The arguments of a kernel that is launched over many tensors."""

    table: Tensor  # int64 [tensors, fields]: number of elements, addresses, further fields
    places: Tensor  # int32 [programs, 2]: tensor, block
    aligned: bool

    @property
    def grid(self) -> tuple[int]:
        return (self.places.shape[0],)


def prepare(
    tensors: Sequence[Sequence[Tensor]], fields: Sequence[Sequence[int]], block: int
) -> Launch:
    """Build the table and the places of a launch. `tensors` are lists of equal length, whose i-th
    tensors have the same number of elements; `fields` are lists of the same length.

    Row i of the table holds the number of elements, the address of the i-th tensor of each list,
    and the i-th number of each of `fields`.
    """
    sizes = tuple(t.numel() for t in tensors[0])
    for same_kind in tensors:
        assert tuple(t.numel() for t in same_kind) == sizes
        for t in same_kind:
            # The kernel trusts the table, and would read a wrong address without an error.
            assert t.is_cuda or INTERPRETED, "Triton kernels need a GPU"
            assert t.is_contiguous()
            assert t.dtype == same_kind[0].dtype, "one launch, one dtype"
    addresses = [[t.data_ptr() for t in same_kind] for same_kind in tensors]
    # An empty tensor has no block, so its address is never read.
    read = [a for each in addresses for a, size in zip(each, sizes, strict=True) if size]
    aligned = all(a % 16 == 0 for a in read)
    device = tensors[0][0].device
    # a transposed view; the copy below makes it contiguous
    rows = torch.tensor([sizes, *addresses, *fields], dtype=torch.int64).T
    on_gpu = device.type == "cuda"
    table = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu).copy_(rows)
    return Launch(table.to(device, non_blocking=True), _places(sizes, block, device), aligned)


@lru_cache(maxsize=32)
def _places(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    blocks = torch.tensor([cdiv(size, block) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    first = torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    places = tensor, torch.arange(len(tensor)) - first
    return torch.stack(places, dim=1).to(torch.int32).to(device)


@jit
def find(TABLE, PLACES, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return this program's row of the table, the index at which its block begins in the tensor,
    and the number of elements from there to the tensor's end."""
    place = PLACES + 2 * tl.program_id(0)
    row = TABLE + tl.load(place) * FIELDS
    start = tl.load(place + 1).to(tl.int64) * BLOCK
    return row, start, tl.load(row) - start


@jit
def pointer(row, field, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to element `start`, a multiple of BLOCK, of the tensor whose address is in
    `field` of the row."""
    first = tl.load(row + field).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + start


def triton_type(dtype: torch.dtype) -> Any:
    """The Triton dtype of a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))
