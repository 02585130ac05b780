"""Angles of rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864);
kernels/rotary.py turns by them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import RopeScaling


class Rotary(NamedTuple):
    """What decides a layer's angles."""

    head_dim: int  # E
    theta: float
    scaling: RopeScaling | None = None


class Angles(NamedTuple):
    """Each [S, B, 1, E/2], or [S, 1, 1, E/2] where every sequence counts alike."""

    cos: Tensor
    sin: Tensor


def rotary_angles(positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> Angles:
    """Of position · frequency, theta^(−2i/E) for i < E/2, or that scaled.

    `positions` is [S, B], or [S, 1] where every sequence counts alike. Computed in float32 (float64
    for a float64 model): bfloat16 cannot tell positions beyond 256 apart.
    """
    head_dim, theta, scaling = rotary
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling)
    angles = positions.to(exact).unsqueeze(-1).unsqueeze(-1) * frequencies
    return Angles(angles.cos(), angles.sin())


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's frequencies [E/2] for sequences longer than those of the training before
    (`apply_scaling` in Meta's llama-models, `rope_type: llama3` in Hugging Face's files).

    A pair of dimensions makes original · f / 2π turns over the original length. One that turns
    often tells neighbours apart, and stays as it is. One that turns less than about once would
    reach angles that no training showed: it is slowed by the factor. Between the two, a mixture.
    """
    factor, low, high, original = scaling
    turns = frequencies * (original / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)
