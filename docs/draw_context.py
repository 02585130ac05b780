"""Draws docs/images/context.svg: which of four context-parallel ranks computes which part of causal
attention, with contiguous parts and with the zig-zag of training. `python -m docs.draw_context`

A point of the square is a query (its row) and a key (its column). A query sees the keys up to
itself, so the part on and below the diagonal is computed; it is as large as the work.
"""

from collections.abc import Callable
from fractions import Fraction

from docs import svg
from docs.svg import FAINT, INK, MUTED, PAPER, rectangle, text
from parallel.context import ContextParallel
from parallel.placement import chunk_range

CP = 4
SIDE = 256  # of the square, and positions of the sequence: one pixel each
WIDTH, HEIGHT = 960, 486
TOP, BAND, GAP = 146, 14, 6
LEFTS = {"contiguous": 84, "zig-zag": 560}
BAR, SHARE = 15, 110  # height and length of a bar; its full length is half of the work


Split = Callable[[int], list[range]]  # rank → positions of its queries
SPLITS: dict[str, Split] = {
    "contiguous": lambda rank: [chunk_range(SIDE, CP, rank)],
    "zig-zag": lambda rank: ContextParallel(CP, rank).chunks(SIDE),
}


def work(part: range) -> Fraction:
    """The share of the triangle in these rows."""
    return Fraction(part.stop**2 - part.start**2, SIDE**2)


def rows(x: float, part: range, colour: str) -> str:
    """What is computed for the queries of `part`: the square's rows, up to the diagonal."""
    top, bottom = TOP + part.start, TOP + part.stop
    corners = ((x, top), (x + part.start, top), (x + part.stop, bottom), (x, bottom))
    points = " ".join(f"{a:g},{b:g}" for a, b in corners)
    return f'<polygon points="{points}" fill="{colour}" stroke="{PAPER}" stroke-width="1"/>'


def panel(name: str, split: Split) -> list[str]:
    """One square, with the holders of queries on its left and of keys above it, and the work of
    each rank."""
    x, held = LEFTS[name], {rank: split(rank) for rank in range(CP)}
    parts = [
        text(x, TOP - 50, name, 16, INK, weight=700),
        text(x + SIDE / 2, TOP - BAND - GAP - 8, "keys", 13, MUTED, "middle"),
        text(x - BAND - GAP - 10, TOP + SIDE / 2, "queries", 13, MUTED, "end"),
        rectangle(x, TOP, SIDE, SIDE, FAINT, "none"),
    ]
    for rank, chunks in held.items():
        colour = svg.RANKS[rank]
        for part in chunks:
            across = x + part.start, TOP - BAND - GAP, len(part), BAND
            down = x - BAND - GAP, TOP + part.start, BAND, len(part)
            parts += [rectangle(*across, colour, PAPER), rectangle(*down, colour, PAPER)]
            parts += [rows(x, part, colour)]
    most = max(sum(map(work, chunks)) for chunks in held.values())
    parts += [text(x + SIDE + 20, TOP + 4, "work of each rank", 13, MUTED)]
    for rank, chunks in held.items():
        share, y = sum(map(work, chunks)), TOP + 18 + rank * (BAR + 20)
        length = float(share) * SHARE / (1 / 2)
        parts += [rectangle(x + SIDE + 20, y, length, BAR, svg.RANKS[rank], "none")]
        words = f"rank {rank}: {share.numerator}/{share.denominator}"
        parts += [text(x + SIDE + 20, y + BAR + 14, words, 12)]
    parts += [
        text(x + SIDE + 20, TOP + 182, "the last to finish:", 13, MUTED),
        text(x + SIDE + 20, TOP + 202, f"{float(most * CP):g} × the mean", 15, INK, weight=700),
    ]
    return parts


def draw() -> str:
    parts = [
        text(40, 38, f"Causal attention on {CP} context-parallel ranks", 20, weight=700),
        text(
            40,
            60,
            "each rank keeps its queries, and gathers the keys and values of all; its part of the "
            "triangle is its work",
            14,
            MUTED,
        ),
    ]
    for name, split in SPLITS.items():
        parts += panel(name, split)
    for rank in range(CP):
        parts += [rectangle(40 + 96 * rank, HEIGHT - 44, 16, 16, svg.RANKS[rank])]
        parts += [text(62 + 96 * rank, HEIGHT - 31, f"cp rank {rank}", 13)]
    parts += [text(WIDTH - 40, HEIGHT - 31, "grey: later than the query, not seen", 14, INK, "end")]
    return svg.picture("Which context-parallel rank computes which part", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("context", draw)
