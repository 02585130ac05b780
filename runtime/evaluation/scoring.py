"""The log-likelihood of each row, the same on every layout.

The training step's evaluation returns one loss for a whole batch; here each row needs its own. So
the last stage's head is given another forward for a while, which returns the loss of each token,
[S/cp, B], and never has the whole logits (as linear_cross_entropy.py in training). A hook on the
stage adds them up to the losses of the rows, a vector with an element for every row of all tasks:

    row          0    1    2    3    4    5    …      each micro-batch fills the elements of its
    dp rank 0   2.3   ·   7.1   ·   4.0   ·           rows, the others are 0; the pipeline's runner
    dp rank 1    ·   5.2   ·   9.9   ·   1.4          adds the vectors of micro-batches
    ──────────────────────────────────────── +        one all-reduce over loss (dp × cp) and one
    all ranks   2.3  5.2  7.1  9.9  4.0  1.4          over pp, at the end

A rank with a part of a sequence (cp) adds the losses of the targets that it holds. tp ranks compute
the same vector: the normaliser of a token is gathered over tp as in training.

Rows are padded at their end. No position attends to a later one, so padding changes nothing. It
repeats the row's own tokens, so that a router sends it to as many experts as text. Most rows are
short, so each is computed in the shortest length that holds it, of a few powers of two (times the
parts into which ranks cut a sequence) and train.seq_len; a micro-batch has no more tokens than one
in training.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.kernels.backend import cdiv, exact, next_power_of_2
from model.kernels.cross_entropy import token_losses
from model.linear_cross_entropy import normaliser, pieces_of, tokens_of_piece
from model.transformer import Batch, Head, Transformer
from parallel.context import ContextParallel
from parallel.mesh import to_device
from parallel.pipeline.runner import PipelineRunner
from runtime.evaluation.rows import Row
from settings.checks import cuts_of_sequence
from tokens import IGNORE
from training.step import TrainStep

SHORTEST = 32  # inputs of a padded row, at least, where train.seq_len is longer


@dataclass(frozen=True, kw_only=True)
class RowBatch(Batch):
    """A micro-batch of which the losses of its rows are wanted: targets that are not scored are
    `IGNORE`."""

    rows: Tensor  # [B] int64, the rows' numbers
    num_rows: int  # of all tasks


def lengths(rows: Sequence[Row], seq_len: int, parts: int) -> dict[int, list[int]]:
    """The padded length of each row: length → the numbers of its rows. A length is a power of two
    times `parts`, into which ranks cut a sequence, or `seq_len`, a multiple of them too."""
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        least = cdiv(max(row.inputs, SHORTEST), parts)  # in each part
        length = min(seq_len, parts * next_power_of_2(least))
        found.setdefault(length, []).append(number)
    return dict(sorted(found.items()))


def make_batch(
    rows: Sequence[Row],
    numbers: Sequence[int | None],
    length: int,
    device: str,
    cp: ContextParallel = ContextParallel(),  # noqa: B008  (it cannot be changed)
) -> RowBatch:
    """A micro-batch of the rows `numbers`; None: a row of which nothing is scored."""
    tokens = np.zeros((len(numbers), length), np.int64)
    targets = np.full((len(numbers), length), IGNORE, np.int64)
    for place, number in enumerate(numbers):
        row = rows[number or 0]
        tokens[place] = np.resize(row.tokens[:-1], length)
        if number is not None:
            scored = slice(row.inputs - row.scored, row.inputs)
            targets[place, scored] = row.tokens[1:][scored]
    positions = torch.arange(length).unsqueeze(1)  # [S, 1]
    held_tokens, held_targets = (
        to_device(cp.cut(torch.from_numpy(each), 1).T.contiguous(), device)
        for each in (tokens, targets)
    )
    return RowBatch(
        held_tokens,
        held_targets,
        to_device(cp.cut(positions, 0), device),
        rows=to_device(torch.tensor([number or 0 for number in numbers]), device),
        num_rows=len(rows),
    )


def losses_of_tokens(head: Head, x: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, [S/cp, B] in float32 (float64), 0 where there is no target; from x,
    [S/(cp·tp), B, D] with sequence parallelism, else [S/cp, B, D], and the targets [S/cp, B].

    Logits are computed piece by piece, of scored tokens only. Over tp, each piece gathers x with
    sequence parallelism, and three numbers per token.
    """
    tp, weight, flat = head.tp, head.local_weight(), targets.flatten()
    losses = torch.zeros(len(flat), dtype=exact(x.dtype), device=x.device)
    places = torch.arange(len(flat), device=x.device).view_as(targets)
    size = tokens_of_piece(x, head.vocab_size, tp.group)
    for piece, held in pieces_of(x, places, tp, size):
        at = held.flatten()
        scored = (flat[at] != IGNORE).nonzero().flatten()  # the same on all tp ranks
        if len(scored):
            y = flat[at[scored]]
            z = head.matmul.forward(piece.flatten(0, 1)[scored], weight)
            row = normaliser(z, y, head.first_row, tp.group, head.kernels)
            losses[at[scored]] = token_losses(row, y, 0.0).to(losses.dtype)
    return losses.view_as(targets)


