"""What context parallelism sends, and in which dtype."""

from unittest.mock import patch

import pytest
import torch

from parallel.axes import MeshSizes
from parallel.context import sum_by_rank
from proofs.parity.cases import Case
from tests.counting import once, sent_over_cp
from tests.kernels.flash import flash_attention_stands_in
from tests.proofs.parity_tiers import thorough_but

FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))
QUICK = [  # layout, options, key/value heads of a tp rank, sequences per micro-batch
    (MeshSizes(dp_shard=2, cp=2), {"document_mask": True}, 4, 1),
    (MeshSizes(cp=2, tp=2), SELECTIVE, 2, 2),
    (MeshSizes(pp=2, cp=2), {"schedule": "zb_h1"}, 4, 2),
]
LAYERS = [
    *QUICK,
    (MeshSizes(dp_shard=2, cp=2), {"document_mask": True}, 4, 2),
    (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8} | FULL, 8, 1),
    (MeshSizes(dp_shard=2, cp=2), {"num_kv_heads": 8} | FULL, 8, 2),
    (MeshSizes(dp_replicate=2, cp=2), SELECTIVE, 4, 1),
    (MeshSizes(cp=2, tp=2), {"sequence_parallel": False, "num_kv_heads": 2}, 1, 2),
    (MeshSizes(pp=2, cp=2), {"schedule": "zb_h1"}, 4, 1),
    (MeshSizes(dp_shard=2, cp=4), {"num_kv_heads": 8}, 8, 1),
]


@pytest.mark.parametrize(
    ("layout", "options", "kv_heads", "rows"), thorough_but(QUICK, LAYERS), ids=str
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


@pytest.mark.parametrize("rows", thorough_but([2], [1, 2]), ids="{} per micro-batch".format)
def test_flash_gathers_as_often(ranks, rows):
    """One sequence is gathered again. Two are packed into copies, which are kept."""
    case = Case(MeshSizes(dp_shard=2, cp=2), document_mask=True)
    number, size = once(case, rows, 4, itemsize=8)
    times = 3 - rows
    for sent in ranks.run(sent_over_cp, 4, case, rows, True, flash_attention_stands_in):
        assert sent == {"all_gather": (times * number, times * size),
                        "reduce_scatter": (number, size)}  # fmt: skip


def in_their_dtype():
    return patch("torch.promote_types", lambda own, wider: own)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), thorough_but([("bfloat16", 2)], [("bfloat16", 2), ("float32", 4)])
)
def test_gradients_are_summed_in_float32(ranks, dtype, itemsize):
    """The number of bytes sent shows it. Control: a sum in bfloat16 sends half as many."""
    case = Case(MeshSizes(dp_shard=2, cp=2), dtype=dtype)
    sent = {"all_gather": once(case, 2, 4, itemsize), "reduce_scatter": once(case, 2, 4, 4)}
    assert ranks.run(sent_over_cp, 4, case, 2, True) == [sent] * 4
    if dtype == "bfloat16":
        control = sent | {"reduce_scatter": once(case, 2, 4, 2)}
        assert ranks.run(sent_over_cp, 4, case, 2, True, in_their_dtype) == [control] * 4


def test_a_key_s_terms_are_added_in_float32():
    """Rank 0 of 2 has chunks 0 and 3 of 4, and the keys of chunk 0 a term of each."""
    torch.manual_seed(0)
    of_low, of_high = (torch.randn(length, 1, 1, 16).bfloat16() for length in (4, 16))
    total = torch.empty(16, 1, 1, 16)
    sum_by_rank([of_low, of_high], total, 2)
    assert torch.equal(total[:4], of_low.float() + of_high[:4].float())
