"""The kernels that compute attention, each a call of one operator of torch. Which of them runs is
decided in attention_choice.py.

| name        | operator                                   | takes, besides causal masks          |
|-------------|--------------------------------------------|--------------------------------------|
| cuDNN       | _scaled_dot_product_cudnn_attention        |                                      |
| flash 2, 3  | _scaled_dot_product_flash_attention,       | documents and windows, by the second |
|             | torch_attn::_varlen_attn                   |                                      |
| efficient   | _scaled_dot_product_efficient_attention    | a bias [B, 1, S, S]                  |
| math        | several: two products, a softmax           | a bias                               |
| flash (CPU) | _scaled_dot_product_flash_attention_for_cpu| a bias                               |

The operators are called directly. torch's `scaled_dot_product_attention` would choose among them
again in every call, by flags of the process, and would silently take another one if a check fails;
an operator that cannot run raises an error. On a CPU there is nothing to choose, and
`scaled_dot_product_attention` is called (and on a GPU, in generation, for each token after the
prompt).

flash 3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608) is a separate package. Once
`load_flash3` has registered it, the two operators of flash attention run its kernels instead of
those of flash 2 (Dao 2023, https://arxiv.org/abs/2307.08691), which torch contains.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn  # registers torch_attn::_varlen_attn

from model.documents import Documents

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
_math = torch.ops.aten._scaled_dot_product_attention_math.default
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_packed = torch.ops.torch_attn._varlen_attn.default

# torch 2.11 lacks this argument and accepts fewer key/value heads without it; later versions
# require it.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

# q [B, H, S, E], k [B, K, S, E], v [B, K, S, E'], a bias or None (causal) → [B, H, S, E']
Dense = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Kernel:
    name: str
    run: Dense
    operators: tuple[Any, ...]  # what the dispatcher, a profile and checkpointing see
    packs: bool = False  # takes documents and windows as arguments: sequences packed into one


def by_torch(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=_shared(q, k)
    )


def _shared(q: Tensor, k: Tensor) -> bool:
    """Whether query heads share key/value heads."""
    # After blocks with other numbers of heads, the compiler makes these numbers symbols. A branch
    # makes it choose; the comparison itself would be a symbol, which the operator does not take.
    return True if q.shape[1] != k.shape[1] else False  # noqa: SIM210


def by_cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is None
    keeps = torch.is_grad_enabled()  # the softmax's normalisers, for backward
    return _cudnn(q, k, v, None, keeps, is_causal=True)[0]


def by_flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    assert bias is None
    return _flash(q, k, v, is_causal=True)[0]


def by_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    shared = q.shape[1] // k.shape[1]  # takes as many key/value heads as query heads (torch 2.13)
    if shared > 1:
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
    if bias is not None:
        length = bias.shape[-1]
        if length % 16:  # its rows must be aligned
            bias = functional.pad(bias, (0, -length % 16))[..., :length]
        bias = bias.expand(*q.shape[:3], length)
    return _efficient(q, k, v, bias, torch.is_grad_enabled(), is_causal=bias is None)[0]


def by_math(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    return _math(q, k, v, bias, is_causal=bias is None, enable_gqa=_shared(q, k))[0]


def by_varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, window: int | None
) -> Tensor:
    """Map q [S', B, H, E], k and v [S, B, K, E] to [S', B, H, E]: sequences, or documents, packed
    into one. S' queries are the last of S positions (model/mask.py)."""
    (length, batch), longest = q.shape[:2], (q.shape[0], k.shape[0])
    if documents is None:
        of_q, of_k = (
            torch.arange(0, (batch + 1) * each, each, dtype=torch.int32, device=q.device)
            for each in longest
        )
        first = (0,) * batch
    else:
        of_q, of_k, first, longest = documents
    # [T, heads, E], sequence after sequence; views if B is 1
    q = q.transpose(0, 1).flatten(0, 1)
    k, v = (_pack(t, first) for t in (k, v))
    sees = (-1 if window is None else window - 1, 0)  # keys behind, keys ahead
    # A document's last query is at its last key.
    y = varlen_attn(q, k, v, of_q, of_k, *longest, window_size=sees, **_SHARED_HEADS)
    assert isinstance(y, Tensor)  # no auxiliary output was requested
    return y.unflatten(0, (batch, length)).transpose(0, 1)


def _pack(x: Tensor, first: tuple[int, ...]) -> Tensor:
    """Map [S, B, …] to [T, …]: of each sequence b the positions from first[b] on."""
    if any(first):
        parts = [one[start:] for one, start in zip(x.unbind(1), first, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    return x.transpose(0, 1).flatten(0, 1)


CUDNN = Kernel("cuDNN", by_cudnn, (_cudnn,))
FLASH2 = Kernel("flash 2", by_flash, (_flash, _packed), packs=True)
FLASH3 = Kernel("flash 3", by_flash, (_flash, _packed), packs=True)
EFFICIENT = Kernel("efficient", by_efficient, (_efficient,))
MATH = Kernel("math", by_math, ())
ON_CPU = Kernel("flash (CPU)", by_torch, (_on_cpu,))
KERNELS = (CUDNN, FLASH3, FLASH2, EFFICIENT, MATH, ON_CPU)
# selective activation checkpointing keeps their results (parallel/activation.py)
OPERATORS = frozenset(operator for kernel in KERNELS for operator in kernel.operators)


@cache
def load_flash3() -> None:
    """Let torch's operators of flash attention run flash 3 in this process.

    Raises:
        ImportError, RuntimeError: the package is not there or does not fit this torch.
    """
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("FA3")


def unload_flash3() -> None:
    """Let them run flash 2 again, if `load_flash3` was called."""
    if load_flash3.cache_info().currsize:
        torch.nn.attention.restore_flash_attention_impl()
        load_flash3.cache_clear()
