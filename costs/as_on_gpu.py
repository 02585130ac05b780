"""Tensors without memory that code takes for a GPU's.

Tensors of torch's meta device have shapes and dtypes only. Inside `AsOnGpu` what the model's code
asks of a GPU is answered so that it takes the way it takes on one:

    a tensor's `is_cuda`   True: Triton kernels (their registered shapes), products that sum in a
                           wider dtype
    scaled dot-product     flash attention's operator, or, with a bias, the memory-efficient one:
    attention              the output and a number for each row are kept, no square of S × S

torch has fake tensors for the same purpose. They do this in Python, operation by operation, and
take four times as long.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

DEVICE = "meta"
_ops = torch.ops.aten


class AsOnGpu(TorchFunctionMode):
    """Of the calling thread, while it is entered."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].device.type == DEVICE
        if func is functional.scaled_dot_product_attention and args[0].device.type == DEVICE:
            q, k, v = args
            return attention(q, k, v, kwargs["attn_mask"], kwargs["is_causal"])
        return func(*args, **kwargs)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """q [B, H, S, E], k and v [B, K, S, E], as CUDA's operators take them."""
    if bias is None:
        return _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]
    shared = q.shape[1] // k.shape[1]  # this one takes no fewer key/value heads
    k, v = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (k, v))
    whole = bias.expand(-1, q.shape[1], -1, -1)
    return _ops._scaled_dot_product_efficient_attention(q, k, v, whole, True, 0.0, causal)[0]
