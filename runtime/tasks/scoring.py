"""The log-likelihood of each row, the same on every layout.

The training step's evaluation returns one loss for a whole batch; here each row needs its own. The
last stage is called without targets, so it returns logits [S/cp, B, V/tp]. A hook on it replaces
them by the losses of the rows, a vector with an element for every row of all tasks:

    row          0    1    2    3    4    5    …      each micro-batch fills the elements of its
    dp rank 0   2.3   ·   7.1   ·   4.0   ·           rows, the others are 0; the pipeline's runner
    dp rank 1    ·   5.2   ·   9.9   ·   1.4          adds the vectors of micro-batches
    ──────────────────────────────────────── +        one all-reduce over loss (dp × cp) and one
    all ranks   2.3  5.2  7.1  9.9  4.0  1.4          over pp, at the end

A rank with a part of a sequence (cp) adds the losses of the targets that it holds. tp ranks compute
the same vector: the normaliser of a token is gathered over tp as in training (cross_entropy.py).

Rows are padded at their end. No position attends to a later one, so padding changes nothing. It
repeats the row's own tokens, so that a router sends it to as many experts as text. Most rows are
short, so each is computed in the shortest length that holds it, of train.seq_len halved several
times; a micro-batch has as many tokens as one in training, and fewer where its logits would be
large.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.kernels.backend import cdiv
from model.kernels.cross_entropy import normaliser, token_losses
from model.kernels.linear_cross_entropy import PIECE_BYTES
from model.transformer import Batch, Transformer, hidden_shape
from parallel.context import ContextParallel
from parallel.mesh import to_device
from parallel.pipeline.runner import PipelineRunner
from parallel.pipeline.transfer import Transfers
from runtime.tasks.rows import Row
from tokens import IGNORE
from training.config import Config, cuts_of_sequence
from training.step import TrainStep

SHORTEST = 32  # inputs of a padded row, at least, where train.seq_len is longer
LOGITS_BYTES = 1 << 30  # of a micro-batch with several rows


@dataclass(frozen=True, kw_only=True)
class RowBatch(Batch):
    """A micro-batch whose logits are replaced by the losses of its rows. N: the scored tokens that
    this cp rank holds."""

    places: Tensor  # [N] int64, positions in the flattened [S/cp · B]
    scored: Tensor  # [N] int64, their targets
    rows: Tensor  # [N] int64, their rows' numbers
    num_rows: int  # of all tasks


def lengths(rows: Sequence[Row], seq_len: int, parts: int) -> dict[int, list[int]]:
    """The padded length of each row: length → the numbers of its rows. A length is a multiple of
    `parts`, into which ranks cut a sequence, as `seq_len` is."""
    found: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        length = seq_len
        while length % (2 * parts) == 0 and length // 2 >= max(row.inputs, SHORTEST):
            length //= 2
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
    of_rows = torch.tensor([number or 0 for number in numbers])
    mine = cp.cut(torch.from_numpy(targets), 1).T.flatten()  # [S/cp · B]
    places = (mine != IGNORE).nonzero().flatten()
    positions = torch.arange(length).unsqueeze(1)  # [S, 1]
    return RowBatch(
        to_device(cp.cut(torch.from_numpy(tokens), 1).T.contiguous(), device),
        None,
        to_device(cp.cut(positions, 0), device),
        places=to_device(places, device),
        scored=to_device(mine[places], device),
        rows=to_device(of_rows[places % len(numbers)], device),
        num_rows=len(rows),
    )


@contextmanager
def losses_of_rows(stage: Transformer) -> Iterator[None]:
    """A context in which a last stage, called with a `RowBatch`, returns the summed loss of each
    row of all tasks, [num_rows] float64, in nats: 0 for those that are not in the batch."""
    head = stage.head
    assert head is not None

    def losses(_: nn.Module, inputs: tuple[Any, ...], logits: Tensor) -> Tensor:
        batch: RowBatch = inputs[1]
        total = torch.zeros(batch.num_rows, dtype=torch.float64, device=logits.device)
        flat = logits.flatten(0, 1)  # [T, V/tp]
        piece_bytes = PIECE_BYTES.get(logits.device.type, PIECE_BYTES["cuda"])
        widest = cdiv(head.vocab_size, head.tp.group.size())  # all ranks cut alike
        piece = max(1, piece_bytes // (widest * logits.element_size()))
        for places, targets, rows in zip(
            *(each.split(piece) for each in (batch.places, batch.scored, batch.rows)), strict=True
        ):
            # all-gather over tp of three numbers per token
            row = normaliser(flat[places], targets, head.first_row, head.tp.group, head.kernels)
            total.index_add_(0, rows, token_losses(row, targets, 0.0).double())
        return total

    hook = stage.register_forward_hook(losses)
    try:
        yield
    finally:
        hook.remove()


class PipelineScorer:
    """Scores rows through a training step's stages, on every rank of its mesh.

    seq_len: the longest row. (That of the step may be another: nothing here depends on it.)
    """

    def __init__(self, train: TrainStep, seq_len: int) -> None:
        self.train, self.seq_len = train, seq_len
        self.runners: dict[tuple[int, int], PipelineRunner] = {}  # by length and rows

    @torch.no_grad()
    def __call__(
        self, rows: Sequence[Row], goes_on: Callable[[], bool] = lambda: True
    ) -> list[float] | None:
        """The log-likelihood of each row in nats, the same on every rank. `goes_on` is called
        before each group of micro-batches; None: it returned False, on every rank."""
        train, mesh = self.train, self.train.mesh
        total = torch.zeros(len(rows), dtype=torch.float64, device=mesh.device)
        last = train.stages.get(train.config.parallel.num_stages - 1)
        parts = int(np.prod(list(cuts_of_sequence(train.config.parallel).values())))
        for length, numbers in lengths(rows, self.seq_len, parts).items():
            for group, size in self._groups(numbers, length):
                if not goes_on():
                    return None
                batches = [make_batch(rows, each, length, mesh.device, train.cp) for each in group]
                runner, program = self._runner(length, size), train.forward_program(len(batches))
                if last is None:
                    runner.evaluate(program, batches)
                    continue
                with losses_of_rows(last):
                    found = runner.evaluate(program, batches)
                assert found is not None
                total += found
        for view in (mesh.loss, mesh.pp):  # [num_rows]; tp ranks already have the same
            dist.all_reduce(total, group=view.get_group())
        return (-total).tolist()

    def _groups(
        self, numbers: Sequence[int], length: int
    ) -> Iterator[tuple[list[list[int | None]], int]]:
        """This data-parallel rank's micro-batches in groups of at most those of a training step,
        and their number of rows. All ranks have equally many; missing rows are None."""
        train, mesh = self.train, self.train.mesh
        config, dp = train.config, mesh.dp_size
        mine: list[int | None] = [*numbers[mesh.dp_rank :: dp]]
        longest = cdiv(len(numbers), dp)
        # enough micro-batches to fill the pipeline, if there are enough rows
        size = min(
            rows_at_once(config, length, self.seq_len),
            cdiv(longest, config.parallel.num_stages),
        )
        mine += [None] * (cdiv(longest, size) * size - len(mine))
        batches = [mine[at : at + size] for at in range(0, len(mine), size)]
        most = config.num_microbatches(dp)
        for at in range(0, len(batches), most):
            yield batches[at : at + most], size

    def _runner(self, length: int, size: int) -> PipelineRunner:
        """A runner whose transfers have the shape of such micro-batches."""
        if (length, size) not in self.runners:
            train, mesh, parallel = self.train, self.train.mesh, self.train.config.parallel
            cut = train.cp.size * (mesh.tp.size() if parallel.sequence_parallel else 1)
            shape = hidden_shape(train.config.model, length // cut, size)
            transfers = Transfers(mesh.pp.get_group(), shape, train.precision.compute, mesh.device)
            self.runners[length, size] = PipelineRunner(
                dict(train.stages), parallel.num_stages, transfers, train.runner.data, False
            )
        return self.runners[length, size]


def rows_at_once(config: Config, length: int, seq_len: int) -> int:
    """Rows of `length` inputs in a micro-batch: with as many tokens as in training, and logits of
    at most LOGITS_BYTES on a rank, but at least one row."""
    width = cdiv(config.model.vocab_size, config.parallel.tp)
    of_row = length // config.parallel.cp * width * (8 if config.train.dtype == "float64" else 4)
    by_tokens = config.train.micro_batch_size * seq_len // length
    return max(1, min(by_tokens, LOGITS_BYTES // of_row))


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
