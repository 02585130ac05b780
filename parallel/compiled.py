"""Blocks compiled with `torch.compile`. Each compiled part is one graph (`fullgraph`): whatever the
compiler cannot trace is an error, not a silent return to Python.

With context parallelism a block has two such parts, before its attention and after it (`halves`,
model/transformer.py). Attention itself runs in between as it does without the compiler
(context.py): a compiled collective would be waited for at once, and the compiler does not trace the
hooks by which backward gathers again. A block that does not attend over cp is one graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Forward = Callable[..., Any]


def compiled(forward: Forward) -> Forward:
    """`forward(x, *inputs)` of a block, as one graph."""
    training = torch.compile(forward, fullgraph=True)
    return _in_training(training, otherwise=forward)


def compiled_around_attention(
    forward: Forward,
    halves: tuple[Forward, Forward],
    checkpointed: Callable[[Forward], Forward],
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
