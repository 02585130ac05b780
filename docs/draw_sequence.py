"""Draws docs/images/sequence.svg: the part of the activations that each of four tensor-parallel
ranks holds along a block. `python -m docs.draw_sequence`

Between the matrices, a rank has a part of the sequence with the whole width; inside, it has the
whole sequence with a part of the width.
"""

from docs import svg
from docs.svg import INK, MUTED, PAPER, arrow, rectangle, text
from parallel.placement import chunk_range

TP = 4
WIDTH, HEIGHT = 960, 388
SIDE, TOP = 84, 132
STATIONS = (  # name, symbol of the width, whether it is split along the sequence
    ("norm", "D", True),
    ("q, k, v, attention", "heads", False),
    ("sum, norm", "D", True),
    ("gate, up", "F", False),
    ("sum", "D", True),
)


def square(x: float, by_sequence: bool) -> str:
    """A square of S rows with one column per feature; each rank's part in its colour."""
    parts = []
    for rank in range(TP):
        mine = chunk_range(SIDE, TP, rank)
        if by_sequence:
            parts += [rectangle(x, TOP + mine.start, SIDE, len(mine), svg.RANKS[rank], PAPER)]
        else:
            parts += [rectangle(x + mine.start, TOP, len(mine), SIDE, svg.RANKS[rank], PAPER)]
    return "".join(parts) + rectangle(x, TOP, SIDE, SIDE, "none")


def draw() -> str:
    gap = (WIDTH - 2 * 40 - len(STATIONS) * SIDE) / (len(STATIONS) - 1)
    parts = [
        text(
            40,
            38,
            f"A block with sequence parallelism: what each of {TP} ranks holds of [S, D]",
            20,
            weight=700,
        ),
        text(
            40,
            62,
            "a rank keeps only this between forward and backward; gathered tensors are freed "
            "at once",
            14,
            MUTED,
        ),
        text(28, TOP + SIDE / 2 + 4, "S", 14, MUTED, "middle"),
    ]
    for i, (name, width, by_sequence) in enumerate(STATIONS):
        x = 40 + i * (SIDE + gap)
        parts += [
            square(x, by_sequence),
            text(x + SIDE / 2, TOP - 14, name, 14, INK, "middle", 600),
        ]
        parts += [text(x + SIDE / 2, TOP + SIDE + 20, width, 14, MUTED, "middle")]
        if i:
            kind = "reduce-scatter" if by_sequence else "all-gather"
            parts += [arrow(x - gap + 10, TOP + SIDE / 2, x - 10, TOP + SIDE / 2, svg.TP, 2.5)]
            parts += [text(x - gap / 2, TOP + SIDE / 2 - 14, kind, 12, svg.TP, "middle", 600)]
            back = "all-gather" if by_sequence else "reduce-scatter"
            parts += [arrow(x - 10, TOP + SIDE + 50, x - gap + 10, TOP + SIDE + 50, MUTED)]
            parts += [text(x - gap / 2, TOP + SIDE + 42, back, 12, MUTED, "middle")]
            if not by_sequence:
                parts += [
                    text(x - gap / 2, TOP + SIDE + 68, "+ all-gather x again", 12, MUTED, "middle")
                ]
    parts += [text(40, TOP + SIDE + 54, "backward", 13, MUTED)]
    for rank in range(TP):
        parts += [rectangle(40 + 96 * rank, HEIGHT - 44, 16, 16, svg.RANKS[rank])]
        parts += [text(62 + 96 * rank, HEIGHT - 31, f"tp rank {rank}", 13)]
    parts += [
        text(
            WIDTH - 40,
            HEIGHT - 31,
            "ten collectives of S · B · D numbers: 4 in forward, 6 in backward",
            14,
            INK,
            "end",
        )
    ]
    return svg.picture(
        "Who holds what along a block with sequence parallelism", WIDTH, HEIGHT, parts
    )


if __name__ == "__main__":
    svg.save("sequence", draw)
