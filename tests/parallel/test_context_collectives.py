"""What context parallelism sends, and in which dtype."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parallel.axes import MeshSizes
from parallel.context import PIECES, ContextParallel, SplitAttention
from proofs.parity.cases import Case
from tests.counting import once, sent_over_cp
from tests.kernels.flash import flash_attention_stands_in
from tests.proofs.parity_tiers import thorough_but

LAYERS = [  # layout, options, key/value heads of a tp rank, sequences per micro-batch in make test
    (MeshSizes(dp_shard=2, cp=2), {"document_mask": True}, 4, 1),
    (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8, "activation_checkpointing": "full"}, 8, None),
    (MeshSizes(dp_replicate=2, cp=2), {"activation_checkpointing": "selective"}, 4, None),
    (MeshSizes(cp=2, tp=2), {"activation_checkpointing": "selective"}, 2, 2),
    (MeshSizes(cp=2, tp=2), {"sequence_parallel": False, "num_kv_heads": 2}, 1, None),
    (MeshSizes(pp=2, cp=2), {"schedule": "zb_h1"}, 4, 2),
    (MeshSizes(dp_shard=2, cp=4), {"num_kv_heads": 8}, 8, None),
]


@pytest.mark.parametrize(
    ("layout", "options", "kv_heads", "rows"),
    [
        pytest.param(*case, rows, marks=[] if rows == quick else pytest.mark.thorough)
        for *case, quick in LAYERS
        for rows in (1, 2)
    ],
    ids=str,
)
def test_gathers_and_scatters_of_a_layer(ranks, layout, options, kv_heads, rows):
    """Per layer and micro-batch, in every mode of activation checkpointing, and with a backward in
    two parts: gradients are scattered once. Backward gathers again if it recomputes, or if a
    micro-batch is one sequence; else what forward gathered is kept. A tp rank sends its own heads.
    Evaluation gathers once."""
    case = Case(layout, **options)
    number, size = once(case, rows, kv_heads, itemsize=8)
    times = 1 if case.activation_checkpointing == "none" and rows > 1 else 2
    for sent in ranks.run(sent_over_cp, layout.world, case, rows, True):
        assert sent == {"all_gather": (times * number, times * size),
                        "reduce_scatter": (number, size)}  # fmt: skip
    for sent in ranks.run(sent_over_cp, layout.world, case, rows, False):
        assert sent == {"all_gather": (number, size)}


def test_pieces_send_the_same_bytes(ranks):
    case = Case(MeshSizes(dp_shard=2, cp=2), num_kv_heads=8)
    whole, parts = (ranks.run(sent_over_cp, 4, case, 2, True, n)[0] for n in (1, PIECES))
    assert parts == {kind: (PIECES * number, size) for kind, (number, size) in whole.items()}
    assert parts.keys() == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("rows", thorough_but([2], [1, 2]), ids="{} per micro-batch".format)
def test_flash_gathers_as_often(ranks, rows):
    """One sequence is gathered again. Two are packed into copies, which are kept."""
    case = Case(MeshSizes(dp_shard=2, cp=2), document_mask=True)
    number, size = once(case, rows, 4, itemsize=8)
    times = 3 - rows
    flash = flash_attention_stands_in
    for sent in ranks.run(sent_over_cp, 4, case, rows, True, PIECES, flash):
        assert sent == {"all_gather": (times * number, times * size),
                        "reduce_scatter": (number, size)}  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "itemsize"), thorough_but([("bfloat16", 2)], [("bfloat16", 2), ("float32", 4)])
)
def test_gradients_travel_in_float32(ranks, dtype, itemsize):
    case = Case(MeshSizes(dp_shard=2, cp=2), dtype=dtype)
    sent = {"all_gather": once(case, 2, 4, itemsize), "reduce_scatter": once(case, 2, 4, 4)}
    assert ranks.run(sent_over_cp, 4, case, 2, True) == [sent] * 4


def error_of_the_sum(in_bfloat16):
    """The relative error of a bfloat16 key's gradient, of which each chunk of queries has a term;
    the terms nearly cancel each other."""
    size, length = dist.get_world_size(), 8 * dist.get_world_size()
    cp = ContextParallel(size, dist.get_rank(), dist.group.WORLD)
    torch.manual_seed(0)
    chunks = [ContextParallel(size, rank).chunks(length) for rank in range(size)]
    ends = [part.stop for mine in chunks for part in mine]
    terms = torch.randn(len(ends), 4, 1, 1, 16).bfloat16()  # for the first 4 positions
    terms[-1] = -terms[:-1].double().sum(0).bfloat16()
    of_mine = [part.stop for part in cp.chunks(length)]
    mine = [term for term, end in zip(terms, ends, strict=True) if end in of_mine]

    def attend_with(term):
        # the sum over keys of key · term, at one query
        return lambda q, k, v: torch.cat([(k[:4] * term).sum(0, keepdim=True), q[1:] + v[:1]])

    q, k, v = (
        torch.zeros(length // size, 1, 1, 16, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    with patch("torch.promote_types", lambda a, b: a) if in_bfloat16 else nullcontext():
        y = SplitAttention(cp, cp.chunks(length), [attend_with(term) for term in mine])(q, k, v)
        starts = [0, len(cp.chunks(length)[0])][: len(mine)]
        y[starts].sum().backward()
    expected = terms.double().sum(0)
    return ((k.grad[:4].double() - expected).norm() / expected.norm()).item()


def test_gradients_are_summed_in_float32(ranks):
    """The result is rounded to bfloat16 once (2⁻⁹). Control: summed in bfloat16, the error is a
    hundred times as large."""
    assert ranks.run(error_of_the_sum, 4, False)[0] < 2**-8
    assert ranks.run(error_of_the_sum, 4, True)[0] > 100 * 2**-9
