"""The transformer, or any range of its layers: a pipeline stage is this class holding part of the
model.

Shapes: S sequence, B sequences in a micro-batch, D model dim, V vocabulary. The sequence comes
first, [S, B, D], so that sequence-parallel collectives need no copies (parallel/collectives.py). S
is the whole sequence; between the matrices a tp rank holds S/tp of it if sequence parallel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from model.attention import Attention
from model.cache import KeyValueCache, LayerCache
from model.config import ModelConfig
from model.document import attention_bounds
from model.feed_forward import FeedForward
from model.kernels.linear_cross_entropy import linear_cross_entropy
from model.norm import RMSNorm
from model.rotary import rotary_angles
from parallel.parameter import Normal
from parallel.placement import chunk_range
from parallel.tensor import ColumnParallelLinear, VocabParallelEmbedding, column_parallel


@dataclass(frozen=True)
class Batch:
    """One micro-batch, whole on every rank that works on it: each stage and each tp rank has the
    tokens."""

    tokens: Tensor  # [S, B] int64
    # [S, B] int64, IGNORE where there is none; None: return logits instead of the loss
    targets: Tensor | None
    positions: Tensor  # [S, B] int64, or [S, 1] where every sequence counts from the same start
    # scalar that the summed loss is multiplied by: 1 / target tokens of the global batch
    loss_scale: Tensor | None = None
    # [N + 1] int32, boundaries of documents (model/document.py); None: each sequence is one
    documents: Tensor | None = None


class Block(nn.Module):
    """x + attention(norm(x)), then + feed_forward(norm(x)); [S/tp, B, D] → the same."""

    def __init__(self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config, config.dim, tp, sequence_parallel)
        self.attention = Attention(config, tp, sequence_parallel)
        self.feed_forward_norm = RMSNorm(config, config.dim, tp, sequence_parallel)
        self.feed_forward = FeedForward(config, tp, sequence_parallel)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        y, x = self.feed_forward_norm.add(
            self.attention(self.attention_norm(x), cos, sin, documents, cache), x
        )
        return x + self.feed_forward(y)


class Head(ColumnParallelLinear):
    """Projection onto the vocabulary, and the loss: weight [V, D], rows cut over tp, unevenly where
    tp does not divide V."""

    def __init__(
        self, config: ModelConfig, tp: DeviceMesh, sequence_parallel: bool, copy_of: str | None
    ) -> None:
        super().__init__(
            config.dim, config.vocab_size, tp, Normal(config.init_std), copy_of=copy_of
        )
        self.group, self.sequence_parallel = tp.get_group(), sequence_parallel
        self.vocab_size, self.z_loss, self.kernels = (
            config.vocab_size,
            config.z_loss,
            config.kernels,
        )
        self.first_row = chunk_range(config.vocab_size, tp.size(), tp.get_local_rank()).start

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [S/tp, B, D] → the scaled loss, or logits [S, B, V/tp] where there are no targets."""
        if batch.targets is None:
            return self.logits(x)
        assert batch.loss_scale is not None
        return linear_cross_entropy(
            x,
            self.local_weight(),
            batch.targets,
            batch.loss_scale,
            self.first_row,
            self.group,
            self.sequence_parallel,
            vocab_size=self.vocab_size,
            # evaluation reports the cross-entropy alone
            z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,
            kernels=self.kernels,
        )

    def logits(self, x: Tensor) -> Tensor:
        """x [S/tp, B, D] → [S, B, V/tp]"""
        return column_parallel(x, [self], self.group, self.sequence_parallel)[0]


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
        layers: range,
        first: bool,
        last: bool,
        tp: DeviceMesh,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.config, self.first, self.last = config, first, last
        self.embedding = None
        if first:
            initial = Normal(config.init_std)
            self.embedding = VocabParallelEmbedding(
                config.vocab_size, config.dim, tp, sequence_parallel, initial
            )
        self.blocks = nn.ModuleDict(
            {str(layer): Block(config, tp, sequence_parallel) for layer in layers}
        )
        self.norm = RMSNorm(config, config.dim, tp, sequence_parallel) if last else None
        tied_to = "embedding.weight" if config.tie_embeddings else None
        self.head = Head(config, tp, sequence_parallel, copy_of=tied_to) if last else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """hidden [S/tp, B, D] of the stage before (None on the first) → hidden for the next, or the
        scaled loss at the end."""
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens)
        assert hidden is not None
        config = self.config
        cos, sin = rotary_angles(
            batch.positions, config.head_dim, config.rope_theta, hidden.dtype, config.rope_scaling
        )
        documents = attention_bounds(
            batch.documents, batch.positions, hidden.dtype, config.head_dim
        )
        for block in self.blocks.values():
            hidden = block(hidden, cos, sin, documents)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden), batch)
        assert isinstance(hidden, torch.Tensor)
        return hidden

    def next_logits(self, tokens: Tensor, cache: KeyValueCache) -> Tensor:
        """tokens [S, B], which follow on those in the cache and are added to it → logits [1, B,
        V/tp] after the last of them.

        For a model in one stage, without sequence parallelism: one token cannot be cut.
        """
        assert self.embedding is not None, "the whole model in one stage"
        hidden = self.embedding(tokens)
        cos, sin, mask = cache.next(tokens.shape[0])
        for name, block in self.blocks.items():
            hidden = block(hidden, cos, sin, mask, cache.layers[name])
        assert self.norm is not None
        assert self.head is not None
        return self.head.logits(self.norm(hidden[-1:]))
