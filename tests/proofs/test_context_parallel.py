"""Context parallelism computes what the unsharded model computes: with documents that begin
anywhere, and with targets that some ranks lack. (test_context_controls.py has the controls.)"""

from itertools import product

import pytest
import torch

from parallel.axes import MeshSizes
from parallel.context import ContextParallel, in_order, number_of_pieces, sum_by_rank
from parallel.pipeline.schedules import SCHEDULES
from parallel.placement import chunk_range
from proofs.parity.__main__ import WORLDS, plan
from proofs.parity.cases import SEQ_LEN, Case, option_values
from proofs.parity.chosen import context_cases
from tests.proofs.context_batches import (
    CP2,
    DOCUMENTS,
    TARGETS,
    WINDOW,
    batch,
    check_batch,
    with_rows,
)
from tests.proofs.parity_tiers import agrees, thorough_but
from tokens import IGNORE


def layouts(*sizes):
    return [ContextParallel(size, rank) for size in sizes for rank in range(size)]


# --- who has what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_share_the_sequence_and_the_work(size):
    """Every position has one rank, all ranks have as many, and their queries see as many keys in
    chunks (a chunk of c queries counts as c whole rows)."""
    length = 2 * size * 3
    parts = [cp.chunks(length) for cp in layouts(size)]
    assert sorted(i for part in parts for chunk in part for i in chunk) == list(range(length))
    seen = {sum(len(chunk) * (chunk.stop + chunk.start + 1) / 2 for chunk in p) for p in parts}
    assert len({sum(map(len, part)) for part in parts}) == len(seen) == 1
    assert [len(part) for part in parts] == [2] * (size - 1) + [1]
    # Control: of contiguous parts, the last has more work than the mean, unless it is the only one.
    last = chunk_range(length, size, size - 1)
    mean = length * (length + 1) / 2 / size
    most = len(last) * (last.stop + last.start + 1) / 2
    assert most / mean == pytest.approx(2 - 1 / size, rel=1 / length)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_order_of_ranks_and_that_of_the_sequence(size):
    sequence = torch.arange(size * 6).unsqueeze(1)
    cut = torch.cat([cp.cut(sequence, 0) for cp in layouts(size)])
    assert not torch.equal(cut, sequence)
    assert torch.equal(in_order(cut, size), sequence)
    assert torch.equal(ContextParallel(size).cut(sequence.T, 1).T, cut[:6])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_of_all_chunks_are_summed_in_the_order_of_ranks(size):
    torch.manual_seed(0)
    for cp in layouts(size):
        gradients = [torch.randn(chunk.stop, 2) for chunk in cp.chunks(size * 6)]
        expected = torch.zeros(size * 6, 2)
        for gradient in gradients:
            expected[: len(gradient)] += gradient
        total = torch.full_like(expected, torch.nan)
        sum_by_rank(gradients, total, size)
        assert torch.equal(in_order(total, size), expected)


@pytest.mark.parametrize(
    ("heads", "megabytes", "pieces"),
    [(8, 32, 1), (8, 127, 1), (8, 128, 2), (8, 1000, 4), (1, 1000, 1), (6, 256, 3), (5, 1000, 1)],
)
def test_heads_are_divided_where_there_is_much_to_send(heads, megabytes, pieces):
    assert number_of_pieces(heads, megabytes * 2**20) == pieces


# --- batches --------------------------------------------------------------------------------------


