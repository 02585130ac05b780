"""Draws docs/images/checkpoints.svg: one matrix, saved by four ranks and loaded by three. `python
-m docs.draw_checkpoints`

The matrix is `blocks.0.feed_forward.down.weight` of configs/laptop.yaml: tp cuts its columns, FSDP
its rows. `chunk_range` computes the shard of each rank, as it does for the model. Prints which
saved pieces each loading rank reads.
"""

from collections.abc import Iterator
from itertools import product

from docs import svg
from docs.svg import INK, MUTED, PAPER, arrow, line, rectangle, text
from parallel.placement import chunk_range
from settings.load import load_config

SAVED_BY, LOADED_BY = (2, 2), (3, 1)  # sizes of dp_shard, tp
WIDTH, HEIGHT = 960, 370
TOP, SCALE = 128, 1.0
COLOURS = ("#1d4ed8", "#60a5fa", "#0f766e", "#5eead4")

Region = tuple[range, range]  # rows, columns


def size_of_the_matrix() -> tuple[int, int]:
    model = load_config("configs/laptop.yaml", []).model
    return model.dim, model.ffn_dim


def regions(shape: tuple[int, int], dp_shard: int, tp: int) -> list[Region]:
    """The region of each rank, tp fastest."""
    return [
        (chunk_range(shape[0], dp_shard, d), chunk_range(shape[1], tp, t))
        for d, t in product(range(dp_shard), range(tp))
    ]


def overlap(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def reads(shape: tuple[int, int]) -> Iterator[tuple[int, int, Region]]:
    """Yield (loading rank, saving rank, the region that the first needs of the second's piece)."""
    for reader, wanted in enumerate(regions(shape, *LOADED_BY)):
        for writer, saved in enumerate(regions(shape, *SAVED_BY)):
            rows, columns = (overlap(a, b) for a, b in zip(wanted, saved, strict=True))
            if rows and columns:
                yield reader, writer, (rows, columns)


def span(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop - 1}"


def tile(x: float, region: Region, colour: str) -> str:
    rows, columns = region
    return rectangle(
        x + columns.start * SCALE,
        TOP + rows.start * SCALE,
        len(columns) * SCALE,
        len(rows) * SCALE,
        colour,
    )


def draw() -> str:
    shape = size_of_the_matrix()
    left, right = 40, 504
    middle = TOP + shape[0] * SCALE / 2
    parts = [
        text(
            40,
            38,
            "A checkpoint stores global tensors: any layout loads what any other saved",
            20,
            weight=700,
        ),
        text(
            40,
            62,
            f"blocks.0.feed_forward.down.weight, {shape[0]} × {shape[1]}; a colour is a file",
            14,
            MUTED,
        ),
        text(left, TOP - 16, f"saved by dp_shard {SAVED_BY[0]} × tp {SAVED_BY[1]}", 15, weight=600),
        text(
            right,
            TOP - 16,
            f"loaded by dp_shard {LOADED_BY[0]} × tp {LOADED_BY[1]}",
            15,
            weight=600,
        ),
        arrow(left + shape[1] * SCALE + 16, middle, right - 16, middle),
    ]
    for rank, region in enumerate(regions(shape, *SAVED_BY)):
        parts.append(tile(left, region, COLOURS[rank]))
        x = left + (region[1].start + region[1].stop) / 2 * SCALE
        y = TOP + (region[0].start + region[0].stop) / 2 * SCALE
        parts.append(
            text(x, y + 5, f"rank {rank}", 14, PAPER if rank % 2 == 0 else INK, "middle", 600)
        )
    for _, writer, region in reads(shape):
        parts.append(tile(right, region, COLOURS[writer]))
    for rank, (rows, _) in enumerate(regions(shape, *LOADED_BY)):
        y = TOP + rows.start * SCALE
        if rank:
            parts.append(line(right - 8, y, right + shape[1] * SCALE + 8, y, svg.PP, 3))
        parts.append(
            text(
                right + shape[1] * SCALE + 10,
                y + len(rows) / 2 * SCALE + 5,
                f"rank {rank}",
                13,
                INK,
                weight=600,
            )
        )
    for reader in range(LOADED_BY[0] * LOADED_BY[1]):
        files: dict[str, list[str]] = {}
        for _, writer, (rows, _) in (read for read in reads(shape) if read[0] == reader):
            files.setdefault(span(rows), []).append(str(writer))
        words = "; ".join(
            f"rows {rows} from the files of ranks {' and '.join(of)}" for rows, of in files.items()
        )
        parts.append(
            text(40, TOP + shape[0] * SCALE + 44 + 24 * reader, f"rank {reader} reads {words}", 13)
        )
    return svg.picture("One matrix, saved by four ranks and loaded by three", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    for reader, writer, (rows, columns) in reads(size_of_the_matrix()):
        print(
            f"rank {reader} reads rows {span(rows)}, columns {span(columns)} from what rank "
            f"{writer} saved"
        )
    svg.save("checkpoints", draw)
