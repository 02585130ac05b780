"""Attention to the nearest tokens only (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150,
section 3.1), used in every layer of Mistral 7B (Jiang et al. 2023,
https://arxiv.org/abs/2310.06825) and in some layers of Gemma."""

from errors import UserError
from model.attention import causal
from model.config import ModelConfig
from parallel.layer import TensorParallel


class Attention(causal.Attention):
    """A token sees itself and the model.attention_window − 1 tokens before it."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        if config.attention_window is None:
            why = "layers of kind sliding_window need a window"
            raise UserError("model.attention_window", None, why, "give a number of tokens")
        self.window = config.attention_window
