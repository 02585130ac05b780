"""The host copies of a save: exact tensors in buffers that lose little to rounding."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from runtime.checkpoint.host_copies import host_copies, power_of_two_buffers

# Bytes of one rank's tensors, each with two moments: the matrices of 40 blocks, D 5120, F 13824.
MATRICES = [4 * 5120 * n // 8 for n in (5120, 5120, 5120, 5120, 13824, 13824, 13824)] * 40 * 3


def rounded(size: int) -> int:
    """What torch's allocator of pinned memory takes for a request."""
    return 1 << math.ceil(math.log2(size))


@pytest.mark.parametrize(
    "sizes", [MATRICES, [512], [1536], [5 << 20, 512], [512] * 7, [(3 << 30) + 512] * 3], ids=len
)
def test_every_piece_has_a_place_and_little_is_lost(sizes):
    buffers = power_of_two_buffers(sizes)
    assert sorted(i for _, members in buffers for i in members) == list(range(len(sizes)))
    for size, members in buffers:
        assert size == rounded(size)
        assert sum(sizes[i] for i in members) <= size
    if sizes == MATRICES:
        assert sum(size for size, _ in buffers) < 1.01 * sum(sizes)
        # control: with a request for each tensor
        assert sum(map(rounded, sizes)) > 1.6 * sum(sizes)


def test_copies_are_exact_and_apart():
    tensors = {
        "matrix": torch.rand(33, 17),
        "half": torch.rand(1001).bfloat16(),
        "count": torch.tensor(7.0, dtype=torch.float64),
        "none": torch.empty(0, 16),
    }
    copies = host_copies(tensors)
    assert copies.keys() == tensors.keys()
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert copies[name].dtype == tensor.dtype
        # DCP clones a tensor that is smaller than its storage
        assert copies[name].untyped_storage().nbytes() == tensor.nbytes
    view = torch.empty(512, dtype=torch.uint8)[:256]  # control: a view has the whole storage
    assert view.untyped_storage().nbytes() > view.nbytes


def test_what_is_asked_of_the_allocator():
    """For tensors on a GPU: powers of two of pinned bytes, and almost as many as they have."""
    asked: list[int] = []

    def empty(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (dtype, device, pin_memory) == (torch.uint8, "cpu", True)
        asked.append(size)
        return torch.zeros(size, dtype=dtype)

    on_gpu: Any = SimpleNamespace(
        is_cuda=True, dtype=torch.float32, nbytes=4 * 1100 * 1024, shape=(1100, 1024)
    )
    tensors = {str(i): on_gpu for i in range(9)}
    with patch.object(torch, "empty", empty):
        copies = host_copies(tensors)
    assert len({copy.data_ptr() for copy in copies.values()}) == 9
    assert asked == [rounded(size) for size in asked]
    assert sum(asked) < 1.25 * sum(tensor.nbytes for tensor in tensors.values())
