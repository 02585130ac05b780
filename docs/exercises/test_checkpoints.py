"""An exercise for docs/checkpoints.md: complete the function, then run `.venv/bin/python -m
pytest docs/exercises/test_checkpoints.py`."""

import itertools

import pytest
import torch

from parallel.placement import chunk_range

Region = tuple[range, range]  # rows, columns


def needed(saved: Region, wanted: Region) -> tuple[tuple[slice, slice], tuple[slice, slice]] | None:
    """The part of a saved piece that a loading rank needs. The file has the region `saved` of a
    global matrix, and the rank loads the region `wanted`.

    A region is (rows, columns), two ranges. Returns where the part is in the saved piece and where
    it goes in the wanted one, each as (rows, columns), two slices that count from that piece's
    first row and column; or None if the rank needs nothing of the piece.
    """
    raise NotImplementedError("yours to write")


@pytest.mark.parametrize("shape", [(8, 12), (7, 5)])
def test_any_layout_loads_what_any_other_saved(shape: tuple[int, int]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    layouts = list(itertools.product((1, 2, 3), (1, 2, 4)))
    for by, to in itertools.product(layouts, layouts):
        files = [(region, part_of(whole, region)) for region in regions(shape, *by)]
        for rows, columns in regions(shape, *to):
            mine = torch.full((len(rows), len(columns)), -1)
            for region, piece in files:
                if (found := needed(region, (rows, columns))) is not None:
                    theirs, ours = found
                    assert piece[theirs].numel()
                    mine[ours] = piece[theirs]
            assert torch.equal(mine, part_of(whole, (rows, columns)))


def regions(shape: tuple[int, int], dp_shard: int, tp: int) -> list[Region]:
    """What each rank has of a matrix whose rows FSDP shards, and whose columns tp cuts."""
    return [
        (chunk_range(shape[0], dp_shard, d), chunk_range(shape[1], tp, t))
        for d, t in itertools.product(range(dp_shard), range(tp))
    ]


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    rows, columns = region
    return whole[rows.start : rows.stop, columns.start : columns.stop]
