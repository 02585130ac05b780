"""Rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864)."""

from typing import Any

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [S, B, 1, E/2], of position · theta^(−2i/E) for i < E/2.

    `positions` is [S, B], or [S, 1] where every sequence counts alike. Computed in float32 (float64 for a float64 model):
    bfloat16 cannot tell positions beyond 256 apart.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=exact, device=positions.device) / head_dim)
    angles = positions.to(exact).unsqueeze(-1).unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


class Rotate(torch.autograd.Function):
    """Turning is orthogonal, so backward turns the gradient back by the same angles; nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)  # [S, B, H, E/2] each
    turned_first = (first * cos).addcmul_(second, sin, value=-direction)
    turned_second = (second * cos).addcmul_(first, sin, value=direction)
    return torch.cat((turned_first, turned_second), dim=-1).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[..., i], x[..., i + E/2]) of x [S, B, H, E] by their angles; result in x's dtype.

    Pairing the two halves is Hugging Face's convention; Meta's original files pair neighbours, a permutation of the rows of
    the query and key weights.
    """
    return Rotate.apply(x, cos, sin)
