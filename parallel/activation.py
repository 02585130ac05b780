"""Wraps blocks in activation checkpointing and `torch.compile`.

Activation checkpointing keeps fewer tensors between forward and backward, and recomputes the others
when backward needs them:

| mode               | kept per block                      | recomputed                            |
|--------------------|-------------------------------------|---------------------------------------|
| none               | everything that autograd saves      | nothing                               |
| selective          | outputs of products and attention   | norms, rotary, SwiGLU                 |
| full_but_attention | its input, and attention's output   | as full, but not attention            |
| full               | its input                           | the forward, but not its last product |

With tensor parallelism, selective keeps the outputs of column-parallel layers (kept.py), so that
their inputs are not gathered again. It recomputes the first row-parallel product of a block and its
reduction. The results of these products are partial sums, [S, B, D] on every rank; the two of a
block are 2 tp times as large as a rank's part of the residual stream (for Llama 3 405B with tp 8,
over half of all that would be kept). The second one is not needed again.

In a long sequence, attention costs more to compute per byte of output than anything else. If the
heads together are as wide as the model, its output is no larger than the block's input.

Of experts, selective keeps the rows that a rank has received and the outputs of the first products.
Every mode keeps which experts the tokens chose (kept.py).

(Chen et al. 2016, https://arxiv.org/abs/1604.06174; selective: Korthikanti et al. 2022, section 5,
chosen by operation with torch's `create_selective_checkpoint_contexts`.)

Each compiled part is one graph (`fullgraph`): whatever the compiler cannot trace is an error, not a
silent return to Python. With context parallelism a block has two such parts, before its attention
and after it (`halves`, model/transformer.py). Attention itself runs in between as it does without
the compiler (context.py): a compiled collective would be waited for at once, and the compiler does
not trace the hooks by which backward gathers again. Runs that note logits (model/largest_logits.py)
have the same two parts. Any other block is one graph.
"""

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from parallel.dispatch import TokenDispatch
from parallel.expert import ExpertLinear
from parallel.kept import KeptOutputs
from parallel.tensor import ParallelLinear

Forward = Callable[..., Any]
Mode = Literal["none", "selective", "full_but_attention", "full"]
PRODUCTS = {
    torch.ops.aten.mm.default, torch.ops.aten.mm.dtype, torch.ops.aten.addmm.default,
}  # fmt: skip


def _keep(operations: Set[Any], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op in operations
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def gathers_again(mode: Mode) -> bool:
    """Whether backward must itself gather the keys and values that forward gathered over cp
    (context.py). In the other modes the recomputation of a block does."""
    return mode == "none"


def wrap_blocks(
    blocks: Iterable[Any],
    mode: Mode,
    compile: bool,
    tp: int,
    attention: Set[Any],
    apart: bool = False,
) -> None:
    """Wrap each block's forward in activation checkpointing and `torch.compile`, in place. Call it
    before `fully_shard`, so that recomputation and compiled code run while FSDP has the weights
    gathered.

    Args:
        mode: a row of the table above.
        tp: the number of tensor-parallel ranks.
        attention: the operators that compute attention, which the model knows. With products, they
            cost the most floating-point operations per byte of their result.
        apart: compiled blocks whose tokens attend to each other are two graphs, because what runs
            in between cannot be compiled: it communicates over cp, or notes logits.

    Selective checkpointing, also that of attention alone, is compiled with the block, and the
    compiler follows the same policy. If a block is two graphs, each and the attention between
    them is checkpointed by itself: so what attention is called with is kept too.
    Full checkpointing wraps the compiled block, which then runs its forward twice. It is not put
    inside: torch 2.13 fails there on the mesh of a DTensor weight, which it would have to keep for
    the recomputation.
    """
    for block in blocks:
        forward: Forward = block.forward
        selective: Callable[[Forward], Forward] = _unchanged
        if mode in ("selective", "full_but_attention"):
            selection = _selection(block, tp, attention, products=mode == "selective")
            selective = partial(_checkpointed, context_fn=selection)
        halves = block.halves() if compile and apart else None
        if halves is not None:
            forward = _compiled_around_attention(forward, halves, selective)
        else:
            forward = selective(forward)
            if compile:
                forward = _in_training(torch.compile(forward, fullgraph=True), otherwise=forward)
        if mode == "full":
            kept = _kept_by_experts(block)
            options = {"context_fn": partial(kept.contexts, outputs=False)} if kept else {}
            forward = _checkpointed(forward, **options)
        block.forward = forward


def _selection(block: nn.Module, tp: int, attention: Set[Any], products: bool) -> Callable[[], Any]:
    """What is kept of a block besides its input: the output of attention, and perhaps those of
    `products`. Returns contexts for its forward and recomputation."""
    operations = attention | PRODUCTS if products and tp == 1 else attention
    of_experts = _kept_by_experts(block)
    kept = of_experts or KeptOutputs()
    keeping = (ExpertLinear,) if tp == 1 else (ExpertLinear, ParallelLinear)
    for layer in block.modules():
        if products and isinstance(layer, keeping):
            layer.keep_in(kept)
    of_operations = partial(create_selective_checkpoint_contexts, partial(_keep, operations))
    if not of_experts and (tp == 1 or not products):
        return of_operations  # in a form that torch.compile can trace: its own function, a policy
    return lambda: tuple(map(_both, of_operations(), kept.contexts(outputs=products)))


def _kept_by_experts(block: nn.Module) -> KeptOutputs | None:
    """What keeps the choice of experts, and the routes, if the block has experts."""
    return next((each.kept for each in block.modules() if isinstance(each, TokenDispatch)), None)


def _unchanged(forward: Forward) -> Forward:
    return forward


def _checkpointed(forward: Forward, **options: Any) -> Forward:
    # A plain function and not functools.partial, because the compiler traces into it and recognises
    # `checkpoint` there.
    def checkpointed(*args: Any) -> Any:
        # No block draws random numbers, so there is no random state to preserve.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return checkpointed


def _compiled_around_attention(
    forward: Forward, halves: tuple[Forward, Forward], checkpointed: Callable[[Forward], Forward]
) -> Forward:
    """`forward(x, *others, attend)` of a block as two graphs, its `halves`, with the call of
    `attend` between them. Each of the three is wrapped by `checkpointed`."""
    before, after = (torch.compile(checkpointed(half), fullgraph=True) for half in halves)

    def training(x: Tensor, *inputs: Any) -> Any:
        *others, attend = inputs
        return after(checkpointed(attend)(*before(x, *others)), x)

    return _in_training(training, otherwise=forward)


def _in_training(training: Forward, otherwise: Forward) -> Forward:
    # Evaluation runs uncompiled: without gradients, torch 2.13's tracer loses the context of an
    # autograd operation.
    def chosen(*args: Any) -> Any:
        return training(*args) if torch.is_grad_enabled() else otherwise(*args)

    return chosen
