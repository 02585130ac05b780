"""Attention to the nearest tokens only (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150,
section 3.1), used in every layer of Mistral 7B (Jiang et al. 2023,
https://arxiv.org/abs/2310.06825) and in some layers of Gemma."""

from typing import Annotated

from declare import between, section
from model.attention import causal
from model.config import ModelConfig
from parallel.layer import TensorParallel


@section("model.sliding_window")
class Settings:
    """Of the layers in which a token sees only the nearest tokens."""

    # number of tokens that a token sees, itself included
    window: Annotated[int, between(1, 2**31 - 1, example=4096)]


class Attention(causal.Attention):
    """A token sees itself and the window − 1 tokens before it."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(config, tp)
        self.window = config.of(Settings).window
