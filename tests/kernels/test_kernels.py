"""Outputs and gradients of every operation, in both implementations, are compared with float64, on
a GPU or in Triton's interpreter.

The bound for float32 is 2e-6 of the largest value. For bfloat16 it is 1.1 times the error of
rounding the exact result to bfloat16 (1.9 times where a residual sum, which is itself rounded, is
the input of a norm).
"""

import re
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from model.kernels.backend import exact
from model.kernels.cross_entropy import gradient_over_logits_, merge, statistics, token_losses
from model.kernels.grouped_matmul import grouped_mm
from model.kernels.norm_rotary import norm_rotate
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rotary import rotate
from model.kernels.swiglu import swiglu
from model.kernels.weighted_swiglu import weighted_swiglu
from model.positions import Rotary, rotary_angles
from parallel.weight_gradient import TO_AUTOGRAD, Place, WeightGradient
from tests import ROOT
from tests.counting import Operators
from tests.kernels.device import DEVICE, DTYPES, NEEDS_TRITON, randn
from tokens import IGNORE
from tools.compile_kernels import specimens

pytestmark = [NEEDS_TRITON, pytest.mark.usefixtures("on_device")]
EPS = 1e-5
KERNELS = ["triton", "torch"]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kernel = pytest.mark.parametrize("kernels", KERNELS)


