"""The positions of a micro-batch's tokens, and what attention layers derive from them: masks
(mask.py) and the angles of rotary position embeddings (Su et al. 2021,
https://arxiv.org/abs/2104.09864; applied in kernels/rotary.py)."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from model.config import RopeScaling
from model.documents import Documents
from model.kernels.backend import exact
from model.mask import make_mask
from parallel.context import Attend, ContextParallel, SplitAttention


class Rotary(NamedTuple):
    """The parameters that determine a layer's angles."""

    head_dim: int  # E
    theta: float
    scaling: RopeScaling | None = None


class Angles(NamedTuple):
    """Cosines and sines of the angles, each [S, B, 1, E/2], or [S, 1, 1, E/2] if all sequences have
    the same positions."""

    cos: Tensor
    sin: Tensor


def rotary_angles(positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> Angles:
    """The angles position · frequency; frequencies are theta^(−2i/E) for i < E/2, or scaled.

    `positions` is [S, B], or [S, 1] if all sequences have the same positions. The angles are
    computed in float32 (float64 for a float64 model), because bfloat16 cannot represent all
    positions beyond 256.
    """
    head_dim, theta, scaling = rotary
    pairs = torch.arange(0, head_dim, 2, dtype=exact(dtype), device=positions.device)
    frequencies = theta ** (-pairs / head_dim)
    if scaling is not None:
        frequencies = scaled(frequencies, scaling)
    angles = positions.to(exact(dtype)).unsqueeze(-1).unsqueeze(-1) * frequencies
    return Angles(angles.cos(), angles.sin())


def scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies [E/2] as Llama 3.1 does for sequences longer than in the original training
    (`apply_scaling` in Meta's llama-models, `rope_type: llama3` in Hugging Face's files).

    A pair of dimensions makes original · f / 2π turns over the original length. A pair that turns
    often distinguishes neighbouring tokens; its frequency stays as it is. A pair that turns less
    than about once would reach angles that did not occur in training; its frequency is divided by
    the factor. Between the two, frequencies are interpolated.
    """
    factor, low, high, original = scaling
    turns = frequencies * (original / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class Positions(Protocol):
    """What an attention layer may request of the positions."""

    def angles(self, rotary: Rotary) -> Angles: ...

    def mask(self, window: int | None, head_dim: int, kernel: str) -> Attend: ...


class BatchPositions:
    """The angles and masks of a micro-batch, each computed once for all layers that request it.

    Args:
        positions: [S/cp, B] int64, or [S/cp, 1] if all sequences have the same positions.
        documents: those of each of this rank's chunks (documents.py); None: each sequence is one.
        dtype: that of activations.
        cp: the axis that splits the sequence.
        deterministic: the backward of attention must give the same bits every time.
    """

    def __init__(
        self,
        positions: Tensor,
        documents: Sequence[Documents] | None,
        dtype: torch.dtype,
        cp: ContextParallel,
        deterministic: bool = False,
    ) -> None:
        self.positions, self.dtype, self.cp = positions, dtype, cp
        self.deterministic = deterministic
        self.chunks = cp.chunks(positions.shape[0] * cp.size)
        self.documents = [None] * len(self.chunks) if documents is None else documents
        self._angles: dict[Rotary, Angles] = {}
        self._masks: dict[tuple[int | None, int, str], SplitAttention] = {}

    def angles(self, rotary: Rotary) -> Angles:
        if rotary not in self._angles:
            self._angles[rotary] = rotary_angles(self.positions, rotary, self.dtype)
        return self._angles[rotary]

    def mask(self, window: int | None, head_dim: int, kernel: str) -> SplitAttention:
        key = window, head_dim, kernel
        if key not in self._masks:
            positions = self.positions.split([len(part) for part in self.chunks])
            parts = zip(positions, self.documents, self.chunks, strict=True)
            about = window, self.dtype, head_dim, kernel
            masks = [
                make_mask(where, documents, *about, part, self.deterministic)
                for where, documents, part in parts
            ]
            self._masks[key] = SplitAttention(self.cp, self.chunks, masks)
        return self._masks[key]
