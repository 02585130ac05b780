"""Activation checkpointing: keep less between forward and backward, compute it again when backward needs it.

| mode      | kept per block                             | computed again                          |
|-----------|--------------------------------------------|-----------------------------------------|
| none      | everything autograd asks for               | nothing                                 |
| selective | outputs of matrix products and attention   | norms, rotary, activations, collectives |
| full      | the block's input                          | the whole forward                       |

(Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, section 5, by operation as in torch's
`create_selective_checkpoint_contexts`.)
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MODES = ("none", "selective", "full")

_ops = torch.ops.aten
# What costs the most floating-point operations per byte kept.
EXPENSIVE = {
    _ops.mm.default,
    _ops.addmm.default,
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
}


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str) -> None:
    """Make each block's forward a checkpoint, in place. Call it before `fully_shard` and before `compile`, so that the
    recomputation runs inside the gathered weights and inside the compiled graph."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here draws random numbers
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        block.forward = partial(checkpoint, forward, **options)
