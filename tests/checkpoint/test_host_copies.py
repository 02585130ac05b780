"""The host copies of a save: exact tensors in buffers that lose little to rounding."""

from unittest.mock import Mock, patch

import pytest
import torch

from runtime.checkpoint.host_copies import host_copies
from tests.runs import same_tensors

# Of one of 8 ranks, each with two moments: the matrices of 40 blocks, D 5120, F 13824; a 512th of
# their bytes.
MATRICES = [512 * n for n in (50, 50, 50, 50, 135, 135, 135)] * 40 * 3


def test_copies_are_exact_and_apart():
    tensors = {
        "matrix": torch.rand(33, 17),
        "half": torch.rand(1001).bfloat16(),
        "count": torch.tensor(7.0, dtype=torch.float64),
        "none": torch.empty(0, 16),
    }
    copies = host_copies(tensors)
    for name, tensor in tensors.items():
        copies[name].copy_(tensor)
    assert same_tensors(copies, tensors)
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.dtype


@pytest.mark.parametrize(
    "sizes", [MATRICES, [512], [1536], [5 << 20, 512], [512] * 7, [(3 << 20) + 512] * 3], ids=len
)
def test_what_is_asked_of_the_allocator(sizes):
    """For tensors on a GPU: powers of two of pinned bytes, each tensor in a place of its own, and
    almost as many bytes as they have."""
    asked: list[torch.Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert (dtype, device, pin_memory) == (torch.uint8, "cpu", True)
        asked.append(torch.zeros(size, dtype=dtype))
        return asked[-1]

    about = {"is_cuda": True, "dtype": torch.uint8}
    tensors = {str(i): Mock(nbytes=size, shape=(size,), **about) for i, size in enumerate(sizes)}
    with patch.object(torch, "empty", empty):
        copies = host_copies(tensors)
    for copy in copies.values():
        assert not copy.any(), "another tensor has this place"
        copy.fill_(1)
    lengths = [len(buffer) for buffer in asked]
    assert all(length.bit_count() == 1 for length in lengths)
    assert sum(int(buffer.sum()) for buffer in asked) == sum(sizes)
    if sizes == MATRICES:
        assert sum(lengths) < 1.01 * sum(sizes)
        # control: with a request for each tensor, which torch rounds up
        assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.6 * sum(sizes)
