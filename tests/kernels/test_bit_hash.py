"""The hash of all bits: the kernel's is that of PyTorch, which is that of the formula, and every
single difference changes it."""

from itertools import combinations

import pytest
import torch

from model.kernels.backend import why_not_triton
from model.kernels.bit_hash import BLOCK, FIRST, MIX, STEP, hash_of
from tests.counting import Operators

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEEDS_TRITON = pytest.mark.skipif(why_not_triton(DEVICE) is not None, reason="needs Triton")
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int64,
    torch.bool,
]  # fmt: skip


def by_formula(tensors: list[torch.Tensor]) -> int:
    """In whole numbers of Python, word by word."""
    total = 0
    for n, tensor in enumerate(tensors):
        size = min(tensor.element_size(), 4)
        raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        for i in range(len(raw) // size):
            word = int.from_bytes(raw[i * size : (i + 1) * size], "little", signed=True)
            value, factor = word * MIX % 2**32, signed(FIRST * (n + 1) + STEP * i)
            total += (value ^ value >> 16) * ((factor ^ factor >> 32) | 1)
    return signed(total)


def signed(number: int) -> int:
    """The integer of 64 bits that has the same remainder."""
    return (number + 2**63) % 2**64 - 2**63


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_has_the_bits_of_pytorch(dtype: torch.dtype) -> None:
    sizes = [(), (0,), (1,), (5, 7), (BLOCK,), (BLOCK + 1,), (3, BLOCK)]
    tensors = [numbers(*size, dtype=dtype).to(DEVICE) for size in sizes]
    tensors += [tensors[3].T, tensors[-1].flatten()[3:]]
    assert hash_of(tensors, "triton") == hash_of(tensors, "torch")
    assert hash_of(tensors[:-1], "triton") != hash_of(tensors, "torch")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_the_formula_says(dtype: torch.dtype) -> None:
    tensors = [numbers(*size, dtype=dtype) for size in ((), (5, 7), (0,), (300,))]
    assert hash_of(tensors, "torch") == by_formula(tensors)


@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
def test_every_bit_counts(kernels: str) -> None:
    tensors = [numbers(*size, dtype=torch.float32).to(DEVICE) for size in ((2, 2), (1,))]
    before = {int(hash_of(tensors, kernels))}
    seen = set(before)
    for tensor in tensors:
        words = tensor.view(torch.int32).view(-1)
        for place in range(len(words)):
            for bit in range(32):
                words[place] ^= -(1 << 31) if bit == 31 else 1 << bit
                seen.add(int(hash_of(tensors, kernels)))
                words[place] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert len(seen) == 1 + 5 * 32
    assert {int(hash_of(tensors, kernels))} == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_place_counts(dtype: torch.dtype) -> None:
    """Numbers of which two are swapped, also if only their signs differ; four, as far from each
    other; two tensors of the same numbers; and differences that add up to nothing."""
    tensor = numbers(40, dtype=dtype)
    tensor[20:] = -tensor[:20]
    others = []
    for i, j in combinations(range(40), 2):
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        others.append(swapped)
    fours = tensor.clone()
    fours[[1, 3, 5, 7]] = torch.tensor([3.0, 4.0, 4.0, 3.0]).to(dtype)
    other_fours = fours.clone()
    other_fours[[1, 3, 5, 7]] = torch.tensor([4.0, 3.0, 3.0, 4.0]).to(dtype)
    assert hash_of([fours], "torch") != hash_of([other_fours], "torch")
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for places, changes in (([3, 4], [1, -1]), ([3, 4, 5], [1, -2, 1]), ([3, 5, 7], [1, -2, 1])):
        changed = tensor.clone()
        changed.view(words)[places] += torch.tensor(changes, dtype=words)
        others.append(changed)
    before = hash_of([tensor], "torch")
    assert [n for n, other in enumerate(others) if hash_of([other], "torch") == before] == []
    assert hash_of([tensor, others[0]], "torch") != hash_of([others[0], tensor], "torch")


@NEEDS_TRITON
def test_a_tensor_is_one_launch() -> None:
    tensors = [torch.zeros(4 * BLOCK, device=DEVICE) for _ in range(3)]
    with Operators() as seen:
        hash_of(tensors, "triton")
    operations = [str(each) for each in seen.found]
    assert operations.count("lattice.add_hash_.default") == 3
    views = ("aten.detach", "aten.view", "aten.alias")
    rest = [each for each in operations if not each.startswith((*views, "lattice."))]
    assert rest == ["aten.zeros.default"]
    torch.library.opcheck(
        torch.ops.lattice.add_hash_.default,
        (torch.zeros((), dtype=torch.int64, device=DEVICE), tensors[0][:9].view(torch.int32), 3),
    )
