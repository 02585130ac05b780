"""Blocks compiled with `torch.compile`. Each compiled part is one graph (`fullgraph`): whatever the
compiler cannot trace is an error, not a silent return to Python.

With context parallelism a block has two such parts, before its attention and after it. Attention
itself runs in between as it does without the compiler (context.py): a compiled collective would be
waited for at once, and the compiler does not trace the hooks by which backward gathers again.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from parallel.context import SplitAttention

Forward = Callable[..., Any]


def compiled(forward: Forward) -> Forward:
    """`forward(x, *inputs)` of a block, as one graph."""
    training = torch.compile(forward, fullgraph=True)
    return _in_training(training, otherwise=forward)


def compiled_around_attention(
    forward: Forward, checkpointed: Callable[[Forward], Forward]
) -> Forward:
    """`forward(x, *inputs)` of a block, of whose inputs one is a `SplitAttention`, as two graphs
    with a call of this input between them. Each of the three is wrapped by `checkpointed`.

    Both graphs are traced from the whole `forward`, with another function for the input: one that
    ends the first graph, and one that returns the result of attention to the second. There the
    compiler drops the operations before attention, because nothing uses what they compute.
    """

    def before(x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        """The queries, keys and values that attention is called with."""
        try:
            forward(x, *_with(_end, inputs))
        except _Reached as reached:
            return reached.args
        raise AssertionError("the block does not call its attention")

    def after(y: Tensor, x: Tensor, *inputs: Any) -> Tensor:
        """The output of the block, given that of attention."""
        return forward(x, *_with(lambda *_: y, inputs))

    first, last = (torch.compile(checkpointed(part), fullgraph=True) for part in (before, after))

    def training(x: Tensor, *inputs: Any) -> Any:
        attend, *others = (each for each in inputs if isinstance(each, SplitAttention))
        assert not others, "a compiled block with cp has one attention: set train.compile=false"
        return last(checkpointed(attend)(*first(x, *inputs)), x, *inputs)

    return _in_training(training, otherwise=forward)


class _Reached(Exception):
    """Attention is called, with these arguments."""


def _end(*arguments: Tensor) -> Tensor:
    raise _Reached(*arguments)


def _with(attend: Forward, inputs: Iterable[Any]) -> list[Any]:
    """`inputs` with `attend` for the attention among them."""
    return [attend if isinstance(each, SplitAttention) else each for each in inputs]


def _in_training(training: Forward, otherwise: Forward) -> Forward:
    # Evaluation runs uncompiled: without gradients, torch 2.13's tracer loses the context of an
    # autograd operation.
    def chosen(*args: Any) -> Any:
        return training(*args) if torch.is_grad_enabled() else otherwise(*args)

    return chosen
