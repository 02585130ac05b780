"""An exercise for docs/mesh.md: complete the function, then run `.venv/bin/python -m pytest
docs/exercises/test_mesh.py`."""

import math

import pytest
import torch

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def ranks_that_share(axis: str, rank: int, shape: tuple[int, int, int, int, int]) -> list[int]:
    """Return the group of `rank` along `axis`, in order: all ranks that have the same coordinates
    as `rank` on the other four axes.

    Use only arithmetic (// and %), no tensors: rank = (((pp · R + dp_replicate) · S + dp_shard) · C
    + cp) · T + tp, where `shape` is (P, R, S, C, T).
    """
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize(
    "shape", [(2, 1, 2, 1, 2), (1, 1, 1, 1, 4), (3, 2, 4, 3, 2), (4, 1, 2, 4, 8)]
)
def test_the_groups_are_those_of_the_mesh(shape: tuple[int, int, int, int, int]) -> None:
    """A DeviceMesh numbers its ranks as `arange` fills a tensor of its shape."""
    mesh = torch.arange(math.prod(shape)).view(shape)
    for dim, axis in enumerate(AXES):
        for group in mesh.movedim(dim, -1).reshape(-1, shape[dim]).tolist():
            for rank in group:
                assert ranks_that_share(axis, rank, shape) == group
