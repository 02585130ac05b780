"""One launch over many tensors: a table tells each program of the grid what it works on.

A model has hundreds of parameters, most of them small beside the GPU: a launch for each would leave
it idle in between. So the tensors are cut into blocks of BLOCK elements (the last of each tensor is
shorter), and the grid has a program for every block.

    places [programs, 2]        int32: program → which tensor, and which block of it
    table  [tensors, fields]    int64: number of elements, addresses, and what else differs between
                                       tensors (a float64 as its bits)

The places follow from the tensors' sizes: they are made once and stay on the device. Addresses
change, as gradients are allocated anew in every step. So the table is written for each launch, to
pinned memory, and copied without a wait. PyTorch's allocator gives pinned memory out again only
when every copy from it is over: each launch takes a new buffer, and none is overwritten while it is
read.

    bytes moved beside the tensors: 8 per block, and 8 · fields per tensor

An address has no type: the kernel gives it one. All tensors of one field share a dtype, and are
contiguous. Where all of them start at a multiple of 16 bytes the kernel is told so (ALIGNED), and
whole blocks move in accesses of 16 bytes a thread. FSDP cuts sharded gradients out of one buffer:
where a local size is odd, the next one starts anywhere.
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
    """What a kernel over many tensors is launched with."""

    table: Tensor  # int64 [tensors, fields]: number of elements, addresses, further fields
    places: Tensor  # int32 [programs, 2]: tensor, block
    aligned: bool

    @property
    def grid(self) -> tuple[int]:
        return (self.places.shape[0],)


def prepare(
    tensors: Sequence[Sequence[Tensor]], fields: Sequence[Sequence[int]], block: int
) -> Launch:
    """`tensors` are lists of equal length, the i-th of each with the same number of elements;
    likewise `fields`.

    Row i of the table: number of elements, the address of the i-th tensor of each list, the i-th
    number of each of `fields`.
    """
    for same_kind in tensors:
        for t in same_kind:
            # The kernel believes the table: a wrong address would be read all the same.
            assert t.is_cuda or INTERPRETED, "Triton kernels need a GPU"
            assert t.is_contiguous()
            assert t.dtype == same_kind[0].dtype, "one launch, one dtype"
    sizes = tuple(t.numel() for t in tensors[0])
    assert all(
        t.numel() == size for same_kind in tensors for t, size in zip(same_kind, sizes, strict=True)
    )
    addresses = [[t.data_ptr() for t in same_kind] for same_kind in tensors]
    # An empty tensor has no block: nobody looks at its address.
    aligned = all(
        a % 16 == 0
        for same_kind in addresses
        for a, size in zip(same_kind, sizes, strict=True)
        if size
    )
    device = tensors[0][0].device
    # strided: the copy below puts it in order
    rows = torch.tensor([sizes, *addresses, *fields], dtype=torch.int64).T
    table = torch.empty(rows.shape, dtype=torch.int64, pin_memory=device.type == "cuda").copy_(rows)
    return Launch(table.to(device, non_blocking=True), _places(sizes, block, device), aligned)


@lru_cache(maxsize=32)
def _places(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    blocks = torch.tensor([cdiv(size, block) for size in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), blocks)
    first = torch.repeat_interleave(blocks.cumsum(0) - blocks, blocks)
    return (
        torch.stack((tensor, torch.arange(len(tensor)) - first), dim=1).to(torch.int32).to(device)
    )


@jit
def find(TABLE, PLACES, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's row of the table, where its block begins in the tensor, and how many elements
    are left from there."""
    place = PLACES + 2 * tl.program_id(0)
    row = TABLE + tl.load(place) * FIELDS
    start = tl.load(place + 1).to(tl.int64) * BLOCK
    return row, start, tl.load(row) - start


@jit
def pointer(row, field, start, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A tensor's address as a pointer to its element `start`, which is a multiple of BLOCK."""
    first = tl.load(row + field).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + start


def triton_type(dtype: torch.dtype) -> Any:
    """The name that kernels know a dtype by."""
    return {torch.float32: tl.float32, torch.float64: tl.float64, torch.bfloat16: tl.bfloat16}[
        dtype
    ]
