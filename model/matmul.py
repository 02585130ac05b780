"""The three products of a linear layer. The model gives each linear layer its own object, so other
arithmetic (fp8, with its scales) can be added as another class here, and the model chooses which
layers use it."""

import torch
from torch import Tensor
from torch.nn import functional

from model.kernels.backend import on_nvidia
from model.kernels.grouped_matmul import add_grouped_weight_gradient, grouped_mm


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a · b of matrices of one dtype, summed and returned in `dtype`, which may be wider. (On
    NVIDIA's GPUs the product of widened factors, which is the same, would do without tensor
    cores.)"""
    if a.dtype != dtype and on_nvidia(a):
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


class Matmul:
    """Computes the products in the dtype of their arguments."""

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """y [..., F] = x [..., D] · weightᵀ, weight [F, D]; written to `out`, which is contiguous,
        if given (if y is computed piece by piece)."""
        if out is None:
            return functional.linear(x, weight)
        torch.mm(x.flatten(0, -2), weight.t(), out=out.view(-1, out.shape[-1]))
        return out

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """dx [..., D] = dy [..., F] · weight; added to `into` if given (if several layers read the
        same input), or written to `out`, which is contiguous (if dx is computed piece by piece).

        The sum so far is rounded to its dtype before each product: for three products in bfloat16
        the relative error is 2.3e-3 instead of 1.7e-3, and the sum over 8 tp ranks in bfloat16
        makes it 4.4e-3 instead of 4.0e-3. A float32 sum would move 2.6 times the bytes."""
        if out is not None:
            torch.mm(dy.flatten(0, -2), weight, out=out.view(-1, out.shape[-1]))
            return out
        if into is None:
            return dy @ weight
        into.view(-1, into.shape[-1]).addmm_(dy.reshape(-1, dy.shape[-1]), weight)
        return into

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw [F, D] = dyᵀ · x, summed over all leading dimensions."""
        return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """dw [F, D] = into + dyᵀ · x, for dy [..., F] and x [..., D], written into `into` (None: a
        new tensor, as if it were 0). The sum is in `dtype`, which may be wider than theirs (float32
        for bfloat16)."""
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


class GroupedMatmul:
    """The products of all experts of a layer, each with its own rows, which end at `ends` (int32
    [X]). (The products that `LinearProducts` names, for weights [X, F, D].)"""

    def __init__(self, ends: Tensor, kernels: str) -> None:
        self.ends, self.kernels = ends, kernels

    def forward(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """y [R, F] = x [R, D] · weightᵀ, weight [X, F, D]."""
        assert out is None
        return self._product(x, weight.transpose(1, 2))

    def input_gradient(
        self, dy: Tensor, weight: Tensor, into: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """dx [R, D] = dy [R, F] · weight, added to `into` if given."""
        assert out is None
        dx = self._product(dy, weight)
        return dx if into is None else into.add_(dx)

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dw [X, F, D] = dyᵀ · x over each expert's rows."""
        return self.add_weight_gradient(dy, x, None, dy.dtype)

    def add_weight_gradient(
        self, dy: Tensor, x: Tensor, into: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """into + dyᵀ · x over each expert's rows, summed in `dtype`."""
        beta = 1
        if into is None:
            into = dy.new_empty((len(self.ends), dy.shape[1], x.shape[1]), dtype=dtype)
            beta = 0  # the uninitialised values are not read
        add_grouped_weight_gradient(into, dy, x, self.ends, beta, self.kernels)
        return into

    def _product(self, x: Tensor, matrices: Tensor) -> Tensor:
        y: Tensor = grouped_mm(x.contiguous(), matrices, self.ends)
        return y
