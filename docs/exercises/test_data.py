"""Two exercises: complete the functions, then `.venv/bin/python -m pytest
docs/exercises/test_data.py`. Page: docs/data.md"""

import pytest

from model.transformer import num_parameters
from tools.plan.guide import STAGES, our_bytes
from training.load_config import load_config


def bytes_per_parameter(zero_stage: int, ranks: int) -> float:
    """What one of `ranks` data-parallel ranks holds of a parameter between two micro-batches,
    activations left out.

    Whole: weights 4 and two moments 4 each, in float32; weights to compute with 2, in bfloat16;
    gradients 4. Which of them are cut over the ranks at which stage says the table in
    parallel/data.py. (Stage 3 keeps no weights to compute with.)
    """
    raise NotImplementedError("yours to write")


def rows_of(step: int, dp_rank: int, dp_size: int, batches: list[tuple[int, int]]) -> range:
    """The indices of the samples that data-parallel rank `dp_rank` reads in `step`, 0-based.

    batches: how the run went so far, and goes on: (how many steps, global batch size), one after
    the other; the batch size may change in between, and the number of ranks, `dp_size` now, at any
    time. No sample is left out and none is read twice.
    """
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("dp_size", [2, 8, 64])
def test_bytes(dp_size: int) -> None:
    config = load_config("configs/llama3_8b.yaml", [])
    for stage in STAGES:
        held = sum(our_bytes(config, dp_size, stage).values()) / num_parameters(config.model)
        assert bytes_per_parameter(stage, dp_size) == pytest.approx(held)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [4, 4, 4], [1, 4, 2]])
def test_every_sample_once_and_in_order(sizes: list[int]) -> None:
    batches = [(3, 8), (2, 4), (4, 12)]
    read: list[int] = []
    for step in range(9):
        dp_size = sizes[0] if step < 3 else sizes[1] if step < 6 else sizes[2]
        for dp_rank in range(dp_size):
            rows = rows_of(step, dp_rank, dp_size, batches)
            read += rows
    assert read == list(range(3 * 8 + 2 * 4 + 4 * 12))
