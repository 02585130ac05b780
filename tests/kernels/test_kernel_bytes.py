"""Every kernel moves exactly as many bytes as its file states, including the small terms.

The calls are those of tools/compile_kernels/specimens.py, of other sizes: T rows of D elements in
bfloat16 unless stated otherwise. A program's repeated loads are served by a cache; they are counted
separately, and explained where they occur.
"""

from unittest.mock import patch

import pytest
import torch

from model.kernels import adamw, backend, gradient_norm
from tests.kernels.interpreter_counter import Launch, counted
from tools.compile_kernels import specimens
from tools.compile_kernels.specimens import BF16, FP32

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="needs Triton's interpreter")

T = 8
R = 107  # rows of all experts, the first of which has 100
S = 24  # rows to sum, by eights
SIZES = 700 * 17, 700  # of the weights of `gradients`, `hash_bits` (only the first) and `update`
N = sum(SIZES)


def launches_of(operation, *arguments, tokens=T):
    with counted() as launches, patch.multiple(specimens, TOKENS=tokens, ROWS=700):
        operation(*arguments)
    return launches


def moved(launch):
    assert launch.stored_again == 0
    return launch.loaded + launch.stored


# D = 96 has a block that is not full, and rows that do not fill the last tile.
@pytest.mark.parametrize(("rows", "width"), [(16, 1024), (9, 4096), (50, 96)])
@pytest.mark.parametrize("add", [False, True])
def test_norm(rows, width, add):
    call = specimens.norm_of_sum if add else specimens.norm
    forward, backward = launches_of(call, width, tokens=rows)
    elements, weights, rstd = rows * width, 2 * width, 4 * rows
    assert moved(forward) == (8 if add else 4) * elements + weights + rstd
    sums = 4 * width * backward.programs
    assert moved(backward) == (8 if add else 6) * elements + weights + rstd + sums
    assert forward.loaded_again == 0
    tiles = backend.cdiv(rows, backend.rows_at_once(backend.next_power_of_2(width)))
    # the weight, once for each tile of a program after the first
    assert backward.loaded_again == weights * (tiles - backward.programs)


def blocks(size):
    return sum(backend.cdiv(n, size) for n in SIZES)


def update_of(per_parameter, fields, scalars):
    """The tensors, and the table with its places."""
    return [per_parameter * N + 8 * blocks(adamw.BLOCK) + 8 * fields * len(SIZES) + 8 * scalars]


def norm_of(per_element):
    """The squares and the table; their sum."""
    count = blocks(gradient_norm.BLOCK)
    return [per_element * N + (8 + 8) * count + 8 * 3 * len(SIZES), 8 * count + 8]


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [
        # forward, backward, and forward in place
        (specimens.rotary, (8, 2, 64), [4 * T * 10 * 64 + 4 * T * 64] * 3),
        (specimens.rotary, (3, 1, 24), [4 * T * 4 * 24 + 4 * T * 24] * 3),
        # one weight for all heads, and in backward a sum for each of two programs
        (specimens.norm_and_rotary, (6, 64),
         [4 * T * 6 * 64 + 4 * T * 64 + 128, 6 * T * 6 * 64 + 4 * T * 64 + 128 + 4 * 64]),
        *((specimens.gate, (d,), [6 * T * d, 10 * T * d]) for d in (96, 3000)),
        *((specimens.weighted_gate, (d,), [6 * T * d + 4 * T, 10 * T * d + 8 * T])
          for d in (96, 3000)),
        *((specimens.rows, (d,), 2 * [2 * S * d + 2 * S * d // 8 + 8 * S]) for d in (96, 3000)),
        # dy and x, once for all tiles; where rows end; the sums
        *((specimens.experts, (272, 160, FP32, beta),
           [2 * R * (272 + 160) + 4 * 4 + (1 + beta) * 4 * (4 * 160 * 272)]) for beta in (0, 1)),
        (specimens.hash_bits, (FP32,), [4 * SIZES[0]]),
        (specimens.hash_bits, (BF16,), [2 * SIZES[0]]),
        (specimens.gradients, (FP32,), norm_of(4)),
        (specimens.gradients, (BF16,), norm_of(2)),
        (specimens.update, (FP32,), update_of(28, fields=6, scalars=4)),
        (specimens.update, (BF16,), update_of(14, fields=10, scalars=5)),
        # statistics; then the gradient, which also loads the scale, and a target and two statistics
        # for each token
        *((specimens.loss, (v,), [2 * T * v + 20 * T, 4 * T * v + 16 * T + 4])
          for v in (512, 10_000)),
    ],
)  # fmt: skip
def test_each_launch_moves_every_byte_once(call, arguments, expected):
    tokens = {specimens.experts: R, specimens.rows: S}.get(call, T)
    launches = launches_of(call, *arguments, tokens=tokens)
    assert [moved(launch) for launch in launches] == expected
    # the statistics load the target's logit a second time
    again = [2 * T, 0] if call is specimens.loss else [0] * len(expected)
    assert [launch.loaded_again for launch in launches] == again


@pytest.mark.parametrize(
    ("waste", "expected"),
    [
        ("nothing", Launch("copy", 2, 400, 400, 0, 0)),
        ("another tensor", Launch("copy", 2, 800, 400, 0, 0)),
        ("a load again", Launch("copy", 2, 400, 400, 400, 0)),
        ("a store again", Launch("copy", 2, 400, 400, 0, 2 * 8 * 4)),
    ],
)
def test_wasteful_kernels_are_found(monkeypatch, waste, expected):
    # Controls: the counter finds additional loads, repeated loads and repeated stores.
    import triton
    import triton.language as tl

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read when a kernel is defined

    @triton.jit
    def copy(X, OTHER, Y, n, WASTE: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(X + i, mask=i < n)
        if WASTE == "another tensor":
            x += tl.load(OTHER + i, mask=i < n)
        if WASTE == "a load again":
            x += tl.load(X + i, mask=i < n)
        tl.store(Y + i, x, mask=i < n)
        if WASTE == "a store again":
            tl.store(Y + tl.arange(0, 8), tl.zeros((8,), tl.float32))

    assert launches_of(copy[(2,)], *torch.rand(3, 100), 100, waste, 64) == [expected]
