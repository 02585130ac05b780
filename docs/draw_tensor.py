"""Draws docs/images/tensor.svg: the two matrices of a feed-forward layer on two tensor-parallel
ranks. `python -m docs.draw_tensor`

Sizes are those of configs/laptop.yaml, and boxes are drawn to scale. `chunk_range` gives the rows
and columns of a rank, as in the model.
"""

from docs import svg
from docs.svg import FAINT, INK, MUTED, PAPER, arrow, line, rectangle, text
from parallel.placement import chunk_range
from settings.load import load_config

TP = 2
WIDTH, HEIGHT = 960, 456
SCALE = 0.38  # pixels per number
TOP, LANE = 150, 166  # top of the first rank's lane, and height of a lane


def matrix(
    x: float, y: float, rows: int, columns: int, mine: tuple[range, range], colour: str
) -> str:
    """A matrix centred at height y, with this rank's part of it in the rank's colour."""
    top = y - rows * SCALE / 2
    part = (
        rectangle(
            x + mine[1].start * SCALE,
            top + mine[0].start * SCALE,
            len(mine[1]) * SCALE,
            len(mine[0]) * SCALE,
            colour,
        )
        if mine[0] and mine[1]
        else ""
    )
    return rectangle(x, top, columns * SCALE, rows * SCALE, FAINT) + part


def lane(rank: int, tokens: int, dim: int, ffn: int) -> list[str]:
    """The computation of one rank, from left to right."""
    y, colour = TOP + LANE * rank + 30, svg.RANKS[rank]
    part = chunk_range(ffn, TP, rank)
    all_tokens, all_dim = range(tokens), range(dim)
    mine = f"{part.start} to {part.stop - 1}"
    name = f"rank {rank}"
    return [
        text(24, y - 4, name, 15, colour, weight=700),
        matrix(92, y, tokens, dim, (all_tokens, all_dim), "#fde68a"),
        text(92, y - 34, "x", 12, MUTED),
        arrow(148, y, 182, y),
        matrix(196, y, ffn, dim, (part, all_dim), colour),
        text(252, y - 6, "up: rows", 13, colour, weight=600),
        text(252, y + 11, mine, 13, colour),
        arrow(334, y, 364, y),
        matrix(374, y, tokens, ffn, (all_tokens, part), colour),
        text(374, y - 36, "h: only these columns", 12, MUTED),
        arrow(542, y, 572, y),
        matrix(582, y, dim, ffn, (all_dim, part), colour),
        text(582, y + 46, f"down: columns {mine}", 13, colour, weight=600),
        arrow(750, y, 780, y),
        matrix(790, y, tokens, dim, (all_tokens, all_dim), colour),
        text(790, y - 36, "partial sum", 12, MUTED),
    ]


def draw() -> str:
    config = load_config("configs/laptop.yaml", [])
    tokens, dim, ffn = config.train.seq_len, config.model.dim, config.model.ffn_dim
    first, last = TOP + 30, TOP + 30 + LANE * (TP - 1)
    parts = [
        text(
            24,
            36,
            "A feed-forward on two ranks: cut the first matrix by rows, the second by columns",
            20,
            weight=700,
        ),
        text(
            24,
            60,
            f"D = {dim}, F = {ffn}, {tokens} tokens: each rank has {ffn // TP} of the inner "
            "numbers",
            14,
            MUTED,
        ),
        text(92, 96, "f: every rank has x", 13, INK, weight=600),
        text(374, 96, "no communication here: the nonlinearity is local", 13, INK, weight=600),
        text(790, 96, "g: summed", 13, INK, weight=600),
        *(part for rank in range(TP) for part in lane(rank, tokens, dim, ffn)),
        line(858, first, 880, first),
        line(858, last, 880, last),
        line(880, first, 880, last),
        arrow(880, (first + last) / 2, 906, (first + last) / 2),
        f'<circle cx="880" cy="{(first + last) / 2:g}" r="13" fill="{PAPER}" stroke="{INK}"/>',
        text(880, (first + last) / 2 + 6, "Σ", 16, anchor="middle", weight=700),
        text(912, (first + last) / 2 + 6, "y", 18, weight=700),
        text(
            24,
            HEIGHT - 22,
            "forward: an all-reduce of T · D numbers, at g. Backward: one of the gradient of x, "
            "at f.",
            14,
        ),
    ]
    return svg.picture("A feed-forward on two tensor-parallel ranks", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("tensor", draw)
