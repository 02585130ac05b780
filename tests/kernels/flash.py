"""Plain CPU kernels for torch's attention over packed sequences, which has kernels only for GPUs.

Under test is the code around the kernels: the arguments that we pass to the operation, and how
autograd, activation checkpointing and the compiler treat it.
"""

import contextlib
from itertools import pairwise
from unittest.mock import patch

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from model.kernels.attention import FLASH2
from model.kernels.attention_choice import Call, Choice, Device, choose


def of_document(q, k, v, scale, behind):
    """The output [L, H, E] of one document's q [L, H, E], the last L of its M positions, and k, v
    [M, K, E]. `behind` is the number of keys before its own that a query sees; -1 means all."""
    before = len(k) - len(q)
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(before)
    seen = seen.triu(before - behind) if behind >= 0 else seen
    heads_first = (t.transpose(0, 1) for t in (q, k, v))
    y = scaled_dot_product_attention(*heads_first, seen, scale=scale, enable_gqa=True)
    return y.transpose(0, 1)


def segments(x, bounds, longest):
    """The documents as consecutive slices."""
    assert bounds.dtype == torch.int32
    ends = bounds.tolist()
    assert ends[0] == 0
    assert ends[-1] == len(x)
    assert all(0 < b - a <= longest for a, b in pairwise(ends))
    return [slice(a, b) for a, b in pairwise(ends)]


def attention(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size):
    behind, ahead = window_size
    assert ahead == 0
    assert is_causal == (behind == -1)
    of_q, of_k = segments(q, cu_seq_q, max_q), segments(k, cu_seq_k, max_k)
    documents = list(zip(of_q, of_k, strict=True))
    # a query before its document's first key would see nothing
    assert all(i.stop - i.start <= j.stop - j.start for i, j in documents)
    return torch.cat([of_document(q[i], k[j], v[j], scale, behind) for i, j in documents])


def plain_forward(q, k, v, *about):
    normalisers = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    return attention(q, k, v, *about[:7]), normalisers, torch.zeros(2, dtype=torch.uint64)


def plain_backward(dy, q, k, v, out, normalisers, *about):
    *bounds, _, scale, window_size = about[:8]

    def forward(*qkv):
        return attention(*qkv, *bounds, scale, window_size)

    return torch.func.vjp(forward, q, k, v)[1](dy)


@contextlib.contextmanager
def flash_attention_stands_in():
    """Run torch's attention over packed sequences on the CPU with the plain kernels."""
    varlen._varlen_attn.register_kernel("cpu")(plain_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(plain_backward)
    with patch("model.mask.choose", flash_if_packed):
        yield


def flash_if_packed(device: Device, call: Call, wanted: str) -> Choice:
    return Choice(FLASH2, "", ()) if call.packed else choose(device, call, wanted)
