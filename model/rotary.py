"""Angles of rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864); kernels/rotary.py turns by them."""

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
