"""The reference of model/attention/causal.py: a masked softmax, with rotary embeddings."""

import math

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from proofs.parity.reference import Norm


def frequency(exponent: float, config: ModelConfig) -> float:
    """A frequency of the rotary embedding. With a factor above 1, it is scaled as in Llama 3.1:
    wavelengths above `original` / `low` are stretched by the factor, those below `original` /
    `high` are not. In between, a frequency is interpolated between the two, linearly in the number
    of its wavelengths that fit into `original`."""
    factor, original = config.rope_scaling_factor, config.rope_original_length
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    plain = config.rope_theta**-exponent
    wavelength = 2 * math.pi / plain
    if wavelength > original / low:
        return plain / factor
    if wavelength < original / high:
        return plain
    share = (original / wavelength - low) / (high - low)
    return share * plain + (1 - share) * plain / factor


def rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotary embedding of x [B, H, S, E]: the pair (i, i + E/2) is a complex number, rotated by
    the angle position · frequency."""
    half = x.shape[-1] // 2
    found = [frequency(i / half, config) for i in range(half)]
    frequencies = torch.tensor(found, dtype=torch.float64)
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
        self.config = config
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

        q = rotate(self.query_norm(heads(self.query(x), self.num_heads)), self.config)
        k = rotate(self.key_norm(heads(self.key(x), self.num_kv_heads)), self.config)
        v = heads(self.value(x), self.num_kv_heads)
        shared = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])  # [B, H, S, S]
        scores = scores.masked_fill(~self.sees(length), -math.inf)
        self.largest = scores.detach().amax(dim=(0, 2, 3))  # [H]
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))

    def clip(self, limit: float) -> None:
        """QK-clip (https://arxiv.org/abs/2507.20534, algorithm 1). Where heads share keys, only
        queries are scaled."""
        has_own_keys = self.num_heads == self.num_kv_heads
        queries, keys = self.query.weight.data, self.key.weight.data
        width = len(queries) // self.num_heads
        for head, largest in enumerate(self.largest.tolist()):
            if largest > limit:
                rows, factor = slice(head * width, (head + 1) * width), limit / largest
                queries[rows] *= math.sqrt(factor) if has_own_keys else factor
                if has_own_keys:
                    keys[rows] *= math.sqrt(factor)

    def sees(self, length: int) -> Tensor:
        """The mask, [S, S]: whether the query (row) attends to the key (column)."""
        return torch.ones(length, length, dtype=torch.bool).tril()
