"""Activation checkpointing: keep less between forward and backward, compute it again when backward
needs it.

| mode      | kept per block                             | computed again                          |
|-----------|--------------------------------------------|-----------------------------------------|
| none      | everything autograd asks for               | nothing                                 |
| selective | outputs of matrix products and attention   | norms, rotary, activations, collectives |
| full      | the block's input                          | the whole forward                       |

With tensor parallelism, selective computes the row-parallel products again too: a partial sum is
[S, B, D] on every rank; two of them are 2 tp times what a rank holds of the residual stream (for
Llama 3 405B with tp 8, half of all that is kept).

(Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, section 5,
by operation as in torch's `create_selective_checkpoint_contexts`.)
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ops = torch.ops.aten
PRODUCTS = {_ops.mm.default, _ops.addmm.default}
# What costs the most floating-point operations per byte kept.
EXPENSIVE = PRODUCTS | {
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


def _keep_expensive(
    width: int, tp: int, ctx: Any, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if op not in EXPENSIVE:
        return CheckpointPolicy.PREFER_RECOMPUTE
    # A column-parallel product sums over all of D, a row-parallel one over this rank's part of
    # something. Where that part is as wide as D by chance, it is kept: more memory, the same
    # numbers.
    is_partial = op in PRODUCTS and tp > 1 and args[-2].shape[-1] != width
    return CheckpointPolicy.PREFER_RECOMPUTE if is_partial else CheckpointPolicy.MUST_SAVE


def wrap_blocks(blocks: Iterable[nn.Module], mode: str, compile: bool, width: int, tp: int) -> None:
    """Make each block's forward a checkpoint and a compiled graph, in place. Call it before
    `fully_shard`: recomputation and compiled code then run inside the gathering of weights.
    width: D; tp: ranks of tensor parallelism.

    Selective checkpointing is compiled with the block: the compiler decides by the same policy what
    to keep. Full checkpointing is put around the compiled block, which runs forward twice as it is;
    inside, torch 2.13 stumbles over the mesh of a DTensor weight that it would have to keep for the
    recomputation.
    """
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        if mode == "selective":
            policy = partial(
                create_selective_checkpoint_contexts, partial(_keep_expensive, width, tp)
            )
            forward = _checkpointed(forward, context_fn=policy)
        if compile:
            forward = _compiled(forward)
        if mode == "full":
            forward = _checkpointed(forward)
        block.forward = forward


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    training = torch.compile(forward, fullgraph=True)

    # Evaluation runs as it is written: without gradients torch 2.13's tracer loses the context of
    # an autograd operation.
    def compiled(*args: Any) -> Any:
        return training(*args) if torch.is_grad_enabled() else forward(*args)

    return compiled


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # A function of our own and no functools.partial: the compiler enters ours and knows what
    # `checkpoint` means inside it.
    def checkpointed(*args: Any) -> Any:
        # Nothing here draws random numbers, so there is no random state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return checkpointed