@contextmanager
def losses_of_rows(stage: Transformer) -> Iterator[None]:
    """A context in which a last stage, called with a `RowBatch`, returns the summed loss of each
    row of all tasks, [num_rows] float64, in nats: 0 for those that are not in the batch."""
    head = stage.head
    assert head is not None

    def forward(x: Tensor, targets: Tensor, _: Tensor | None) -> Tensor:
        return losses_of_tokens(head, x, targets)

    def sum_up(_: nn.Module, inputs: tuple[Any, ...], losses: Tensor) -> Tensor:
        batch: RowBatch = inputs[1]
        total = torch.zeros(batch.num_rows, dtype=torch.float64, device=losses.device)
        return total.index_add_(0, batch.rows, losses.double().sum(0))

    head.forward = forward  # type: ignore[method-assign,assignment]
    hook = stage.register_forward_hook(sum_up)
    try:
        yield
    finally:
        hook.remove()
        del head.forward


@torch.no_grad()
def score_on_mesh(
    train: TrainStep,
    rows: Sequence[Row],
    seq_len: int,
    goes_on: Callable[[], bool],
) -> list[float] | None:
    """The log-likelihood of each row in nats, through a training step's stages. Every rank of its
    mesh calls it, and gets the same.

    Args:
        seq_len: the longest row. (That of the step may be another: nothing here depends on it.)
        goes_on: called before each group of micro-batches. If it returns False, on every rank, so
            does this function return None.
    """
    mesh, parallel = train.mesh, train.config.parallel
    total = torch.zeros(len(rows), dtype=torch.float64, device=mesh.device)
    last = train.stages.get(parallel.num_stages - 1)
    most = train.config.num_microbatches(mesh.batch.size)
    parts = math.prod(cuts_of_sequence(parallel).values())
    for length, numbers in lengths(rows, seq_len, parts).items():
        groups, size = _micro_batches(train, numbers, seq_len // length)
        transfers, data = train.transfers(length, size), train.runner.data
        runner = PipelineRunner(train.stages, parallel.num_stages, transfers, data)
        for at in range(0, len(groups), most):
            if not goes_on():
                return None
            batches = [
                make_batch(rows, group, length, mesh.device, train.cp)
                for group in groups[at : at + most]
            ]
            program = train.forward_program(len(batches))
            with nullcontext() if last is None else losses_of_rows(last):
                found = runner.run(program, batches)
            if found is not None:
                total += found
    for view in (mesh.loss, mesh.pp):  # [num_rows]; tp ranks already have the same
        dist.all_reduce(total, group=view.group)
    return (-total).tolist()


def _micro_batches(
    train: TrainStep, numbers: Sequence[int], shorter: int
) -> tuple[list[list[int | None]], int]:
    """This data-parallel rank's micro-batches, of rows at least `shorter` times shorter than the
    longest, and their number of rows. All ranks have equally many; missing rows are None."""
    config, dp = train.config, train.mesh.batch.size
    mine: list[int | None] = [*numbers[train.mesh.batch.rank :: dp]]
    longest = cdiv(len(numbers), dp)
    # tokens as in training; enough micro-batches to fill the pipeline, if there are enough rows
    size = max(1, config.train.micro_batch_size * shorter)
    size = min(size, cdiv(longest, config.parallel.num_stages))
    mine += [None] * (cdiv(longest, size) * size - len(mine))
    return [mine[at : at + size] for at in range(0, len(mine), size)], size


@torch.no_grad()
def score_whole(
    model: Transformer, rows: Sequence[Row], seq_len: int, tokens_at_once: int, device: str
) -> list[float]:
    """The log-likelihood of each row in nats, by a model in one stage. Rows of `tokens_at_once`
    inputs, or one longer row, are computed at a time."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=device)
    with losses_of_rows(model):
        for length, numbers in lengths(rows, seq_len, 1).items():
            size = max(1, tokens_at_once // length)
            for at in range(0, len(numbers), size):
                total += model(None, make_batch(rows, numbers[at : at + size], length, device))
    return (-total).tolist()
