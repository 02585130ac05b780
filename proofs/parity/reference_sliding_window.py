"""The reference of model/attention/sliding_window.py."""

from torch import Tensor

from model.attention.sliding_window import Settings
from model.config import ModelConfig
from proofs.parity import reference_causal


class Attention(reference_causal.Attention):
    """Each query attends to `window` keys, the last of which is its own."""

    keys = (("sliding_window", Settings(window=5)),)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.window = config.of(Settings).window

    def sees(self, length: int) -> Tensor:
        return super().sees(length).triu(1 - self.window)
