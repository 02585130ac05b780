"""A plain, unsharded implementation of the model, which the parallel one must equal.

It is deliberately a second implementation, written from the papers with nothing but torch: of the
code under test it reads only the section `model` of the configuration. Layers are `nn.Linear` and
`nn.Embedding`, the batch comes first, [B, S, D], attention is a masked softmax, a mixture of
experts is a loop over experts (reference_experts.py), and AdamW is torch's own
(reference_training.py). Parameter names are the same, so that gradients can be compared by name.
`proofs/parity` compares the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from model.attention import sliding_window
from model.config import ModelConfig
from proofs.parity.reference_experts import Experts, FeedForward

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
    """Causal grouped-query attention: x [B, S, D] → [B, S, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.rotary = Rotary(
            config.rope_theta,
            config.rope_scaling_factor,
            config.rope_low_freq_factor,
            config.rope_high_freq_factor,
            config.rope_original_length,
        )
        dim, head_dim, eps = config.dim, config.head_dim, config.norm_eps
        self.query = nn.Linear(dim, self.num_heads * head_dim, bias=False)
        self.key = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.value = nn.Linear(dim, self.num_kv_heads * head_dim, bias=False)
        self.output = nn.Linear(self.num_heads * head_dim, dim, bias=False)
        self.query_norm = Norm(head_dim, eps) if config.qk_norm else nn.Identity()
        self.key_norm = Norm(head_dim, eps) if config.qk_norm else nn.Identity()

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

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.window = config.of(sliding_window.Settings).window

    def sees(self, length: int) -> Tensor:
        return super().sees(length).triu(1 - self.window)


# The keys are the names of files in model/attention/ and model/feed_forward/.
ATTENTION = {"causal": Attention, "sliding_window": SlidingWindow}
FEED_FORWARD: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "swiglu": lambda config: FeedForward(config.dim, config.ffn_dim),
    "experts": Experts,
}


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = Norm(config.dim, config.norm_eps)
        self.attention = ATTENTION[config.attention_of(layer)](config)
        self.feed_forward_norm = Norm(config.dim, config.norm_eps)
        self.feed_forward = FEED_FORWARD[config.feed_forward_of(layer)](config)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x [B, S, D]; `lengths` of the documents, sequence after sequence."""
        # Each document is a row, padded at its end. That changes nothing, because no position
        # attends to a later one.
        documents = self.attention_norm(x).flatten(0, 1).split(lengths)
        y = self.attention(pad_sequence(documents, batch_first=True))
        y = torch.cat([row[:length] for row, length in zip(y, lengths, strict=True)])
        x = x + y.view_as(x)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Reference(nn.Module):
    """The whole decoder: tokens [B, S] → logits [B, S, V].

    Args:
        bos_id: the token that begins a document; tokens then attend only to their own document.
    """

    def __init__(self, config: ModelConfig, bos_id: int | None = None) -> None:
        super().__init__()
        self.bos_id = bos_id
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            # one Parameter, which `named_parameters` yields once, as embedding.weight
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        begins = torch.zeros_like(tokens) if self.bos_id is None else tokens == self.bos_id
        begins[:, 0] = True
        starts = begins.flatten().nonzero().flatten()
        lengths = starts.diff(append=torch.tensor([tokens.numel()])).tolist()
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, lengths)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that are not ignored."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
