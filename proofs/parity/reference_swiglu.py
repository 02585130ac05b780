"""The reference of model/feed_forward/swiglu.py."""

import torch
from torch import Tensor, nn

from model.config import ModelConfig


class FeedForward(nn.Module):
    """down(silu(gate(x)) · up(x)). `width`: the inner one, if not that of the section."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        dim, width = config.dim, width or config.ffn_dim
        self.gate = nn.Linear(dim, width, bias=False)
        self.up = nn.Linear(dim, width, bias=False)
        self.down = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))
