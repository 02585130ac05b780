"""The hash of all bits: the kernel's is that of PyTorch, and every single difference changes it."""

from itertools import combinations, product

import pytest
import torch

from model.kernels.bit_hash import BLOCK, hash_of
from tests.kernels.device import NEEDS_TRITON, randn

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64,
    torch.bool,
]  # fmt: skip


def numbers(*shape, dtype):
    return (randn(*shape, dtype=torch.float32) * 100).to(dtype)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_has_the_bits_of_pytorch(dtype):
    sizes = [(), (0,), (1,), (5, 7), (BLOCK,), (BLOCK + 1,), (3, BLOCK)]
    tensors = [numbers(*size, dtype=dtype) for size in sizes]
    tensors += [tensors[3].T, tensors[-1].flatten()[3:]]
    assert hash_of(tensors, "triton") == hash_of(tensors, "torch")
    assert hash_of(tensors[:-1], "triton") != hash_of(tensors, "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype):
    tensors = [numbers(*size, dtype=dtype) for size in ((2, 2), (1,))]
    seen = {int(hash_of(tensors, "torch"))}
    for tensor in tensors:
        raw = tensor.view(-1).view(torch.uint8)
        for place, bit in product(range(len(raw)), range(8)):
            raw[place] ^= 1 << bit
            seen.add(int(hash_of(tensors, "torch")))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + 5 * 8 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_place_counts(dtype):
    """Numbers of which two are swapped, also if only their signs differ; differences that add up to
    nothing; and two tensors of the same numbers."""
    tensor = numbers(40, dtype=dtype).cpu()
    tensor[20:] = -tensor[:20]
    others = []
    for i, j in combinations(range(40), 2):
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        others.append(swapped)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for places, changes in (
        ([3, 4], [1, -1]),
        ([3, 4, 5], [1, -2, 1]),
        ([3, 5, 7], [1, -2, 1]),
        ([1, 3, 5, 7], [1, -1, -1, 1]),
    ):
        changed = tensor.clone()
        changed.view(words)[places] += torch.tensor(changes, dtype=words)
        others.append(changed)
    before = hash_of([tensor], "torch")
    assert [n for n, other in enumerate(others) if hash_of([other], "torch") == before] == []
    assert hash_of([tensor, others[0]], "torch") != hash_of([others[0], tensor], "torch")
