"""The three products of a linear layer. The model gives each linear layer its own object, so other
arithmetic (fp8, with its scales) can be added as another class here, and the model chooses which
layers use it."""

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.backend import on_nvidia, rows_of
from model.kernels.grouped_matmul import add_grouped_weight_gradient, grouped_mm


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b of matrices of one dtype, summed and returned in `dtype`, which may be wider. (On
    NVIDIA's GPUs the product of widened factors, which is the same, would do without tensor
    cores.)"""
    if a.dtype != dtype and on_nvidia(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class Matmul:
    """Computes `LinearProducts` in the dtype of their arguments."""

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return functional.linear(x, weight)
        torch.mm(x.flatten(0, -2), weight.t(), out=out.view(-1, out.shape[-1]))
        return out

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """A sum in `into` is rounded to its dtype before each product: for three products in
        bfloat16 the relative error is 2.3e-3 instead of 1.7e-3, and the sum over 8 tp ranks in
        bfloat16 makes it 4.4e-3 instead of 4.0e-3. A float32 sum would move 2.6 times the bytes."""
        if out is not None:
            torch.mm(dy.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
            return out
        if into is None:
            return dy @ weight
        into.view(-1, into.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return into

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        wide, beta = dy.dtype != dtype, 1
        if into is None:
            into = dy.new_empty((dy.shape[1], x.shape[1]), dtype=dtype)
            beta = 0  # the uninitialised values are not read
        if wide and on_nvidia(dy):
            return torch.addmm(into, dy.t(), x, out_dtype=dtype, beta=beta, out=into)
        if wide:  # CPUs and AMD's libraries have no such product
            dy, x = dy.to(dtype), x.to(dtype)
        return into.addmm_(dy.t(), x, beta=beta)


class OneExpert(Matmul):
    """`LinearProducts` of a rank's only expert, for weights [1, F, D]: all rows are its own."""

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        # written: selective checkpointing would keep what `mm` returns, as `kept` already does
        out = x.new_empty((len(x), weight.shape[1])) if out is None else out
        return super().forward(x, weight[0], out)

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return super().input_gradient(dy, weight[0], into, out)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return super().weight_gradient(dy, x).unsqueeze(0)

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        total = super().add_weight_gradient(dy, x, None if into is None else into[0], dtype)
        return total.unsqueeze(0) if into is None else into


class GroupedMatmul:
    """`LinearProducts` of all experts of a layer, for weights [X, F, D]: each with its own rows of
    x [R, D] and dy [R, F], which end at `ends` (int32 [X])."""

    def __init__(self, ends: Tensor, kernels: str) -> None:
        self.ends, self.kernels = ends, kernels

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        assert out is None
        return grouped_mm(x.contiguous(), weight.transpose(1, 2), self.ends)

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert out is None
        dx = grouped_mm(rows_of(dy), weight, self.ends)
        return dx if into is None else into.add_(dx)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        return self.add_weight_gradient(dy, x, None, dy.dtype)

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        beta = 1
        if into is None:
            into = dy.new_empty((len(self.ends), dy.shape[1], x.shape[1]), dtype=dtype)
            beta = 0  # the uninitialised values are not read
        add_grouped_weight_gradient(into, dy, x, self.ends, beta, self.kernels)
        return into
