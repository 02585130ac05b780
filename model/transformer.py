"""The transformer, or any range of its layers: a pipeline stage is this class holding part of the
model.

Shapes: S sequence, B sequences in a micro-batch, D model dim, V vocabulary, H query heads, K
key/value heads, E head dim, F inner width. The sequence comes first, [S, B, D], so that
sequence-parallel collectives need no copies (parallel/collectives.py). S is the whole sequence; in
norms and in the residual stream a tp rank holds S/tp of it if sequence parallel.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import make_attention
from model.config import ModelConfig
from model.feed_forward import make_feed_forward
from model.kernels.linear_cross_entropy import linear_cross_entropy
from model.matmul import Matmul
from model.norm import RMSNorm
from model.positions import BatchPositions
from parallel.layer import Pieces, TensorParallel
from parallel.parameter import Normal, weights_of
from parallel.tensor import ColumnParallelLinear, VocabParallelEmbedding


@dataclass(frozen=True)
class Batch:
    """One micro-batch, whole on every rank that works on it: each stage and each tp rank has the
    tokens."""

    tokens: Tensor  # [S, B] int64
    targets: Tensor | None  # [S, B] int64, IGNORE where there is none; None: return logits, no loss
    positions: Tensor  # [S, B] int64, or [S, 1] where every sequence counts from the same start
    # scalar: 1 / target tokens of the global batch; in evaluation 1
    loss_scale: Tensor | None = None
    documents: Tensor | None = None  # [N + 1] int32: their boundaries (documents.py), if several


class Block(nn.Module):
    """x + attention(norm(x)), then + feed_forward(norm(x)); [S/tp, B, D] → the same."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel)
        self.attention = make_attention(config, layer, tp)
        self.feed_forward_norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel)
        self.feed_forward = make_feed_forward(config, layer, tp)

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        """`inputs`: what this layer's attention wants of the positions."""
        y, x = self.feed_forward_norm.add(self.attention(self.attention_norm(x), *inputs), x)
        return x + self.feed_forward(y)


def hidden_shape(config: ModelConfig, positions: int, sequences: int) -> tuple[int, int, int]:
    """[S/tp, B, D], of what goes from block to block and from stage to stage, where a rank has so
    many positions of so many sequences."""
    return positions, sequences, config.dim


def vocabulary(config: ModelConfig) -> Pieces:
    """Rows of the embedding and of the head."""
    return Pieces(config.vocab_size, "model.vocab_size", uneven=True)


class Head(ColumnParallelLinear):
    """Projection onto the vocabulary, and the loss: weight [V, D], rows cut over tp, unevenly where
    tp does not divide V."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        initial, tied_to = Normal(config.init_std), "embedding.weight"
        copy_of = tied_to if config.tie_embeddings else None
        rows = vocabulary(config)
        super().__init__(config.dim, rows.count, rows, tp, Matmul(), initial, copy_of)
        self.vocab_size, self.z_loss, self.kernels = rows.count, config.z_loss, config.kernels
        self.first_row = rows.of(tp.size, tp.rank).start

    def loss(self, x: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        """x [S/tp, B, D], targets [S, B] → scale · the summed cross-entropy, a scalar. (`forward`
        has the logits, [S, B, V/tp].)"""
        return linear_cross_entropy(
            x,
            self.local_weight(),
            targets,
            scale,
            self.first_row,
            self.tp.group,
            self.tp.sequence_parallel,
            matmul=self.matmul,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,  # evaluation leaves it out
            kernels=self.kernels,
        )


class Transformer(nn.Module):
    """Blocks `layers` of the model, with the embedding if `first` and the final norm and head if
    `last`.

    Built on the meta device; parameter names are global (`blocks.17.attention.query.weight` is
    layer 17 whoever holds it). With tied embeddings the first and the last stage hold a copy each,
    of one global tensor (parallel/pipeline/tied.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        first: bool,
        last: bool,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.embedding = None
        if first:
            initial = Normal(config.init_std)
            self.embedding = VocabParallelEmbedding(vocabulary(config), config.dim, tp, initial)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, tp) for layer in layers})
        self.norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel) if last else None
        self.head = Head(config, tp) if last else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """hidden [S/tp, B, D] of the stage before (None on the first) → hidden for the next; at the
        end the scaled loss, or logits [S, B, V/tp] where there are no targets."""
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens)
        assert hidden is not None
        positions = BatchPositions(batch.positions, batch.documents, hidden.dtype)
        for block in self.blocks.values():
            assert isinstance(block, Block)
            hidden = block(hidden, *block.attention.inputs(positions))
        if self.norm is not None and self.head is not None:
            hidden = self.norm(hidden)
            if batch.targets is None or batch.loss_scale is None:
                hidden = self.head(hidden)
            else:
                hidden = self.head.loss(hidden, batch.targets, batch.loss_scale)
        assert isinstance(hidden, torch.Tensor)
        return hidden


@lru_cache(maxsize=64)
def kinds_of_blocks(config: ModelConfig, tp: int = 1) -> list[tuple[Block, int]]:
    """A block of each kind, in shapes only, as one of `tp` ranks has it; and how many there are.

    Raises UserError, naming the key, where `tp` does not divide something.
    """
    kinds = [config.kinds_of(layer) for layer in range(config.num_layers)]
    counts, first = Counter(kinds), {kind: kinds.index(kind) for kind in kinds}
    return [(Block(config, first[kind], TensorParallel(tp)), n) for kind, n in counts.items()]


@lru_cache(maxsize=64)
def num_parameters(config: ModelConfig) -> int:
    """Trainable parameters of the whole model; a tied embedding counts once."""

    def count(module: nn.Module) -> int:
        return sum(each.numel for each in weights_of(module) if not each.is_copy)

    ends = Transformer(config, [], True, True, TensorParallel())
    return count(ends) + sum(n * count(block) for block, n in kinds_of_blocks(config))


def check_tp(config: ModelConfig, tp: int) -> None:
    """Raises UserError, naming the key, where some layer cannot be cut for `tp` ranks."""
    kinds_of_blocks(config, tp)
    Transformer(config, [], True, True, TensorParallel(tp))
