"""Where the tokens of a micro-batch are, and what attention layers derive from it: masks (mask.py)
and the angles of rotary position embeddings (Su et al. 2021, https://arxiv.org/abs/2104.09864;
kernels/rotary.py turns by them)."""

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model.config import RopeScaling
from model.kernels.backend import exact
from model.mask import Attend, make_mask


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
    pairs = torch.arange(0, head_dim, 2, dtype=exact(dtype), device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling)
    angles = positions.to(exact(dtype)).unsqueeze(-1).unsqueeze(-1) * frequencies
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


class Positions(Protocol):
    """What a layer may ask."""

    def angles(self, rotary: Rotary) -> Angles: ...

    def mask(self, window: int | None, head_dim: int) -> Attend: ...


class BatchPositions:
    """Of a micro-batch: makes angles and masks, each once for all layers that ask for the same.

    Args:
        positions: [S, B] int64, or [S, 1] where every sequence counts alike.
        boundaries: of documents, [N + 1] int32 (documents.py); None: each sequence is one.
        dtype: of activations.
    """

    def __init__(self, positions: Tensor, boundaries: Tensor | None, dtype: torch.dtype) -> None:
        self.positions, self.boundaries, self.dtype = positions, boundaries, dtype
        self._angles: dict[Rotary, Angles] = {}
        self._masks: dict[tuple[int | None, int], Attend] = {}

    def angles(self, rotary: Rotary) -> Angles:
        if rotary not in self._angles:
            self._angles[rotary] = rotary_angles(self.positions, rotary, self.dtype)
        return self._angles[rotary]

    def mask(self, window: int | None, head_dim: int) -> Attend:
        key = window, head_dim
        if key not in self._masks:
            where = self.positions, self.boundaries
            self._masks[key] = make_mask(*where, window, self.dtype, head_dim)
        return self._masks[key]