def tensors(dtype, *shapes):
    """Different random numbers in each."""
    return [randn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def assert_close(found, exact, *, rounded_input=False, terms=0.0):
    """Within the bound of the dtype (see the top of this file); `exact` is in float64. `terms` is
    the size of terms that cancel."""
    assert found.shape == exact.shape
    if not exact.numel():
        return
    error, size = (found.double() - exact).abs().max(), max(exact.abs().max().item(), terms)
    if found.dtype == torch.bfloat16:
        rounding = (exact.to(torch.bfloat16).double() - exact).abs().max()
        bound = (1.9 if rounded_input else 1.1) * rounding + 2e-6 * terms
    else:
        bound = (2e-6 if found.dtype == torch.float32 else 1e-14) * size
    assert error <= bound, f"{error:.2e} > {bound:.2e}"


def compare(function, exact_function, inputs, **bound):
    """Compare outputs and gradients of `function` with those of `exact_function` on the same inputs
    in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    exact_leaves = [x.detach().double().requires_grad_() for x in inputs]
    outputs, exact = function(*leaves), exact_function(*exact_leaves)
    directions = [randn(*y.shape, dtype=y.dtype, seed=9 + i) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, directions)
    torch.autograd.backward(exact, [d.double() for d in directions])
    for y, e in zip(outputs, exact, strict=True):
        assert_close(y.detach(), e.detach(), **bound)
    for x, e in zip(leaves, exact_leaves, strict=True):
        assert x.grad.dtype == x.dtype
        assert_close(x.grad, e.grad, **bound)


def exact_rms_norm(x, w):
    return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w,)


def exact_swiglu(gate, up, *weights):
    y = gate * torch.sigmoid(gate) * up
    return (y * weights[0].unsqueeze(1) if weights else y,)


def triton_rms_norm(x, w):
    return (rms_norm(x, w, EPS, "triton"),)


@each_dtype
@pytest.mark.parametrize(
    "shape", [(5, 1), (5, 7), (5, 64), (5, 97), (5, 1000), (2, 3, 16), (1, 33), (0, 8)], ids=str
)
def test_rms_norm(shape, dtype):
    # The norm of one number is its sign, and its gradient is as small as eps.
    cancels = 1.0 if shape[-1] == 1 else 0.0
    compare(triton_rms_norm, exact_rms_norm, tensors(dtype, shape, shape[-1:]), terms=cancels)


@each_dtype
@pytest.mark.parametrize("shape", [(5, 97), (2, 3, 64), (0, 8)], ids=str)
def test_add_rms_norm(shape, dtype):
    def exact(x, r, w):
        return *exact_rms_norm(x + r, w), x + r

    def ours(x, r, w):
        return add_rms_norm(x, r, w, EPS, "triton")

    x, w, r = tensors(dtype, shape, shape[-1:], shape)
    compare(ours, exact, (x, r, w), rounded_input=True)


@each_kernel
def test_the_gradient_of_a_norm_is_added_to_its_sum_unrounded(kernels):
    x, dy, w = (randn(*shape, dtype=torch.bfloat16) for shape in [(40, 16), (40, 16), (16,)])
    gradient = WeightGradient(w.shape)
    gradient.sum_in(Place(), torch.float32)
    rms_norm(x, w.requires_grad_(), EPS, kernels, gradient).backward(dy)
    exact_w = w.detach().double().requires_grad_()
    exact_rms_norm(x.double(), exact_w)[0].backward(dy.double())
    torch.testing.assert_close(gradient.total.double(), exact_w.grad, rtol=1e-5, atol=1e-5)
    assert w.grad is None


def test_add_rms_norm_where_one_output_goes_nowhere():
    x, r = tensors(torch.float32, (4, 16), (4, 16))
    for used in (0, 1):
        gradients = []
        for kernels in KERNELS:
            leaf = x.clone().requires_grad_()
            add_rms_norm(leaf, r, torch.ones(16), EPS, kernels)[used].cos().sum().backward()
            gradients.append(leaf.grad)
        assert_close(gradients[0], gradients[1].double())


@each_dtype
@each_kernel
@pytest.mark.parametrize(
    ("s", "b", "q_heads", "k_heads", "width", "apart"),
    [
        *((5, 2, 4, 2, 8, False), (5, 2, 4, 2, 8, True), (3, 1, 1, 1, 2, True)),
        *((4, 2, 3, 1, 20, False), (4, 2, 3, 1, 20, True), (0, 2, 4, 4, 8, False)),
    ],
)
def test_rotary(s, b, q_heads, k_heads, width, kernels, dtype, apart):
    """Also if each sequence has positions of its own."""
    together = torch.arange(s).unsqueeze(1)
    positions = torch.arange(s * b).view(s, b) * 37 if apart else together
    cos, sin = rotary_angles(positions, Rotary(width, 10000.0), dtype)
    turn = torch.complex(cos.double(), sin.double())

    def exact(*heads):
        turned = [torch.complex(*x.chunk(2, dim=-1)) * turn for x in heads]
        return [torch.cat((z.real, z.imag), dim=-1) for z in turned]

    inputs = tensors(dtype, (s, b, q_heads, width), (s, b, k_heads, width))
    before = [x.clone() for x in inputs]
    compare(lambda q, k: rotate(q, k, cos, sin, kernels), exact, inputs)
    assert all(map(torch.equal, inputs, before))
    with torch.no_grad():  # then in place, by the kernel
        turned = rotate(*inputs, cos, sin, kernels)
    assert (turned[0].data_ptr() == inputs[0].data_ptr()) == (kernels == "triton" or s == 0)
    for found, right in zip(turned, exact(*(x.double() for x in before)), strict=True):
        assert_close(found, right)


@each_dtype
@each_kernel
@pytest.mark.parametrize(
    ("shape", "weighted"),
    [
        *(((5, 2, 499), False), ((1, 1), False), ((3, 7), False), ((0, 4), False)),
        *(((2, 2499), True), ((1, 1), True), ((3, 7), True), ((0, 4), True)),
    ],
    ids=str,
)
def test_swiglu(shape, weighted, kernels, dtype):
    if kernels == "torch" and dtype == torch.bfloat16:
        pytest.skip("PyTorch's silu rounds before the product")
    operation = weighted_swiglu if weighted else swiglu
    gate, up = tensors(dtype, shape, shape)
    weights = [randn(shape[0], dtype=exact(dtype), seed=2)] * weighted
    inputs = gate * 5, up, *weights
    compare(lambda *given: (operation(*given, kernels),), exact_swiglu, inputs)


def test_swiglu_far_out():
    """SwiGLU is exact for gates of ±1e4, although exp(1e4) overflows."""
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4]).requires_grad_()
    y = swiglu(gate, torch.ones(5), "triton")
    y.sum().backward()
    assert torch.equal(y.detach(), torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))
    assert torch.equal(gate.grad, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


VIEWS = {
    "every other row": lambda wide: wide[::2, :32],
    "every other column": lambda wide: wide[:, ::2],
    "transposed": lambda wide: wide.view(64, 10)[:32].T,
    "expanded": lambda wide: wide[:1, :32].expand(10, 32),
}


@each_dtype
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_of_any_strides(view, dtype):
    """Also a gradient that is one expanded number."""
    wide, w = tensors(dtype, (10, 64), (32,))
    x = VIEWS[view](wide)
    other = x.flip(0)
    compare(triton_rms_norm, exact_rms_norm, (x, w))
    compare(lambda g, u: (swiglu(g, u, "triton"),), exact_swiglu, (x, other))
    found, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    swiglu(found, other, "triton").sum().backward()
    swiglu(exact, other.double(), "torch").sum().backward()
    assert_close(found.grad, exact.grad)


@each_dtype
@each_kernel
@pytest.mark.parametrize(
    ("s", "b", "heads", "width", "apart"),
    [(5, 2, 4, 8, True), (300, 1, 3, 24, False), (3, 1, 1, 2, True), (0, 2, 4, 8, False)],
)
def test_norm_and_rotary(s, b, heads, width, apart, kernels, dtype):
    """Also of gradients with the strides that attention returns. (Without kernels, bfloat16 is
    rounded in between.)"""
    positions = torch.arange(s * b).view(s, b) * 37 if apart else torch.arange(s).unsqueeze(1)
    cos, sin = rotary_angles(positions, Rotary(width, 10000.0), dtype)
    turn = torch.complex(cos.double(), sin.double())

    def exact(*inputs):
        normal = [exact_rms_norm(x, w)[0] for x, w in (inputs[:2], inputs[2:])]
        turned = [torch.complex(*x.chunk(2, dim=-1)) * turn for x in normal]
        return [torch.cat((z.real, z.imag), dim=-1).permute(1, 2, 0, 3) for z in turned]

    def ours(q, q_weight, k, k_weight):
        norms = (q_weight, TO_AUTOGRAD), (k_weight, TO_AUTOGRAD)
        return [x.permute(1, 2, 0, 3) for x in norm_rotate(q, k, norms, EPS, cos, sin, kernels)]

    if kernels == "torch" and dtype == torch.bfloat16:
        pytest.skip("rounded between the two operations")
    shapes = (s, b, heads, width), (width,), (s, b, 1, width), (width,)
    compare(ours, exact, tensors(dtype, *shapes), terms=float(width == 2))


@each_dtype
def test_rotary_of_strides_that_attention_returns(dtype):
    """[S, B, H, E] with the strides of the gradients of attention's backward."""
    q = randn(2, 3, 5, 8, dtype=dtype).permute(2, 0, 1, 3)
    angles = rotary_angles(torch.arange(5).unsqueeze(1), Rotary(8, 10000.0), dtype)
    for back in (False, True):
        turned, _ = torch.ops.lattice.rotate(q, q, *angles, back)
        again, _ = torch.ops.lattice.rotate(q.contiguous(), q.contiguous(), *angles, back)
        assert torch.equal(turned, again)


def test_rotary_of_heads_far_apart():
    """The third of q's heads begins 2^31 numbers after the first."""
    memory = torch.empty(2**32 + 8, dtype=torch.bfloat16)  # of which few pages are touched
    q = memory.as_strided((1, 1, 3, 8), (8, 8, 2**30, 1), 2**31)
    q.copy_(randn(1, 1, 3, 8, dtype=torch.bfloat16))
    cos, sin = rotary_angles(torch.ones(1, 1), Rotary(8, 10000.0), torch.bfloat16)
    right, k = torch.ops.lattice.rotate(q.contiguous(), q.contiguous(), cos, sin, False)
    torch.ops.lattice.rotate_(q, k, cos, sin)
    assert torch.equal(q, right)


def exact_loss(z, targets, z_loss=0.0, scale=1.0):
    """The loss summed over target tokens, and its gradient times `scale`, computed by PyTorch."""
    z, counted = z.double().requires_grad_(), targets != IGNORE
    loss = F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="sum")
    loss = loss + z_loss * (z.logsumexp(-1).square() * counted).sum()
    (scale * loss).backward()
    return loss.item(), z.grad


