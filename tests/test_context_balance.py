"""benchmarks/context_balance.py: how evenly the zig-zag divides attention."""

import pytest
import torch

from benchmarks.context_balance import SPLITS, contiguous, imbalance, keys_seen


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_one_document_is_divided_evenly_by_the_zigzag_only(cp: int) -> None:
    length = 2 * cp * 64
    seen = keys_seen(None, length, 1)
    assert seen.sum() == length * (length + 1) // 2
    assert imbalance(seen, SPLITS["zig-zag"], cp) == 1
    # Control: contiguous parts are not. The last rank has 2 − 1/cp of the mean of a long sequence.
    assert imbalance(seen, contiguous, cp) == pytest.approx(2 - 1 / cp, rel=1 / length)


def test_documents_restart_the_count() -> None:
    seen = keys_seen(50, 256, 8)
    assert (seen[:, 0] == 1).all()
    steps = seen[:, 1:] - seen[:, :-1]
    assert ((steps == 1) | (seen[:, 1:] == 1)).all()
    assert 8 * 256 / 50 / 2 < (seen == 1).sum() < 8 * 256 / 50 * 2 + 8
    # what a rank computes twice, or nobody, would change the sum
    parts = [
        seen[:, part.start : part.stop] for r in range(4) for part in SPLITS["zig-zag"](4, r, 256)
    ]
    assert torch.cat(parts, 1).sum() == seen.sum()
