"""Grouped products, of torch's operation, of the kernel and of the loop, compared with one product
per expert in float64, with experts that have no rows; and the sum of each token's rows."""

import pytest
import torch
from torch import Tensor

from model.kernels import grouped_matmul
from model.kernels.grouped_matmul import SIDES, add_grouped_weight_gradient, grouped_mm
from model.kernels.token_rows import spread_rows, sum_rows
from model.matmul import GroupedMatmul, OneExpert
from parallel.activation import PRODUCTS
from tests.counting import Operators
from tests.kernels.device import DEVICE, DTYPES, KERNELS, NEEDS_TRITON, randn

N, M = 48, 32
SIZES = [
    [5, 3, 8],
    [0, 16, 0],  # all rows to one expert
    [1, 0, 0, 7],
    [0, 0],  # a rank that receives nothing
]
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}
each_dtype = pytest.mark.parametrize("dtype", ROUNDING, ids=str)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def factors(sizes: list[int], dtype: torch.dtype, n: int = N, m: int = M) -> tuple[Tensor, ...]:
    """x [R, N], dy [R, M], a matrix [N, M] for each expert, and where the experts' rows end."""
    shapes = (sum(sizes), n), (sum(sizes), m), (len(sizes), n, m)
    x, dy, b = (randn(*shape, dtype=dtype, seed=seed).cpu() for seed, shape in enumerate(shapes))
    return x, dy, b, torch.tensor(sizes).cumsum(0).to(torch.int32)


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


@each_dtype
@each_size
@pytest.mark.parametrize("width", [N, N + 1])
def test_products_of_each_expert(sizes, dtype, width):
    x, _, b, ends = factors(sizes, dtype, n=width)
    aligned = width == N and dtype != torch.float64 and sum(sizes) > 0
    assert grouped_matmul._by_torch(x, b) == aligned  # all else takes the loop
    assert_close(grouped_mm(x, b, ends), products(x, b, sizes), dtype)
    wide = torch.cat([x.new_full((len(x), 64), torch.nan), x], 1)
    assert_close(grouped_mm(wide[:, 64:], b, ends), products(x, b, sizes), dtype)
    # as in forward, where the weight is [X, out, in]
    b = b.transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(grouped_mm(x, b, ends), products(x, b, sizes), dtype)


@each_dtype
@each_size
@pytest.mark.parametrize("kernels", KERNELS)
def test_weight_gradients_are_added_in_a_wider_dtype(sizes, dtype, kernels):
    wide = torch.promote_types(dtype, torch.float32)
    into = torch.full((len(sizes), M, N), torch.nan, dtype=wide, device=DEVICE)
    x, dy, _, ends = (t.to(DEVICE) for t in factors(sizes, dtype))
    for beta in (0, 1):  # beta 0 must not read what is there
        add_grouped_weight_gradient(into, dy * (1 + beta), x, ends, beta, kernels)
    assert_close(into, 3 * gradients(dy, x, sizes), wide)


@NEEDS_TRITON
@pytest.mark.parametrize("total", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_of_several_tiles(total):
    """Tiles with edges inside and blocks of rows with ends inside, of a dy that is a part of wider
    rows; in Triton's interpreter, too, 16-bit factors are summed in float32 and rounded once."""
    sizes, m, n = [100, 0, 64, 7], SIDES[0] + 32, SIDES[1] + 16
    x, dy, _, ends = (t.to(DEVICE) for t in factors(sizes, torch.bfloat16, n, m))
    dy = torch.cat([dy.new_full(dy.shape, torch.nan), dy], 1).chunk(2, 1)[1]
    into = randn(len(sizes), m, n, dtype=total, seed=9)
    exact = into.double() + gradients(dy, x, sizes)
    add_grouped_weight_gradient(into, dy, x, ends, 1, "triton")
    assert_close(into, exact, total)
    shifted = torch.roll(ends, 1)  # control: the rows of another expert
    add_grouped_weight_gradient(into, dy, x, shifted, 0, "triton")
    assert (into.double() - gradients(dy, x, sizes)).abs().max() > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("tokens", "k", "width"), [(5, 3, 40), (3, 1, 2056), (0, 2, 8)])
def test_from_tokens_to_rows_and_back(tokens, k, width, kernels, dtype):
    x = randn(tokens * k, width, dtype=dtype)
    places = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    exact = x.double()[places].view(tokens, k, width).sum(1)
    y = sum_rows(x, places, k, kernels)
    assert_close(y, exact, dtype)
    if tokens:  # control: a row that is summed twice
        twice = torch.cat([places[:1], places[:1], places[2:]])
        assert (sum_rows(x, twice, k, kernels).double() - exact).abs().max() > 0.1
    spread = spread_rows(y, places.argsort(), places, k, kernels)
    assert torch.equal(spread[places].view(tokens, k, width), y.unsqueeze(1).expand(-1, k, -1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_rank_s_only_expert(dtype):
    """Its products are those of groups. Selective checkpointing does not keep them, as it keeps no
    grouped product: `down`'s is not needed again, and `kept` keeps the others."""
    x, dy, _, ends = (t.to(DEVICE) for t in factors([9], dtype))
    weight, into = randn(1, M, N, dtype=dtype), randn(9, N, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    results = []
    for products in (OneExpert(), GroupedMatmul(ends, "torch")):
        with Operators() as seen:
            results.append([products.forward(x, weight)])
        assert not PRODUCTS & {*seen.found}
        total = products.add_weight_gradient(dy, x, None, wide)
        results[-1] += [
            products.input_gradient(dy, weight), products.input_gradient(dy, weight, into.clone()),
            products.weight_gradient(dy, x), products.add_weight_gradient(dy, x, total, wide),
        ]  # fmt: skip
    for found, exact in zip(*results, strict=True):
        assert_close(found, exact.double(), exact.dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_dtype
def test_on_a_gpu(dtype):
    """Experts without rows have no gradient there either, and where there are kernels, the host
    does not wait."""
    sizes, wide = [162, 0, 2577, 0], torch.promote_types(dtype, torch.float32)
    on_cpu = x, dy, b, _ = factors(sizes, dtype, 64, 64)
    on_gpu = [t.cuda() for t in on_cpu]
    dw = torch.full((4, 64, 64), torch.nan, device="cuda", dtype=wide)
    torch.cuda.set_sync_debug_mode("error" if dtype == torch.bfloat16 else "default")
    try:
        y = grouped_mm(on_gpu[0], *on_gpu[2:])
        add_grouped_weight_gradient(dw, on_gpu[1], on_gpu[0], on_gpu[3], 0, "auto")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(y.cpu(), products(x, b, sizes), dtype)
    exact = gradients(dy, x, sizes)
    # tensor cores truncate as they add
    bound = 1e-5 if dtype == torch.bfloat16 else ROUNDING[dtype]
    assert (dw.cpu() - exact).abs().max() <= bound * exact.abs().max()
    assert not dw[1].any()
    assert not dw[3].any()
