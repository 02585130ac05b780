"""The model's dimensions (the section `model.` of a configuration file)."""

from dataclasses import dataclass
from typing import Literal

from errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Llama-style decoder. Letters in shapes throughout the code: D, H, K, E, F, V as named here."""

    dim: int  # D: width of the residual stream
    num_layers: int  # L
    num_heads: int  # H: query heads
    num_kv_heads: int  # K: key/value heads; each serves H / K query heads (grouped-query attention)
    ffn_dim: int  # F: inner width of the gated feed-forward
    vocab_size: int  # V: must be the tokenizer's
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    tie_embeddings: bool = False  # the head uses the embedding's weight
    z_loss: float = 0.0  # weight of log²(normaliser) in the loss that is minimised (PaLM: 1e-4); evaluation leaves it out
    kernels: Literal["auto", "triton", "torch"] = (
        "auto"  # auto: Triton on a GPU, PyTorch elsewhere; triton; torch (model/kernels/)
    )
    init_std: float = 0.02  # standard deviation of every matrix; output projections get 1 / sqrt(2 L) of it

    def __post_init__(self) -> None:
        if self.z_loss < 0:
            raise UserError("model.z_loss", self.z_loss, "a negative weight drives the normaliser away", "give 0 or more")
        for key in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size"):
            if getattr(self, key) < 1:
                raise UserError(f"model.{key}", getattr(self, key), "must be at least 1", "give a positive number")
        if self.dim % self.num_heads or self.head_dim % 2:
            raise UserError(
                "model.num_heads",
                self.num_heads,
                f"model.dim={self.dim} must divide into heads of an even width (rotary embeddings turn pairs)",
                f"choose one of {[h for h in range(1, self.dim // 2 + 1) if self.dim % (2 * h) == 0][-12:]}",
            )
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "model.num_kv_heads",
                self.num_kv_heads,
                f"model.num_heads={self.num_heads} query heads must divide evenly among them",
                f"choose one of {[k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]}",
            )

    @property
    def head_dim(self) -> int:  # E
        return self.dim // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the whole model; a tied embedding counts once."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.num_layers * block + embeddings + self.dim

    def flops_per_token(self, seq_len: int) -> float:
        """Floating-point operations to train on one token: forward and backward, multiply and add counted as two.

        6 per matrix parameter (2 forward, 4 backward; the embedding is a lookup and costs none) and 6·L·S·D for causal
        attention, i.e. half of the full S × S square (the convention of PaLM, appendix B, halved for causality).
        """
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        matrices = self.num_layers * (attention + 3 * self.dim * self.ffn_dim) + self.vocab_size * self.dim
        return 6.0 * matrices + 6.0 * self.num_layers * seq_len * self.dim
