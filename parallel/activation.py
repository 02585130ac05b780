"""Activation checkpointing: keep fewer tensors between forward and backward, and recompute the
others when backward needs them.

| mode      | kept per block                             | recomputed                              |
|-----------|--------------------------------------------|-----------------------------------------|
| none      | everything that autograd saves             | nothing                                 |
| selective | outputs of matrix products and attention   | norms, rotary, activations              |
| full      | the block's input                          | the forward, but not its last product   |

With tensor parallelism, selective also recomputes the first row-parallel product of a block and its
reduction. The results of row-parallel products are partial sums, [S, B, D] on every rank; the two
of a block are 2 tp times as large as a rank's part of the residual stream (for Llama 3 405B with
tp 8, over half of all that would be kept). The second one is not needed again.

(Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, section 5,
chosen by operation with torch's `create_selective_checkpoint_contexts`.)
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch_attn::_varlen_attn
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_ops = torch.ops.aten
PRODUCTS = {_ops.mm.default, _ops.addmm.default}
# The operations that cost the most floating-point operations per byte of their result.
EXPENSIVE = PRODUCTS | {
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
}


class _Thread(threading.local):
    """What this thread computes. (On a GPU, recomputation runs in a thread of autograd.)"""

    again = False  # whether it recomputes a block of which selective has kept the products
    partial = False  # whether its products are partial sums


_thread = _Thread()


@contextmanager
def partial_sums() -> Iterator[None]:
    """A context for products whose results are partial sums over tp: selective does not keep
    them."""
    _thread.partial = True
    try:
        yield
    finally:
        _thread.partial = False


def products_are_kept() -> bool:
    """Whether the next products are not computed, because selective has kept their results. Their
    input is then not read, and need not be gathered."""
    return _thread.again


class Unread(torch.Tensor):
    """A tensor with a shape but no memory, as the input of products whose results are kept. Reading
    it is an error: selective has not kept the operator."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, shape: Sequence[int]) -> "Unread":
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            raise AssertionError(
                f"selective recomputation has not kept the result of {func}: EXPENSIVE in "
                "parallel/activation.py does not have it"
            )
        with _disable_current_modes():
            view = func(torch.empty(args[0].shape, device="meta"), *args[1:], **(kwargs or {}))
        return cls(args[0], view.shape)


def _keep_expensive(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op not in EXPENSIVE or (op in PRODUCTS and _thread.partial):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a block's forward and of its recomputation."""
    forward, again = create_selective_checkpoint_contexts(_keep_expensive)
    if torch.compiler.is_compiling():  # it takes no other contexts, and a block has all of x
        return forward, again
    return forward, _recomputing(again)


@contextmanager
def _recomputing(inner: AbstractContextManager[Any]) -> Iterator[None]:
    _thread.again = True
    try:
        with inner:
            yield
    finally:
        _thread.again = False


def wrap_blocks(blocks: Iterable[nn.Module], mode: str, compile: bool) -> None:
    """Wrap each block's forward in activation checkpointing and `torch.compile`, in place. Call it
    before `fully_shard`, so that recomputation and compiled code run while FSDP has the weights
    gathered.

    Selective checkpointing is compiled with the block, and the compiler follows the same policy.
    Full checkpointing wraps the compiled block, which then runs its forward twice. It is not put
    inside: torch 2.13 fails there on the mesh of a DTensor weight, which it would have to keep for
    the recomputation.
    """
    for block in blocks:
        forward: Callable[..., Any] = block.forward
        if mode == "selective":
            forward = _checkpointed(forward, context_fn=_keep_products)
        if compile:
            forward = _compiled(forward)
        if mode == "full":
            forward = _checkpointed(forward)
        block.forward = forward


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    training = torch.compile(forward, fullgraph=True)

    # Evaluation runs uncompiled: without gradients, torch 2.13's tracer loses the context of an
    # autograd operation.
    def compiled(*args: Any) -> Any:
        return training(*args) if torch.is_grad_enabled() else forward(*args)

    return compiled


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # A plain function and not functools.partial, because the compiler traces into it and recognises
    # `checkpoint` there.
    def checkpointed(*args: Any) -> Any:
        # No block draws random numbers, so there is no random state to preserve.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return checkpointed
