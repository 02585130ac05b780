"""Makes the model's code treat tensors of torch's meta device as GPU tensors.

Meta tensors have shapes and dtypes, but no data. Inside `AsOnGpu` the model's code takes the path
that it takes on a GPU:

    a tensor's `is_cuda`   is True, which selects Triton kernels (their fake implementations) and
                           matrix products that sum in a wider dtype
    attention              is the kernel that is chosen for the GPU `PLANNED` in
                           model/kernels/attention_choice.py
    a layer that calls     calls flash attention's operator, or, with a bias, the memory-efficient
    torch's scaled_dot_    one: they save the output and one number per row, and no S × S matrix
    product_attention

torch has fake tensors for the same purpose, but they work in Python, operation by operation, and
take four times as long.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DEVICE = "meta"
_ops = torch.ops.aten


def _sum_into(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


# torch 2.11 misreads the arguments of a product that sums in a wider dtype if it has no data.
_REGISTERED = torch.library.Library("aten", "IMPL", DEVICE.capitalize())
_REGISTERED.impl("addmm.dtype_out", _sum_into, allow_override=True)


class AsOnGpu(TorchFunctionMode):
    """A context in which the calling thread treats meta tensors as GPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].device.type == DEVICE
        if func is functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        return func(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call the operator that torch's `scaled_dot_product_attention` uses on a GPU, for query
    [B, H, S, E], key [B, K, S, E] and value [B, K, S, E']."""
    q, k, v, flash = query, key, value, query.shape[-1] == value.shape[-1]
    if q.device.type != DEVICE:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and flash:
        operator = _ops._scaled_dot_product_flash_attention
        return operator(q, k, v, dropout_p, is_causal, scale=scale)[0]
    shared = q.shape[1] // k.shape[1]  # this operator needs as many key/value heads as query heads
    k, v = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (k, v))
    bias = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
    operator = _ops._scaled_dot_product_efficient_attention
    return operator(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]
