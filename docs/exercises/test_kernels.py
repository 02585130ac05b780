"""Two exercises for docs/kernels.md: complete the functions, then run `.venv/bin/python -m
pytest docs/exercises/test_kernels.py`."""

import torch
from torch import Tensor

# for some of the keys: maximum [...], sum of exponentials [...], weighted values [..., E]
Block = tuple[Tensor, Tensor, Tensor]


def merge(a: Block, b: Block) -> Block:
    """Merge two blocks of an online softmax into one.

    A block of scores s [..., n] and values v [n, E] is m = max s, l = Σ exp(s − m) and o = Σ exp(s
    − m) · v; the result of attention is o / l. The merge must not overflow: every exponent must be
    ≤ 0. This is the inner loop of flash attention; ranks that share a vocabulary do the same with
    their logits, and context parallelism does it around a ring.
    """
    raise NotImplementedError("yours to write")


def moved_bytes(elements: int, fused: bool) -> int:
    """The bytes that the forward of y = silu(g) · u moves in bfloat16, for g and u of `elements`
    numbers each: as three operations, s = sigmoid(g), t = g · s, y = t · u, or fused into one
    kernel. Each operation or kernel reads its inputs from memory and writes its output to it."""
    raise NotImplementedError("yours to write")


def block(scores: Tensor, values: Tensor) -> Block:
    largest = scores.amax(-1)
    weights = (scores - largest.unsqueeze(-1)).exp()
    return largest, weights.sum(-1), weights @ values


def test_merging_is_softmax_over_all() -> None:
    numbers = torch.Generator().manual_seed(0)
    # exp without subtracting the maximum would overflow
    scores = torch.randn((3, 12), generator=numbers, dtype=torch.float64) * 400
    values = torch.randn((12, 5), generator=numbers, dtype=torch.float64)
    merged = block(scores[:, :4], values[:4])
    for start in (4, 8):
        merged = merge(merged, block(scores[:, start : start + 4], values[start : start + 4]))
    _, total, weighted = merged
    torch.testing.assert_close(weighted / total.unsqueeze(-1), scores.softmax(-1) @ values)


def test_the_order_does_not_matter() -> None:
    numbers = torch.Generator().manual_seed(1)
    scores, values = torch.randn((2, 6), generator=numbers), torch.randn((6, 3), generator=numbers)
    a, b = block(scores[:, :3], values[:3]), block(scores[:, 3:], values[3:])
    for x, y in zip(merge(a, b), merge(b, a), strict=True):
        torch.testing.assert_close(x, y)


def test_bytes() -> None:
    assert moved_bytes(1000, fused=False) == 16_000
    assert moved_bytes(1000, fused=True) == 6_000
