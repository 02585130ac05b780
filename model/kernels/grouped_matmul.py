"""Grouped matrix products: each expert's rows times its own matrix, in one operation.

    y[rows of expert e] = x[rows of expert e] · b[e]           x [R, N], b [X, N, M] → y [R, M]
    dw[e] += dy[rows of e]ᵀ · x[rows of e]                     dy [R, M], x [R, N] → dw [X, M, N]

An expert may have any number of rows, or none. The experts' rows follow each other, and `ends`
(int32 [X], on the device) says where they end.

For y, torch's `grouped_mm` computes all experts in one launch, for 16-bit and float32 factors whose
rows begin at multiples of 16 bytes; on a GPU only where torch has a kernel, for bfloat16 on compute
capabilities 9 and 10. It cannot add to a sum in float32; for 16-bit factors whose widths 16 divides
the kernel here does, also in one launch: with a product for each of 128 experts, the host could not
launch as fast as a GPU multiplies. For all else (float64, older GPUs) there is a loop over the
experts with the same result, for which the host waits for `ends`. Each of the two formulas is one
operator, so that a recording of operations sees one.

The kernel: a program has a tile of one expert's dw. It goes through the expert's rows, and in the
end adds to the tile once. The programs of an expert follow each other, so that its rows are read
from the L2 cache.
"""

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels import backend
from model.kernels.backend import cdiv, jit, on_nvidia, rows_of, tl, use_triton

ALIGNMENT = 16  # bytes, of grouped_mm
SIDES = 128, 256  # of a program's tile of dw
ROWS = 64  # of an expert at once
WARPS = 8


def _by_torch(*factors: Tensor) -> bool:
    """Whether torch's grouped_mm takes these factors."""
    return (
        all(
            each.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and each.data_ptr() % ALIGNMENT == 0
            and all(s == 1 or s * each.element_size() % ALIGNMENT == 0 for s in each.stride())
            and min(each.shape[-2:]) > 1  # of a single column, rows have the stride 1, too
            for each in factors
        )
        and all(each.numel() for each in factors)
        and (not factors[0].is_cuda or _gpu_has_kernel(factors[0]))
    )


def _gpu_has_kernel(x: Tensor) -> bool:
    """Whether torch has a kernel: those of its grouped_mm are for Hopper and Blackwell."""
    newer = torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return newer and x.dtype == torch.bfloat16


def stages() -> int:
    """How many blocks of rows are on their way at once: as many as fit into shared memory, of which
    AMD's GPUs have 64 KiB."""
    return 3 if backend.LANES == 32 else 2


def sizes_of(ends: Tensor) -> list[int]:
    """The number of each expert's rows. The host waits for the device."""
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


@torch.library.custom_op("lattice::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """y [R, M] = x [R, N] · b [X, N, M], each expert's rows times its matrix."""
    if _by_torch(x, b):
        # torch pads y's rows to 16 bytes, which the fake implementation does not
        return functional.grouped_mm(x, b, offs=ends).contiguous()
    y, sizes = x.new_empty((x.shape[0], b.shape[2])), sizes_of(ends)
    for rows, matrix, out in zip(x.split(sizes), b, y.split(sizes), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


@grouped_mm.register_fake
def _(x: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], b.shape[2]))


def has_kernel(dy: Tensor, x: Tensor, kernels: str) -> bool:
    """Whether the kernel sums the weight gradient, with `model.kernels`. It reads 16 bytes at a
    time, and Triton uses the tensor cores of NVIDIA's GPUs from compute capability 8 on."""
    aligned = dy.shape[1] % 16 == x.shape[1] % 16 == 0
    if dy.element_size() != 2 or not aligned or not use_triton(dy, kernels):
        return False
    return not on_nvidia(dy) or torch.cuda.get_device_capability(dy.device)[0] >= 8


@torch.library.custom_op("lattice::add_grouped_weight_gradient", mutates_args=("into",))
def add_grouped_weight_gradient(
    into: Tensor, dy: Tensor, x: Tensor, ends: Tensor, beta: int, kernels: str
) -> None:
    """into [X, M, N] = beta · into + dyᵀ · x over the rows of each expert, summed in the dtype of
    `into`, which may be wider than that of dy [R, M] and x [R, N]. With beta 0 the values of
    `into` are not read."""
    if has_kernel(dy, x, kernels):
        dy, x = rows_of(dy), x.contiguous()
        experts, m, n = into.shape
        _add_weight_gradient[(cdiv(m, SIDES[0]) * cdiv(n, SIDES[1]), experts)](
            dy, x, ends, into, m, n, dy.stride(0), ADD=beta == 1, SIDE_M=SIDES[0],
            SIDE_N=SIDES[1], ROWS=ROWS, num_warps=WARPS, num_stages=stages(),
        )  # fmt: skip
        return
    wide, sizes = into.dtype != dy.dtype, sizes_of(ends)
    in_product = wide and on_nvidia(dy)
    if wide and not in_product:  # CPUs and AMD's libraries have no such product
        dy, x = dy.to(into.dtype), x.to(into.dtype)
    for dy_rows, rows, out in zip(dy.split(sizes), x.split(sizes), into, strict=True):
        if in_product:
            torch.addmm(out, dy_rows.t(), rows, out_dtype=into.dtype, beta=beta, out=out)
        else:
            out.addmm_(dy_rows.t(), rows, beta=beta)


@jit
def _add_weight_gradient(
    DY, X, ENDS, DW, m, n, between, ADD: tl.constexpr, SIDE_M: tl.constexpr, SIDE_N: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    across = tl.cdiv(n, SIDE_N)
    i = tl.program_id(0) // across * SIDE_M + tl.arange(0, SIDE_M)
    left = tl.program_id(0) % across * SIDE_N
    j = left + tl.arange(0, SIDE_N)
    begin = tl.load(ENDS + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ENDS + expert)
    dw = tl.zeros((SIDE_M, SIDE_N), tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside, start = row < end, row.to(tl.int64)
        dy = tl.load(DY + start * between + i[None, :], mask=inside & (i < m)[None, :], other=0.0)
        x = tl.load(X + start * n + j[None, :], mask=inside & (j < n)[None, :], other=0.0)
        dw = tl.dot(tl.trans(dy), x, dw)
    # in two halves, because the sum so far would not fit into registers beside the whole tile
    halves = tl.split(tl.permute(tl.reshape(dw, (SIDE_M, 2, SIDE_N // 2)), (0, 2, 1)))
    for part in tl.static_range(2):
        j = left + part * (SIDE_N // 2) + tl.arange(0, SIDE_N // 2)
        place = DW + (expert.to(tl.int64) * m + i[:, None]) * n + j[None, :]
        within = (i < m)[:, None] & (j < n)[None, :]
        total = halves[part]
        if ADD:
            total += tl.load(place, mask=within, other=0.0).to(tl.float32)
        tl.store(place, total.to(DW.dtype.element_ty), mask=within)
