"""Context parallelism computes what the unsharded model computes: with documents that begin
anywhere, and with targets that some ranks lack. (test_controls.py has the controls.)"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from model.attention import sliding_window
from parallel.axes import MeshSizes
from parallel.context import ContextParallel, in_order, number_of_pieces, sum_by_rank
from parallel.placement import chunk_range
from proofs.parity.cases import Case
from proofs.parity.chosen import WINDOW, context_cases
from tests.proofs.context_batches import CP2, TARGETS, check_batch
from tests.proofs.parity_tiers import strictly, thorough_but


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_the_sequence_and_the_work(size):
    """Every position has one rank, all ranks have as many, and their queries see as many keys in
    chunks (a chunk of c queries counts as c whole rows)."""
    length = 2 * size * 3
    parts = [ContextParallel(size, rank).chunks(length) for rank in range(size)]
    assert sorted(i for part in parts for chunk in part for i in chunk) == list(range(length))
    seen = {sum(len(chunk) * (chunk.stop + chunk.start + 1) / 2 for chunk in p) for p in parts}
    assert {sum(map(len, part)) for part in parts} == {ContextParallel(size).local_length(length)}
    assert len(seen) == 1
    assert [len(part) for part in parts] == [2] * (size - 1) + [1]
    # Control: of contiguous parts, the last has more work than the mean, unless it is the only one.
    last = chunk_range(length, size, size - 1)
    mean = length * (length + 1) / 2 / size
    most = len(last) * (last.stop + last.start + 1) / 2
    assert most / mean == pytest.approx(2 - 1 / size, rel=1 / length)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_all_chunks_are_summed_in_the_order_of_ranks(size):
    """In float32, and nothing of the memory that they are summed in is left."""
    torch.manual_seed(0)
    for rank in range(size):
        chunks = ContextParallel(size, rank).chunks(size * 6)
        gradients = [torch.randn(chunk.stop, 2).bfloat16() for chunk in chunks]
        expected = torch.zeros(size * 6, 2)
        for gradient in gradients:
            expected[: len(gradient)] += gradient
        total = torch.full_like(expected, torch.nan)
        sum_by_rank(gradients, total, size)
        assert torch.equal(in_order(total, size), expected)


def test_heads_are_divided_where_there_is_much_to_send():
    for heads, megabytes, pieces in ((8, 127, 1), (8, 128, 2), (8, 1000, 4), (6, 256, 3)):
        assert number_of_pieces(heads, megabytes * 2**20) == pieces


def seeing(window):
    keys = (("sliding_window", sliding_window.Settings(window=window)),)
    return {"attention": "sliding_window", "keys": keys}


MASKED = {"document_mask": True}
CP4, CP8 = Case(MeshSizes(cp=4)), Case(MeshSizes(cp=8))
GATHERS_AGAIN = context_cases()
# there, backward gathers keys and values between the pipeline's messages and other collectives, so
# their order matters
OVER_A_STRICT_GROUP = GATHERS_AGAIN[-2:]
BATCHES = {  # case, sequences of a micro-batch, which batch → whether `make test` runs it
    # a data-parallel rank whose rows are all padding: no division by zero
    (Case(MeshSizes(dp_shard=2)), 2, "first half without"): True,
    # documents begin anywhere; of cp 8, a chunk is one position
    (replace(CP2, num_kv_heads=8, **MASKED), 1, "all"): True,
    (Case(MeshSizes(cp=2, tp=2), activation_checkpointing="full", **MASKED), 4, "all"): False,
    (replace(CP4, **MASKED), 4, "all"): False,
    (replace(CP8, **MASKED, **WINDOW), 8, "all"): True,
    (replace(CP4, **MASKED, **WINDOW), 1, "all"): False,
    # windows end anywhere: of less and more than a chunk (4 tokens) and a rank's part (8); with a
    # mask of documents, there are rows of one document too
    **{
        (replace(CP2, **seeing(window), document_mask=window != 3), 2, "all"): window in (3, 9)
        for window in (1, 3, 4, 8, 9, 16)
    },
    # single sequences are gathered again in backward, with every schedule; some have no targets, so
    # a mean of means is another number
    **{
        (case, 1, "rows without"): (case.zero_stage, case.world, case.schedule) == (3, 4, "zb_h1")
        for case in GATHERS_AGAIN
    },
    # some ranks or sequences have no targets
    **{
        (replace(CP2, layout=MeshSizes(cp=size), document_mask=rows == 2), rows, name): (
            rows == 2 and name in ("second of 4 without", "rows without")
        )
        for name, (size, _) in {**TARGETS, "rows without": (2, 0)}.items()
        for rows in (1, 2)
    },
}
# schedules that are like others in what backward sends are left to `make parity`
PARITY_ONLY = [
    (case, 1, "rows without")
    for case in GATHERS_AGAIN
    if case.schedule in ("gpipe", "breadth_first")
    or (case.schedule == "interleaved_1f1b" and case.stages_per_rank != 2)
]


@pytest.mark.parametrize(
    ("case", "rows", "name"),
    thorough_but([each for each, quick in BATCHES.items() if quick], BATCHES, PARITY_ONLY),
    ids=str,
)
def test_batches(ranks, case, rows, name):
    with strictly(ranks) if case in OVER_A_STRICT_GROUP else nullcontext():
        row = check_batch(ranks, case, rows, name)
    assert not row.failures(), str(row)