def test_the_batch_has_what_is_asked_of_it():
    """Documents of one token, of odd lengths, longer than a rank's part, and none; documents that
    begin at edges of chunks, at all and at some, and next to them. Ranks without targets."""
    edges = list(range(0, SEQ_LEN, SEQ_LEN // 4))[1:], list(range(0, SEQ_LEN, SEQ_LEN // 8))[1:]
    assert [] in DOCUMENTS
    assert all(begins in DOCUMENTS for begins in edges)
    lengths = [
        end - begin
        for begins in DOCUMENTS
        for begin, end in zip([0, *begins], [*begins, SEQ_LEN], strict=True)
    ]
    assert {1, 3, 5, 7, 15} <= set(lengths)
    for name, (size, rank) in TARGETS.items():
        targets = batch(name)[1]
        counts = [(cp.cut(targets, 1) != IGNORE).sum().item() for cp in layouts(size)]
        assert [count == 0 for count in counts] == [each == rank for each in range(size)]
    of_pairs = (batch("rows without")[1] != IGNORE).sum(dim=1).view(-1, 2).bool().sum(dim=1)
    assert set(of_pairs.tolist()) == {0, 1, 2}, "none, one and both rows have targets"


@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (Case(MeshSizes(cp=2), document_mask=True, num_kv_heads=8), 1),
        (Case(MeshSizes(cp=2, tp=2), document_mask=True, activation_checkpointing="full"), 4),
        (Case(MeshSizes(cp=4), document_mask=True), 4),
        # a chunk is one position
        (Case(MeshSizes(cp=8), document_mask=True, **WINDOW), 8),
        *(
            pytest.param(
                Case(MeshSizes(cp=cp), document_mask=True, **options),
                rows,
                marks=pytest.mark.thorough,
            )
            for cp, rows, options in (
                (2, 2, {"num_kv_heads": 8}),
                (4, 1, WINDOW),
                (8, 1, {"activation_checkpointing": "selective"}),
            )
        ),
    ],
    ids=str,
)
def test_documents_begin_anywhere(ranks, case, rows):
    case = with_rows(case, rows)
    row = check_batch(ranks, case, "all")
    assert not row.failures(), str(row)


@pytest.mark.parametrize(
    ("window", "documents"),
    [
        (3, False), (9, True),
        *(pytest.param(w, d, marks=pytest.mark.thorough)
          for w, d in [(4, True), (9, False), *product((1, 5, 8, 15, 16), (False, True))]),
    ],
)  # fmt: skip
def test_windows_end_anywhere(ranks, window, documents):
    """Windows of less and more than a chunk (4 tokens) and a rank's part (8)."""
    case = Case(
        MeshSizes(cp=2),
        attention="sliding_window",
        attention_window=window,
        document_mask=documents,
        num_microbatches=16,
    )
    row = check_batch(ranks, case, "all")
    assert not row.failures(), str(row)


@pytest.mark.parametrize(
    "documents",
    [pytest.param(False, marks=pytest.mark.thorough, id=""), pytest.param(True, id="documents")],
)
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=pytest.mark.thorough if thorough else [])
        for name in (*TARGETS, "rows without")
        for rows, thorough in ((2, "of 4" in name), (1, True))
    ],
)
def test_targets_that_some_lack(ranks, name, rows, documents):
    """Micro-batches of one sequence gather keys and values again in backward."""
    size = TARGETS[name][0] if name in TARGETS else 2
    case = with_rows(Case(MeshSizes(cp=size), document_mask=documents), rows)
    row = check_batch(ranks, case, name)
    assert not row.failures(), str(row)


GATHERS_AGAIN = context_cases()


QUICK = [
    case
    for case in GATHERS_AGAIN
    if (case.zero_stage, case.world, case.schedule) == (3, 4, "zb_h1")
]


@pytest.mark.parametrize("case", thorough_but(QUICK, GATHERS_AGAIN), ids=str)
def test_gathering_again_with_other_options(ranks, case):
    agrees(ranks, case)


@pytest.mark.thorough
def test_every_option_meets_a_backward_that_gathers_again():
    """Without recomputation, and a micro-batch is one sequence. The whole matrix has these cases,
    and its covering array has every pair of options with cp, but with several sequences."""
    assert {case.config().train.micro_batch_size for case in GATHERS_AGAIN} == {1}
    assert {case.activation_checkpointing for case in GATHERS_AGAIN} == {"none"}
    values = option_values()
    assert {(case.schedule, case.stages_per_rank) for case in GATHERS_AGAIN} == set(
        values["pipeline"]
    )
    for name in (
        "sequence_parallel",
        "zero_stage",
        "tie_embeddings",
        "cpu_offload",
        "num_kv_heads",
    ):
        assert {getattr(case, name) for case in GATHERS_AGAIN} == set(values[name])
    cases, _ = plan(WORLDS, quick=False)
    assert set(GATHERS_AGAIN) <= {case for case, _ in cases}
    others = [case for case, _ in cases if case.layout.cp > 1 and case not in GATHERS_AGAIN]
    assert {case.schedule for case in others} == set(SCHEDULES)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        (CP2, 2),
        (Case(MeshSizes(cp=4)), 0),
        pytest.param(Case(MeshSizes(cp=4)), 20, marks=pytest.mark.thorough),
        (Case(MeshSizes(cp=2), zero_stage=0), 2),
        pytest.param(Case(MeshSizes(cp=2), dtype="float32"), 20, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_cp_alone(ranks, case, steps):
    agrees(ranks, case, steps)