def whole_loss(z, targets, first_rows, z_loss, scale, kernels):
    """Loss and gradient for logits whose columns are split at `first_rows`, computed as by one rank
    per part."""
    shards = [z[:, a:b].clone() for a, b in pairwise([*first_rows, z.shape[1]])]
    parts = list(zip(shards, first_rows, strict=True))
    row = merge(torch.stack([statistics(s, targets, first, kernels) for s, first in parts]))
    for shard, first in parts:
        gradient_over_logits_(shard, targets, row, torch.tensor(scale), first, z_loss, kernels)
    return token_losses(row, targets, z_loss).sum(), torch.cat(shards, dim=1)


@each_dtype
@each_kernel
@pytest.mark.parametrize(
    ("tokens", "vocab", "first_rows", "z_loss"),
    [
        *((6, 1, [0], 0.0), (5, 97, [0], 0.0), (5, 97, [0, 33, 66], 0.0), (3, 9001, [0], 0.0)),
        *((5, 97, [0], 1e-2), (5, 97, [0, 33, 66], 1e-2)),
        *((4, 3, [0, 1, 2], 1e-2), (0, 8, [0, 4], 1e-2)),
    ],
)
def test_cross_entropy(tokens, vocab, first_rows, z_loss, kernels, dtype):
    z = randn(tokens, vocab, dtype=dtype) * 3
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(vocab, (tokens,), generator=generator, device="cpu").to(DEVICE)
    targets[1:2] = IGNORE
    loss, gradient = whole_loss(z, targets, first_rows, z_loss, 0.25, kernels)
    exact, exact_gradient = exact_loss(z, targets, z_loss, 0.25)
    bound = 1e-14 if dtype == torch.float64 else 2e-6
    assert loss.item() == pytest.approx(exact, rel=bound, abs=1e-9)
    assert_close(gradient, exact_gradient)
    assert not gradient[1:2].any()


