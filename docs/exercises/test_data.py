"""Two exercises for docs/data.md: complete the functions, then run `.venv/bin/python -m pytest
docs/exercises/test_data.py`."""

import pytest

from costs.parameters import num_parameters
from settings.load import load_config
from tools.plan.guide import STAGES, our_bytes


def bytes_per_parameter(zero_stage: int, ranks: int) -> float:
    """Return the bytes per parameter that one of `ranks` data-parallel ranks holds between two
    micro-batches, without activations.

    Unsharded, a parameter takes 4 bytes for the master weight and 4 for each of two moments, in
    float32; 2 for the weight to compute with, in bfloat16; and 4 for the gradient. The text of
    parallel/data.py says which of them are sharded over the ranks at each ZeRO stage. (Stage 3
    keeps no weights to compute with.)
    """
    raise NotImplementedError("yours to write")


def rows_of(step: int, dp_rank: int, dp_size: int, batches: list[tuple[int, int]]) -> range:
    """Return the indices of the samples that data-parallel rank `dp_rank` of `dp_size` reads in
    `step`. Ranks and steps are 0-based.

    batches: the global batch sizes of the whole run, as consecutive pairs (number of steps, global
    batch size). The number of ranks may have been different in earlier steps. No sample is left out
    and none is read twice.
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
