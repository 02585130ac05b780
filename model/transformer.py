"""The transformer, or any range of its layers: a pipeline stage is this class holding part of the model.

Shapes: S sequence, B sequences in a micro-batch, D model dim, V vocabulary. The sequence comes first, [S, B, D], so that
sequence-parallel collectives need no copies (parallel/collectives.py). S is the whole sequence; between the matrices a tp rank
holds S/tp of it if sequence parallel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model.attention import Attention
from model.config import ModelConfig
from model.feed_forward import FeedForward
from model.loss import vocab_parallel_cross_entropy
from model.norm import RMSNorm
from model.rotary import rotary_angles
from parallel.placement import chunk_range
from parallel.tensor import ColumnParallelLinear, VocabParallelEmbedding, column_parallel


@dataclass(frozen=True)
class Batch:
    """One micro-batch, whole on every rank that works on it: each stage and each tp rank has the tokens."""

    tokens: Tensor  # [S, B] int64
    targets: Tensor | None  # [S, B] int64, IGNORE where there is none; None: return logits instead of the loss
    positions: Tensor  # [S, B] int64, or [S, 1] where every sequence counts from the same start


class Block(nn.Module):
    """x + attention(norm(x)), then + feed_forward(norm(x)); [S/tp, B, D] → the same."""

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, tp, sequence_parallel)
        self.attention = Attention(config, tp, sequence_parallel)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps, tp, sequence_parallel)
        self.feed_forward = FeedForward(config, tp, sequence_parallel)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(ColumnParallelLinear):
    """Projection onto the vocabulary, and the loss: weight [V, D], rows cut over tp, unevenly where tp does not divide V."""

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__(config.dim, config.vocab_size, tp)
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.first_row = chunk_range(config.vocab_size, tp.size(), tp.get_local_rank()).start

    def forward(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """x [S/tp, B, D] → the summed loss, or logits [S, B, V/tp] where there are no targets."""
        (logits,) = column_parallel(x, [self], self.group, self.sequence_parallel)
        if targets is None:
            return logits
        return vocab_parallel_cross_entropy(logits, targets, self.first_row, self.group)


class Transformer(nn.Module):
    """Blocks `layers` of the model, with the embedding if `first` and the final norm and head if `last`.

    Built on the meta device; parameter names are global (`blocks.17.attention.query.weight` is layer 17 whoever holds it).
    With tied embeddings the first and the last stage hold a copy each, of one global tensor (parallel/pipeline/tied.py).
    """

    def __init__(
        self, config: ModelConfig, layers: range, first: bool, last: bool, tp: DeviceMesh, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.embedding = VocabParallelEmbedding(config.vocab_size, config.dim, tp, sequence_parallel) if first else None
        self.blocks = nn.ModuleDict({str(layer): Block(config, tp, sequence_parallel) for layer in layers})
        self.norm = RMSNorm(config.dim, config.norm_eps, tp, sequence_parallel) if last else None
        self.head = Head(config, tp, sequence_parallel) if last else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """hidden [S/tp, B, D] of the stage before (None on the first) → hidden for the next, or the summed loss at the end."""
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens)
        assert hidden is not None
        cos, sin = rotary_angles(batch.positions, self.config.head_dim, self.config.rope_theta, hidden.dtype)
        for block in self.blocks.values():
            hidden = block(hidden, cos, sin)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden), batch.targets)
        assert isinstance(hidden, torch.Tensor)
        return hidden
