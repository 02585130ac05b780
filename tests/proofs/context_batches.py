"""Batches with documents of every kind, and with targets that some ranks lack, for tests of context
parallelism."""

import contextlib
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import torch

from parallel.axes import MeshSizes
from parallel.context import ContextParallel, KeysAndValues
from proofs.parity.cases import BOS, SEQ_LEN, Case
from proofs.parity.run import check
from tests.planted import planted
from tokens import IGNORE

CP2 = Case(MeshSizes(cp=2))


# where documents begin, apart from position 0
DOCUMENTS = [
    [],
    list(range(1, SEQ_LEN)),  # one token each
    [3, 8, 15],  # of 3, 5, 7 and 1 tokens
    [1],  # longer than any rank's part
    [15],
    [4, 8, 12],  # at edges of chunks (cp 2)
    [2, 4, 6, 8, 10, 12, 14],  # at all edges (cp 4)
    [3, 5, 9, 13],  # next to edges
]


ROWS = 16  # of a batch: half as many as in other cases: enough for two kinds to follow each other


def batch(name):
    """Tokens and targets [ROWS, SEQ_LEN] with all kinds of `DOCUMENTS`, two of them in each pair of
    rows; some positions have no target."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(BOS + 1, 251, (ROWS, SEQ_LEN + 1), generator=generator)
    for row in range(ROWS):
        text[row, DOCUMENTS[(row + row // 8) % 8]] = BOS
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    if name == "rows without":  # of 5 and 6, micro-batches of 2 rows have no target, or in one row
        targets[torch.arange(ROWS) % 8 > 4] = IGNORE
    elif name == "first half without":
        targets[: ROWS // 2] = IGNORE
    elif name != "all":  # a whole rank has none
        for chunk in ContextParallel(*TARGETS[name]).chunks(SEQ_LEN):
            targets[:, chunk.start : chunk.stop] = IGNORE
    return tokens, targets


TARGETS = {  # the rank without targets: cp, rank
    "first of 2 without": (2, 0),
    "last of 2 without": (2, 1),
    "second of 4 without": (4, 1),
}


@cache
def in_each_step(name):
    """One function for each name, so that cases share their reference (proofs/parity/run.py)."""
    return lambda vocab_size, step: batch(name)


@contextlib.contextmanager
def given(name, bug=contextlib.nullcontext):
    with (
        patch("proofs.parity.cases.BATCH", ROWS),
        patch("proofs.parity.run.global_batch", in_each_step(name)),
        bug(),
    ):
        yield


def check_batch(ranks, case, rows, name, bug=contextlib.nullcontext):
    """As `check`, with the batch of this name, in micro-batches of `rows` sequences."""
    case = replace(case, num_microbatches=ROWS // case.layout.dp // rows)
    with given(name):  # to the reference too
        return check(ranks, case, sabotage=partial(given, name, bug))


@planted(KeysAndValues, "instead_of_keeping")
def other_keys_in_backward(instead_of_keeping, self):
    """What backward gathers again is not what forward gathered."""
    context = instead_of_keeping(self)
    if self.local is not None:
        self.local = self.local * 1.5
    return context
