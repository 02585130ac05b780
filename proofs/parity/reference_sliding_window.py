"""The reference of model/attention/sliding_window.py."""

from torch import Tensor

from model.config import ModelConfig
from proofs.parity import reference_causal


class Attention(reference_causal.Attention):
    """Each query attends to `attention_window` keys, the last of which is its own."""

    keys = (("attention_window", 5),)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.window = config.attention_window

    def sees(self, length: int) -> Tensor:
        assert self.window is not None
        return super().sees(length).triu(1 - self.window)
