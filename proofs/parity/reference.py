"""A plain, unsharded implementation of the model, which the parallel one must equal.

It is deliberately a second implementation, written from the papers with nothing but torch: nothing
here imports `model/`, `parallel/` or `training/`, layers are `nn.Linear` and `nn.Embedding`, the
batch comes first, [B, S, D], attention is a masked softmax, a mixture of experts is a loop over
experts (reference_experts.py), and AdamW is torch's own (reference_training.py). Parameter names
are the same, so that gradients can be compared by name. `proofs/parity` compares the two.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from proofs.parity.reference_experts import Experts, Routing, set_padding

IGNORE = -100  # F.cross_entropy's default


class Norm(nn.Module):
    """RMSNorm, written out."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).mean(dim=-1, keepdim=True).add(self.eps).sqrt() * self.weight


@dataclass(frozen=True)
class Rotary:
    """Frequencies of the rotary embedding. With a factor above 1, they are scaled as in Llama 3.1:
    wavelengths above `original` / `low` are stretched by the factor, those below `original` /
    `high` are not. In between, a frequency is interpolated between the two, linearly in the number
    of its wavelengths that fit into `original`."""

    theta: float
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def frequency(self, exponent: float) -> float:
        frequency = self.theta**-exponent
        wavelength = 2 * math.pi / frequency
        if wavelength > self.original / self.low:
            return frequency / self.factor
        if wavelength < self.original / self.high:
            return frequency
        share = (self.original / wavelength - self.low) / (self.high - self.low)
        return share * frequency + (1 - share) * frequency / self.factor


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of x [B, H, S, E]: the pair (i, i + E/2) is a complex number, rotated by
    the angle position · frequency."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor(
        [rotary.frequency(i / half) for i in range(half)], dtype=torch.float64
    )
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float64), frequencies)  # [S, E/2]
    turn = torch.polar(torch.ones_like(angles), angles).to(
        torch.complex128 if x.dtype == torch.float64 else torch.complex64
    )
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention: x [B, S, D] → [B, S, D]. `window` is for subclasses."""

    def __init__(
        self,
        dim: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        rotary: Rotary,
        qk_norm_eps: float | None,
        window: int | None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.rotary = num_heads, num_kv_heads, rotary
        self.window = window
        self.query = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=False)
        self.query_norm = nn.Identity() if qk_norm_eps is None else Norm(head_dim, qk_norm_eps)
        self.key_norm = nn.Identity() if qk_norm_eps is None else Norm(head_dim, qk_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:  # [B, count, S, E]
            return y.view(batch, length, count, -1).transpose(1, 2)

        q = rotate(self.query_norm(heads(self.query(x), self.num_heads)), self.rotary)
        k = rotate(self.key_norm(heads(self.key(x), self.num_kv_heads)), self.rotary)
        v = heads(self.value(x), self.num_kv_heads)
        shared = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, S, S]
        weights = scores.masked_fill(~self.sees(length), -math.inf).softmax(dim=-1)
        return self.output((weights @ v).transpose(1, 2).reshape(batch, length, -1))

    def sees(self, length: int) -> Tensor:
        """The mask, [S, S]: whether the query (row) attends to the key (column)."""
        return torch.ones(length, length, dtype=torch.bool).tril()


class SlidingWindow(Attention):
    """Each query attends to `window` keys, the last of which is its own."""

    def sees(self, length: int) -> Tensor:
        return super().sees(length).triu(1 - self.window)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn_dim, bias=False)
        self.up = nn.Linear(dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


# The keys are the names of files in model/attention/ and model/feed_forward/.
ATTENTION = {"causal": Attention, "sliding_window": SlidingWindow}
FEED_FORWARD = {"swiglu": FeedForward}


class Block(nn.Module):
    def __init__(self, dim: int, attention: nn.Module, feed_forward: nn.Module, eps: float) -> None:
        super().__init__()
        self.attention_norm = Norm(dim, eps)
        self.attention = attention
        self.feed_forward_norm = Norm(dim, eps)
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Reference(nn.Module):
    """The whole decoder: tokens [B, S] → logits [B, S, V].

    Args:
        attention, feed_forward: the kind of each layer.
        bos_id: the token that begins a document; tokens then attend only to their own document.
    """

    def __init__(
        self,
        *,
        dim: int,
        attention: Sequence[str],
        feed_forward: Sequence[str],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        window: int | None,
        qk_norm: bool,
        ffn_dim: int,
        vocab_size: int,
        norm_eps: float,
        rotary: Rotary,
        tie_embeddings: bool,
        bos_id: int | None = None,
        routing: Routing | None = None,
    ) -> None:
        super().__init__()
        self.bos_id = bos_id
        self.embedding = nn.Embedding(vocab_size, dim)
        qk_norm_eps = norm_eps if qk_norm else None
        heads = (dim, head_dim, num_heads, num_kv_heads, rotary, qk_norm_eps, window)

        def make_feed_forward(kind: str) -> nn.Module:
            return Experts(dim, routing) if kind == "experts" else FEED_FORWARD[kind](dim, ffn_dim)

        self.blocks = nn.ModuleList(
            Block(dim, ATTENTION[a](*heads), make_feed_forward(f), norm_eps)
            for a, f in zip(attention, feed_forward, strict=True)
        )
        self.norm = Norm(dim, norm_eps)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_embeddings:
            # one Parameter, which `named_parameters` yields once, as embedding.weight
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if self.bos_id is None:
            return self.logits(tokens)
        cut = [row.tensor_split((row == self.bos_id).nonzero().flatten()) for row in tokens]
        documents = [document for row in cut for document in row if len(document)]
        # Each document is a row, padded at its end. That changes nothing, because no position
        # attends to a later one.
        padded = pad_sequence(documents, batch_first=True, padding_value=-1)
        set_padding(self, padded >= 0, len(tokens))
        return self.logits(padded.clamp(min=0))[padded >= 0].unflatten(0, tokens.shape)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not ignored."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
