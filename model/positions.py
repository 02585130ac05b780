"""Where the tokens of a micro-batch are, and what attention layers derive from it."""

from typing import Protocol

import torch
from torch import Tensor

from model.mask import Attend, make_mask
from model.rotary import Angles, Rotary, rotary_angles


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
        self._masks: dict[int | None, Attend] = {}

    def angles(self, rotary: Rotary) -> Angles:
        if rotary not in self._angles:
            self._angles[rotary] = rotary_angles(self.positions, rotary, self.dtype)
        return self._angles[rotary]

    def mask(self, window: int | None, head_dim: int) -> Attend:
        if window not in self._masks:
            where = self.positions, self.boundaries
            self._masks[window] = make_mask(*where, window, self.dtype, head_dim)
        return self._masks[window]
