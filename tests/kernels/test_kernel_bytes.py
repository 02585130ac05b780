"""Every kernel moves exactly as many bytes as its file states, including the small terms.

Tensors have T rows of D elements in bfloat16 unless stated otherwise. A program's repeated loads
are served by a cache; they are counted separately, and explained where they occur.
"""

import pytest
import torch
from torch import Tensor

from model.kernels import adamw as adamw_file
from model.kernels import backend, gradient_norm
from model.kernels.adamw import Location, Rates, adamw
from model.kernels.bit_hash import hash_of
from model.kernels.cross_entropy import gradient_over_logits_, merge, statistics
from model.kernels.gradient_norm import square_sum
from model.kernels.grouped_matmul import add_grouped_weight_gradient
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.sum_rows import sum_rows
from model.kernels.swiglu import swiglu
from model.kernels.weighted_swiglu import weighted_swiglu
from tests.kernels.interpreter_counter import Launch, counted

pytestmark = pytest.mark.skipif(not backend.INTERPRETED, reason="needs Triton's interpreter")

BF16 = torch.bfloat16


def tensor(*shape, dtype=BF16):
    return torch.randn(shape).to(dtype).requires_grad_()


def launches_of(operation, *arguments):
    with counted() as launches:
        operation(*arguments)
    return launches


def forward_and_backward(operation, inputs, *options):
    """The launches of an operation by Triton, and of its backward to all inputs."""
    with counted() as launches:
        y = operation(*inputs, *options, "triton")
        outputs = (y,) if isinstance(y, Tensor) else y
        torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])
    return launches


def moved(launch):
    assert launch.stored_again == 0
    return launch.loaded + launch.stored


# D = 96 has a block that is not full, and rows that do not fill the last tile.
@pytest.mark.parametrize(("rows", "width"), [(16, 1024), (9, 4096), (50, 96)])
@pytest.mark.parametrize("add", [False, True])
def test_norm(rows, width, add):
    inputs = [*(tensor(rows, width) for _ in range(1 + add)), tensor(width)]
    operation = add_rms_norm if add else rms_norm
    forward, backward = forward_and_backward(operation, inputs, 1e-5)
    elements, weights, rstd = rows * width, 2 * width, 4 * rows
    assert moved(forward) == (8 if add else 4) * elements + weights + rstd
    sums = 4 * width * backward.programs
    assert moved(backward) == (8 if add else 6) * elements + weights + rstd + sums
    assert forward.loaded_again == 0
    tiles = backend.cdiv(rows, backend.rows_at_once(backend.next_power_of_2(width)))
    # the weight, once for each tile of a program after the first
    assert backward.loaded_again == weights * (tiles - backward.programs)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 64), (3, 1, 24)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rotary(heads, kv_heads, head_dim, in_place):
    tokens = 10
    q, k = tensor(tokens // 2, 2, heads, head_dim), tensor(tokens // 2, 2, kv_heads, head_dim)
    cos, sin = torch.randn(2, tokens // 2, 2, 1, head_dim // 2)

    def turn(q, k, kernels):
        return rotate(q, k, cos, sin, kernels)

    if in_place:
        with torch.no_grad():
            launches = launches_of(turn, q, k, "triton")
    else:
        launches = forward_and_backward(turn, [q, k])
    elements = tokens * (heads + kv_heads) * head_dim
    for launch in launches:
        assert moved(launch) == 4 * elements + 4 * elements // (heads + kv_heads)
        assert launch.loaded_again == 0


@pytest.mark.parametrize("width", [96, 3000])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu(weighted, width):
    inputs, per_row = [tensor(7, width), tensor(7, width)], 4 * weighted
    inputs += [tensor(7, dtype=torch.float32)] * weighted
    operation = weighted_swiglu if weighted else swiglu
    forward, backward = forward_and_backward(operation, inputs)
    assert moved(forward) == 6 * 7 * width + per_row * 7
    assert moved(backward) == 10 * 7 * width + 2 * per_row * 7
    assert forward.loaded_again == backward.loaded_again == 0


@pytest.mark.parametrize(("tokens", "width"), [(9, 512), (3, 10_000)])
def test_cross_entropy(tokens, width):
    logits, targets = tensor(tokens, width).detach(), torch.arange(tokens)
    (found,) = launches_of(statistics, logits, targets, 0, "triton")
    assert moved(found) == 2 * logits.numel() + 20 * tokens
    assert found.loaded_again == 2 * tokens  # the target's logit
    row = merge(statistics(logits, targets, 0, "triton").unsqueeze(0))
    about = logits, targets, row, torch.ones(()), 0, 1e-4, "triton"
    (found,) = launches_of(gradient_over_logits_, *about)
    # per token a target and two statistics; and the scale
    assert moved(found) == 4 * logits.numel() + 16 * tokens + 4
    assert found.loaded_again == 0


@pytest.mark.parametrize(
    ("dtype", "per_parameter", "fields", "scalars"), [(torch.float32, 28, 6, 4), (BF16, 14, 10, 5)]
)
def test_adamw(dtype, per_parameter, fields, scalars):
    sizes = [5000, 3]
    p, g, m, v = ([torch.rand(size).to(dtype) for size in sizes] for _ in range(4))
    locations = [Location(1, 0, size, size) for size in sizes]
    norm, rates = torch.ones((), dtype=torch.float64), Rates(1e-3, (0.9, 0.95), 1e-8, 1.0)
    about = p, g, m, v, [0.1, 0.0], locations, torch.zeros(()), norm, rates, "triton"
    (found,) = launches_of(adamw, *about)
    blocks = sum(backend.cdiv(size, adamw_file.BLOCK) for size in sizes)
    table = 8 * blocks + 8 * fields * len(sizes) + 8 * scalars
    assert moved(found) == per_parameter * sum(sizes) + table
    assert found.loaded_again == 0


@pytest.mark.parametrize(("dtype", "per_element"), [(torch.float32, 4), (BF16, 2)])
def test_gradient_norm(dtype, per_element):
    sizes = [20_000, 7]
    gradients = [torch.rand(size).to(dtype) for size in sizes]
    squares, total = launches_of(square_sum, gradients, [1, 2], "triton")
    blocks = sum(backend.cdiv(size, gradient_norm.BLOCK) for size in sizes)
    assert moved(squares) == per_element * sum(sizes) + (8 + 8) * blocks + 8 * 3 * len(sizes)
    assert moved(total) == 8 * blocks + 8
    assert squares.loaded_again == total.loaded_again == 0


@pytest.mark.parametrize(("k", "width"), [(3, 3000), (2, 96)])
def test_sum_of_rows(k, width):
    x, places = tensor(6, width).detach(), torch.randperm(6)
    (found,) = launches_of(sum_rows, x, places, k, "triton")
    assert moved(found) == 2 * x.numel() + 2 * x.numel() // k + places.nbytes
    assert found.loaded_again == 0


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_hash(dtype):
    words = torch.rand(20_000).to(dtype)
    (found,) = launches_of(hash_of, [words], "triton")
    assert moved(found) == words.nbytes
    assert found.loaded_again == 0


@pytest.mark.parametrize("beta", [0, 1])
def test_gradient_of_experts(beta):
    dy, x, into = tensor(107, 160).detach(), tensor(107, 272).detach(), torch.zeros(3, 160, 272)
    ends = torch.tensor([100, 100, 107], dtype=torch.int32)
    (found,) = launches_of(add_grouped_weight_gradient, into, dy, x, ends, beta, "triton")
    assert moved(found) == dy.nbytes + x.nbytes + ends.nbytes + (1 + beta) * into.nbytes
    assert found.loaded_again == 0


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