@each_kernel
def test_cross_entropy_far_out(kernels):
    """Loss and gradient are right for logits of ±1e4, for a row with all columns of one rank masked
    out, and for a row without a target and without a finite logit."""
    z = randn(6, 40, dtype=torch.float32)
    z[0] *= 1e4
    z[1], z[1, 7] = -1e4, 1e4
    z[2, :20] = -torch.inf
    z[3] = 1e4
    z[4], z[4, 5], z[4, 25] = -torch.inf, torch.inf, torch.nan
    z[5, 3] = -1e4
    targets = torch.tensor([int(z[0].argmax()), 8, 30, 0, IGNORE, 3])
    loss, gradient = whole_loss(z, targets, [0, 20], 0.0, 1.0, kernels)
    counted = [0, 1, 2, 3, 5]
    exact, exact_gradient = exact_loss(z[counted], targets[counted])
    assert loss.item() == pytest.approx(exact, rel=2e-6)
    assert_close(gradient[counted], exact_gradient)
    assert not gradient[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_operations_keep_the_library_contract(dtype):
    """Every operation passes torch's checks of its schema, fake tensors and ahead-of-time
    autograd, on which the compiler and checkpointing rely."""
    # the last two, which are slow, for one dtype
    some = {} if dtype == torch.bfloat16 else {"test_utils": ["test_schema", "test_faketensor"]}
    with Operators() as seen, patch.multiple(specimens, TOKENS=8, ROWS=16):
        for name in ("norm", "norm_of_sum", "gate", "weighted_gate", "rows", "loss"):
            getattr(specimens, name)(16, dtype)
        for name in ("gradients", "hash_bits", "update"):
            getattr(specimens, name)(dtype)
        specimens.rotary(2, 1, 8, dtype)
        specimens.norm_and_rotary(2, 8, dtype)
        specimens.experts(16, 16, exact(dtype), 1)
        ends = torch.tensor([5, 5, 8], dtype=torch.int32)
        weight = torch.ones(3, 20, 16, dtype=dtype)  # rows of y with 40 bytes in bfloat16
        grouped_mm(torch.ones(8, 16, dtype=dtype), weight.transpose(1, 2), ends)
    text = "".join(file.read_text() for file in (ROOT / "model/kernels").glob("*.py"))
    called = [each for each in zip(seen.found, seen.arguments, strict=True)
              if each[0].namespace == "lattice"]  # fmt: skip
    assert {op.name() for op, _ in called} == {*re.findall(r'"(lattice::\w+)"', text)}
    for op, arguments in called:
        detached = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
        torch.library.opcheck(op, detached, **some)


def omitted_eps():
    x, w = randn(5, 64, dtype=torch.float32) * 1e-2, torch.ones(64)
    compare(lambda x, w: (rms_norm(x, w, 0.0, "triton"),), exact_rms_norm, (x, w))


def one_column_off():
    z, targets = randn(5, 31, dtype=torch.float32), torch.arange(5)
    wrong = whole_loss(z, targets + 1, [0], 0.0, 1.0, "triton")[1]
    assert_close(wrong, exact_loss(z, targets)[1])


def truncated_to_bfloat16():
    _, exact = exact_loss(randn(5, 31, dtype=torch.float32), torch.arange(5))
    truncated = (exact.float().view(torch.int32) & -65536).view(torch.float32).bfloat16()
    assert_close(truncated, exact)


@pytest.mark.parametrize("mistake", [omitted_eps, one_column_off, truncated_to_bfloat16])
def test_a_mistake_is_caught(mistake):
    with pytest.raises(AssertionError, match=r"\d > \d"):
        mistake()
