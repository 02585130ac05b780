"""The transformer, or any range of its layers: a pipeline stage is a `Transformer` with a part of
the model.

Shapes: S sequence, B sequences in a micro-batch, D model dim, V vocabulary, H query heads, K
key/value heads, E head dim, F inner width. The sequence comes first, [S, B, D], so that
sequence-parallel collectives need no copies (parallel/collectives.py). S is the whole sequence;
with sequence parallelism a tp rank holds S/tp of it in norms and in the residual stream, and with
context parallelism every rank holds S/cp where S is written (parallel/context.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model.attention import BaseAttention, make_attention
from model.config import ModelConfig
from model.documents import Documents
from model.feed_forward import make_feed_forward
from model.linear_cross_entropy import linear_cross_entropy
from model.matmul import Matmul
from model.norm import RMSNorm
from model.positions import BatchPositions
from parallel.context import ContextParallel
from parallel.expert import ExpertParallel
from parallel.layer import Atoms, TensorParallel
from parallel.parameter import EMBEDDING, Normal
from parallel.tensor import ColumnParallelLinear, VocabParallelEmbedding


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Every rank that works on it has it whole, at each stage and on each tp rank;
    with context parallelism S is this rank's part of the sequence."""

    tokens: Tensor  # [S, B] int64
    targets: Tensor | None  # [S, B] int64, IGNORE where there is none; None: return logits, no loss
    positions: Tensor  # [S, B] int64, or [S, 1] if all sequences have the same positions
    # scalar: guard.py's scale (1, except with float16) / target tokens of the global batch; in
    # evaluation 1
    loss_scale: Tensor | None = None
    # packed documents in each of this rank's chunks (documents.py); None: each sequence is one
    documents: Sequence[Documents] | None = None
    deterministic: bool = False  # backward must give the same bits every time


class Block(nn.Module):
    """One layer: h = x + attention(norm(x)), then h + feed_forward(norm(h)), all [S/tp, B, D]."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        ep: ExpertParallel = ExpertParallel(),  # noqa: B008  (it cannot be changed)
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel)
        self.attention = make_attention(config, layer, tp)
        self.feed_forward_norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel)
        self.feed_forward = make_feed_forward(config, layer, tp, ep)

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        """`inputs`: the inputs that this layer's attention derives from the positions."""
        y, x = self.attention_norm.add(x)
        return self.after(self.attention(y, *inputs), x)

    def after(self, y: Tensor, x: Tensor) -> Tensor:
        """The output, from the block's input x and what attention adds to it."""
        y, x = self.feed_forward_norm.add(y, x)
        return x + self.feed_forward(y)

    def halves(self) -> tuple[Callable[..., Any], Callable[[Tensor, Tensor], Tensor]] | None:
        """`forward` up to its call of `attend`, (x, *other inputs) → q, k, v, and from the result y
        on, (y, x) → output; None: this kind of attention does not call it."""
        attention = self.attention
        if not isinstance(attention, BaseAttention):
            return None
        assert type(attention).forward is BaseAttention.forward, "give it a `project` or `combine`"
        return (
            lambda x, *others: attention.project(self.attention_norm(x), *others),
            lambda y, x: self.after(attention.combine(y), x),
        )


def hidden_shape(
    config: ModelConfig, length: int, sequences: int, tp: TensorParallel, cp: ContextParallel
) -> tuple[int, int, int]:
    """The shape of the hidden states between blocks and between stages, on one rank, of so many
    sequences of `length` tokens: with sequence parallelism [S/(cp·tp), B, D]."""
    return tp.local_length(cp.local_length(length)), sequences, config.dim


def vocabulary(config: ModelConfig) -> Atoms:
    """The rows of the embedding and of the head."""
    return Atoms(config.vocab_size, "model.vocab_size", uneven=True)


class Head(ColumnParallelLinear):
    """The projection onto the vocabulary, and the loss. Its weight [V, D] has rows sharded over tp,
    unevenly if tp does not divide V."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        initial, tied_to = Normal(config.init_std), "embedding.weight"
        copy_of = tied_to if config.tie_embeddings else None
        rows = vocabulary(config)
        super().__init__(config.dim, rows.count, rows, tp, Matmul(), initial, copy_of, EMBEDDING)
        self.vocab_size, self.z_loss, self.kernels = rows.count, config.z_loss, config.kernels
        self.first_row = rows.of(tp.size, tp.rank).start

    def forward(
        self, x: Tensor, targets: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Map x [S/tp, B, D] and targets [S, B] to scale · the summed cross-entropy, a scalar; or,
        without targets, x to the logits [S, B, V/tp]."""
        if targets is None or scale is None:
            return super().forward(x)
        return linear_cross_entropy(
            x,
            self.local_weight(),
            targets,
            scale,
            self.first_row,
            self.tp,
            matmul=self.matmul,
            vocab_size=self.vocab_size,
            z_loss=self.z_loss if torch.is_grad_enabled() else 0.0,  # not added in evaluation
            kernels=self.kernels,
            gradient=self.gradient,
        )


class Transformer(nn.Module):
    """The blocks `layers` of the model, with the embedding if `first` and the final norm and the
    head if `last`.

    It is built on the meta device. Parameter names are global: `blocks.17.attention.query.weight`
    belongs to layer 17 on whichever stage it is. With tied embeddings the first and the last stage
    each hold a copy of one global tensor (parallel/pipeline/tied.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Iterable[int],
        first: bool,
        last: bool,
        tp: TensorParallel,
        cp: ContextParallel = ContextParallel(),  # noqa: B008  (it cannot be changed)
        ep: ExpertParallel = ExpertParallel(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.config, self.first, self.last, self.cp = config, first, last, cp
        self.embedding = None
        if first:
            initial = Normal(config.init_std)
            self.embedding = VocabParallelEmbedding(vocabulary(config), config.dim, tp, initial)
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, tp, ep) for layer in layers})
        self.norm = RMSNorm(config, config.dim, tp, tp.sequence_parallel) if last else None
        self.head = Head(config, tp) if last else None

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Map the hidden states [S/tp, B, D] of the stage before (None on the first) to those for
        the next. The last stage returns the scaled loss, or logits [S, B, V/tp] if there are no
        targets."""
        if self.embedding is not None:
            hidden = self.embedding(batch.tokens)
        assert hidden is not None
        positions = BatchPositions(
            batch.positions, batch.documents, hidden.dtype, self.cp, batch.deterministic
        )
        for block in self.blocks.values():
            assert isinstance(block, Block)
            hidden = block(hidden, *block.attention.inputs(positions))
        if self.norm is not None and self.head is not None:
            # Both are called as modules: FSDP gathers them before the first call, and shards them
            # after the last.
            hidden = self.head(self.norm(hidden), batch.targets, batch.loss_scale)
        assert isinstance(hidden, torch.Tensor)
        return hidden
