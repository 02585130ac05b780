"""Grouped products, of torch's operation and of the loop, compared with one product per expert in
float64; with experts that have no rows."""

import pytest
import torch
from torch import Tensor

from model.kernels import grouped_matmul
from model.kernels.grouped_matmul import (
    add_grouped_weight_gradient,
    grouped_mm,
    grouped_weight_gradient,
)

N, M = 24, 40
SIZES = [
    [5, 3, 8],
    [0, 16, 0],  # all rows to one expert
    [1, 0, 0, 7],
    [0, 0],  # a rank that receives nothing
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def randn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def products(x: Tensor, b: Tensor, sizes: list[int]) -> Tensor:
    """The definition, in float64."""
    parts = zip(x.double().split(sizes), b.double(), strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def gradients(dy: Tensor, x: Tensor, sizes: list[int]) -> Tensor:
    parts = zip(dy.double().split(sizes), x.double().split(sizes), strict=True)
    return torch.stack([dy_rows.t() @ rows for dy_rows, rows in parts])


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == exact.shape
    if exact.numel():
        assert (found.double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["dx", "y"])
def test_rows_times_their_own_matrix(sizes, dtype, transposed):
    rows = sum(sizes)
    x, b = randn(rows, N, dtype=dtype, seed=0), randn(len(sizes), N, M, dtype=dtype, seed=1)
    if transposed:  # as in forward, where the weight is [X, out, in]
        b = b.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(grouped_mm(x, b, ends(sizes), sizes), products(x, b, sizes), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_weight_gradient_of_each_expert(sizes, dtype):
    dy = randn(sum(sizes), M, dtype=dtype, seed=2)
    x = randn(sum(sizes), N, dtype=dtype, seed=3)
    dw = grouped_weight_gradient(dy, x, ends(sizes), sizes)
    assert_close(dw, gradients(dy, x, sizes), dtype)
    assert all(not dw[e].any() for e, size in enumerate(sizes) if size == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_weight_gradients_are_added_in_a_wider_dtype(sizes, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    into = torch.full((len(sizes), M, N), torch.nan, dtype=wide)
    exact = torch.zeros(len(sizes), M, N, dtype=torch.float64)
    for micro_batch in range(2):  # beta 0 must not read what is there
        dy = randn(sum(sizes), M, dtype=dtype, seed=micro_batch)
        x = randn(sum(sizes), N, dtype=dtype, seed=7 + micro_batch)
        add_grouped_weight_gradient(into, dy, x, sizes, min(micro_batch, 1))
        exact += gradients(dy, x, sizes)
    assert_close(into, exact, wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [N, N + 1])
def test_rows_that_are_not_aligned_take_the_loop(dtype, width, monkeypatch):
    calls = []
    honest = torch.nn.functional.grouped_mm
    monkeypatch.setattr(
        grouped_matmul.functional,
        "grouped_mm",
        lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs),
    )
    sizes = [5, 3, 8]
    x, b = randn(16, width, dtype=dtype, seed=0), randn(3, width, M, dtype=dtype, seed=1)
    assert_close(grouped_mm(x, b, ends(sizes), sizes), products(x, b, sizes), dtype)
    assert bool(calls) == (width == N)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_operators_agree_with_their_declarations(sizes):
    """Shapes without data, and which arguments are modified (torch.library.opcheck)."""
    rows, checks = sum(sizes), ["test_schema", "test_faketensor"]
    x = randn(rows, N, dtype=torch.float64, seed=0)
    dy, b = randn(rows, M, dtype=torch.float64, seed=1), torch.ones(len(sizes), N, M).double()
    into = torch.zeros(len(sizes), M, N, dtype=torch.float64)
    for operator, args in (
        (grouped_mm, (x, b, ends(sizes), sizes)),
        (grouped_weight_gradient, (dy, x, ends(sizes), sizes)),
        (add_grouped_weight_gradient, (into, dy, x, sizes, 1)),
    ):
        torch.library.opcheck(operator, args, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype):
    """Experts without rows have no gradient there either, and the host does not wait."""
    sizes = [162, 0, 2577, 0]
    x, dy = (randn(sum(sizes), 64, dtype=dtype, seed=seed) for seed in (0, 1))
    b = randn(4, 64, 64, dtype=dtype, seed=2)
    on = [t.cuda() for t in (x, b, dy, ends(sizes))]
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = grouped_mm(on[0], on[1], on[3], sizes)
        dw = grouped_weight_gradient(on[2], on[0], on[3], sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(y.cpu(), products(x, b, sizes), dtype)
    assert_close(dw.cpu(), gradients(dy, x, sizes), dtype)
    assert not dw[1].any()
    assert not dw[3].any()
