"""Grouped matrix products: each expert's rows times its own matrix, in one operation.

    y[rows of expert e] = x[rows of expert e] · b[e]           x [R, N], b [X, N, M] → y [R, M]
    dw[e] = dy[rows of e]ᵀ · x[rows of e]                      dy [R, M], x [R, N] → dw [X, M, N]

An expert may have any number of rows, or none; its dw is then zero. The experts' rows follow each
other; `offsets` (int32, on the device) are their ends, and `sizes` their numbers, for the host.

torch's `grouped_mm` computes all experts in one launch, for 16-bit and float32 factors whose rows
begin at multiples of 16 bytes. On a GPU it is used only where torch has a kernel, for bfloat16 from
compute capability 9 on: elsewhere the host would wait for `offsets`. For all else (float64) there
is a loop over the experts with the same result. Both are behind one operator each, so that a
recording of operations sees one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

ALIGNMENT = 16  # bytes, of grouped_mm


def _by_torch(*factors: Tensor) -> bool:
    """Whether torch's grouped_mm takes these factors."""
    return (
        all(
            each.dtype in (torch.bfloat16, torch.float16, torch.float32)
            and each.data_ptr() % ALIGNMENT == 0
            and all(s == 1 or s * each.element_size() % ALIGNMENT == 0 for s in each.stride())
            for each in factors
        )
        and all(each.numel() for each in factors)
        and (not factors[0].is_cuda or _gpu_has_kernel(factors[0]))
    )


def _gpu_has_kernel(x: Tensor) -> bool:
    """Whether torch has a kernel: those of its grouped_mm are for Hopper and Blackwell."""
    newer = torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return newer and x.dtype == torch.bfloat16


@torch.library.custom_op("lattice::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, b: Tensor, offsets: Tensor, sizes: Sequence[int]) -> Tensor:
    """y [R, M] = x [R, N] · b [X, N, M], each expert's rows times its matrix."""
    if _by_torch(x, b):
        return functional.grouped_mm(x, b, offs=offsets)
    y = x.new_empty((x.shape[0], b.shape[2]))
    for rows, matrix, out in zip(x.split(list(sizes)), b, y.split(list(sizes)), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


@grouped_mm.register_fake
def _(x: Tensor, b: Tensor, offsets: Tensor, sizes: Sequence[int]) -> Tensor:
    return x.new_empty((x.shape[0], b.shape[2]))


@torch.library.custom_op("lattice::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int]) -> Tensor:
    """dw [X, M, N] = dyᵀ · x over the rows of each expert, for dy [R, M] and x [R, N]."""
    if _by_torch(dy, x):
        dw: Tensor = functional.grouped_mm(dy.t(), x, offs=offsets)
        for expert, size in enumerate(sizes):
            if size == 0:  # some GPU kernels leave it unwritten (pytorch issue 172439)
                dw[expert].zero_()
        return dw
    dw = dy.new_empty((len(sizes), dy.shape[1], x.shape[1]))
    for dy_rows, rows, out in zip(dy.split(list(sizes)), x.split(list(sizes)), dw, strict=True):
        torch.mm(dy_rows.t(), rows, out=out)
    return dw


@grouped_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, offsets: Tensor, sizes: Sequence[int]) -> Tensor:
    return dy.new_empty((len(sizes), dy.shape[1], x.shape[1]))


@torch.library.custom_op("lattice::add_grouped_weight_gradient", mutates_args=("into",))
def add_grouped_weight_gradient(
    into: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], beta: int
) -> None:
    """into [X, M, N] = beta · into + dyᵀ · x over the rows of each expert, summed in the dtype of
    `into`, which may be wider than that of dy [R, M] and x [R, N]. With beta 0 the values of
    `into` are not read. (grouped_mm cannot add: one product for each expert.)"""
    wide = into.dtype != dy.dtype
    in_product = wide and dy.is_cuda and torch.version.hip is None
    if wide and not in_product:  # CPUs and AMD's libraries have no such product
        dy, x = dy.to(into.dtype), x.to(into.dtype)
    for dy_rows, rows, out in zip(dy.split(list(sizes)), x.split(list(sizes)), into, strict=True):
        if in_product:
            torch.addmm(out, dy_rows.t(), rows, out_dtype=into.dtype, beta=beta, out=out)
        else:
            out.addmm_(dy_rows.t(), rows, beta=beta)


@add_grouped_weight_gradient.register_fake
def _(into: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], beta: int) -> None:
    pass
