"""A hash of all bits of tensors, to tell whether ranks hold the same numbers.

    Σ over tensors n and words i:  value(word_i) · factor(i · STEP + n · FIRST)     mod 2⁶⁴

A word is a number's bits as an integer of its size; a number of 8 bytes is two words. `value` is a
bijection of 32 bits, and `factor` gives odd numbers, which have an inverse mod 2⁶⁴. So if one word
changes, the sum always changes. Neither is linear, so that several differences do not cancel
because of what they have in common: words that are swapped, or +1 here and −1 there. Of those,
about one in 2⁵⁹ is missed.

Additions of integers commute, so programs add to the sum in any order, and it has the same bits
every time.

| launch          | reads            | writes            | bytes per element  |
|-----------------|------------------|-------------------|--------------------|
| one per tensor  | the tensor, once | 8 bytes per block | the element's size |
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from model.kernels.backend import cdiv, jit, tl, use_triton

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
# 2³² and 2⁶⁴ / golden ratio, which spread what they are multiplied by over all bits (Knuth, The Art
# of Computer Programming, section 6.4); as int64
FIRST, STEP = 0x9E3779B9, 0x9E3779B97F4A7C15 - (1 << 64)
MIX = 0x7FEB352D  # odd (https://github.com/skeeto/hash-prospector)
BLOCK = 8192
AT_ONCE = 1 << 20  # words, without Triton: 32 bytes each, little on a full GPU


@torch.no_grad()
def hash_of(tensors: Iterable[Tensor], kernels: str) -> Tensor:
    """Return an int64 scalar that depends on every bit of the tensors and on its place.

    kernels: auto, triton or torch.
    """
    total: Tensor | None = None
    for number, tensor in enumerate(tensors, 1):
        words = tensor.detach().contiguous().flatten().view(WORDS[tensor.element_size()])
        if total is None:
            total = torch.zeros((), dtype=torch.int64, device=words.device)
        total = total.to(words.device)  # some are offloaded
        if use_triton(words, kernels):
            torch.ops.lattice.add_hash_(total, words, FIRST * number)
        else:
            _add_hash(total, words, FIRST * number)
    return torch.zeros((), dtype=torch.int64) if total is None else total


def _add_hash(total: Tensor, words: Tensor, first: int) -> None:
    for start in range(0, len(words), AT_ONCE):
        value = (words[start : start + AT_ONCE].long() * MIX) & 0xFFFFFFFF
        factor = torch.arange(start, start + len(value), device=words.device) * STEP + first
        total += ((value ^ (value >> 16)) * ((factor ^ (factor >> 32)) | 1)).sum()


@jit
def _hash(TOTAL, X, count, first, STEP: tl.constexpr, MIX: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    if count - start >= BLOCK:  # no mask: a mask that may end anywhere would rule out wide accesses
        x = tl.load(X + start + offsets)
    else:
        x = tl.load(X + start + offsets, mask=offsets < count - start, other=0)
    value = x.to(tl.int32).to(tl.uint32, bitcast=True) * MIX
    value = (value ^ (value >> 16)).to(tl.int64)  # 0 for words beyond the end
    factor = (start + offsets) * STEP + first
    tl.atomic_add(TOTAL, tl.sum(value * ((factor ^ (factor >> 32)) | 1), 0))


@torch.library.custom_op("lattice::add_hash_", mutates_args=("total",))
def _add_hash_op(total: Tensor, words: Tensor, first: int) -> None:
    if len(words):
        _hash[(cdiv(len(words), BLOCK),)](
            total, words, len(words), first, STEP=STEP, MIX=MIX, BLOCK=BLOCK, num_warps=8
        )  # fmt: skip
