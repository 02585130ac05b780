"""Plain CPU kernels for torch's attention over packed sequences, which has kernels only for GPUs.

Under test is the code around the kernels: the arguments that we pass to the operation, and how
autograd, activation checkpointing and the compiler treat it.
"""

import contextlib
import math
from itertools import pairwise
from unittest.mock import patch

import torch
from torch.nn.attention import varlen

from model.kernels.attention import FLASH2
from model.kernels.attention_choice import Call, Choice, Device, choose


def segment_weights(q, k, scale, behind):
    """Softmax weights [H, L, M] for one document's q [L, H, E], the last L of its M positions, and
    k [M, H, E]. `behind` is the number of keys before its own that a query sees; -1 means all."""
    scores = torch.einsum("ihe,jhe->hij", q, k) * scale
    ones, before = torch.ones(scores.shape[-2:]), len(k) - len(q)
    hidden = ones.triu(before + 1) + (ones.tril(before - behind - 1) if behind >= 0 else 0)
    return scores.masked_fill(hidden > 0, -math.inf).softmax(dim=-1)


def segments(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, window_size):
    """The documents as consecutive slices of queries and of keys; keys and values for every query
    head; and how many query heads share one."""
    behind, ahead = window_size
    assert ahead == 0
    assert is_causal == (behind == -1)
    found = []
    for bounds, x, longest in ((cu_seq_q, q, max_q), (cu_seq_k, k, max_k)):
        assert bounds.dtype == torch.int32
        ends = bounds.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(x)
        assert all(0 < b - a <= longest for a, b in pairwise(ends))
        found.append([slice(a, b) for a, b in pairwise(ends)])
    documents = list(zip(*found, strict=True))
    # a query before its document's first key would see nothing
    assert all(of_q.stop - of_q.start <= of_k.stop - of_k.start for of_q, of_k in documents)
    shared = q.shape[1] // k.shape[1]
    return documents, *(t.repeat_interleave(shared, dim=1) for t in (k, v)), shared


def plain_forward(q, k, v, *about):
    *bounds, scale, window_size = about[:7]
    documents, k, v, _ = segments(q, k, v, *bounds, window_size)
    scale = scale or q.shape[-1] ** -0.5
    y = [
        torch.einsum("hij,jhe->ihe", segment_weights(q[i], k[j], scale, window_size[0]), v[j])
        for i, j in documents
    ]
    normalisers = q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    return torch.cat(y), normalisers, torch.zeros(2, dtype=torch.uint64)


def plain_backward(dy, q, k, v, out, normalisers, *about):
    *bounds, _, scale, window_size = about[:8]
    documents, k, v, shared = segments(q, k, v, *bounds, window_size)
    scale = scale or q.shape[-1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i, j in documents:
        weights = segment_weights(q[i], k[j], scale, window_size[0])
        dv[j] = torch.einsum("hij,ihe->jhe", weights, dy[i])
        d_weights = torch.einsum("ihe,jhe->hij", dy[i], v[j])
        d_scores = weights * (d_weights - (d_weights * weights).sum(dim=-1, keepdim=True)) * scale
        dq[i] = torch.einsum("hij,jhe->ihe", d_scores, k[j])
        dk[j] = torch.einsum("hij,ihe->jhe", d_scores, q[i])
    return dq, *(t.unflatten(1, (-1, shared)).sum(dim=2) for t in (dk, dv))


@contextlib.contextmanager
def flash_attention_stands_in():
    """Run torch's attention over packed sequences on the CPU with the plain kernels."""
    varlen._varlen_attn.register_kernel("cpu")(plain_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(plain_backward)
    with patch("model.mask.choose", flash_if_packed):
        yield


def flash_if_packed(device: Device, call: Call, wanted: str) -> Choice:
    return Choice(FLASH2, "", ()) if call.packed else choose(device, call, wanted)
