"""Draws docs/images/words.svg: what three collectives leave on each of four ranks. `python -m
docs.draw_words`"""

from docs import svg
from docs.svg import INK, MUTED, arrow, rectangle, text

RANKS, CELL = 4, 26
WIDTH, HEIGHT = 960, 260
LETTERS = "abcd"
# name → the cells of a rank before and after: (letters, is a sum); one row of cells per rank
EXAMPLES = {
    "all-gather": (lambda r: [LETTERS[r]], lambda r: list(LETTERS)),
    "reduce-scatter": (
        lambda r: [f"{each}{r}" for each in LETTERS],
        lambda r: [f"Σ{LETTERS[r]}"],
    ),
    "all-reduce": (
        lambda r: [f"{each}{r}" for each in LETTERS],
        lambda r: [f"Σ{each}" for each in LETTERS],
    ),
}
WORDS = {
    "all-gather": "each rank has a part, all get all parts",
    "reduce-scatter": "added up; each rank keeps a part",
    "all-reduce": "added up; all get all of the sum",
}


def cells(x: float, y: float, words: list[str], colour: str, start: int = 0) -> list[str]:
    """A row of cells with a word in each; the first cell is at place `start` of four."""
    parts = []
    for i, word in enumerate(words, start):
        parts += [rectangle(x + i * CELL, y, CELL, CELL, colour)]
        parts += [text(x + (i + 0.5) * CELL, y + 18, word, 13, INK, "middle")]
    return parts


def draw() -> str:
    parts = [text(40, 38, "Three collectives on four ranks", 20, weight=700)]
    light = ("#dbeafe", "#bfdbfe", "#ccfbf1", "#99f6e4")
    for column, (name, (before, after)) in enumerate(EXAMPLES.items()):
        x = 94 + column * 300
        parts += [text(x, 74, name, 16, svg.TP, weight=700)]
        for rank in range(RANKS):
            y = 88 + rank * (CELL + 6)
            if column == 0:
                parts += [text(36, y + 18, f"rank {rank}", 13, MUTED)]
            first, then = before(rank), after(rank)
            parts += cells(x, y, first, light[rank], rank if len(first) == 1 else 0)
            parts += cells(
                x + 150,
                y,
                then,
                "#fef3c7" if name != "all-gather" else "#e5e7eb",
                rank if len(then) == 1 else 0,
            )
        middle = 88 + 2 * (CELL + 6) - 3
        parts += [arrow(x + 112, middle, x + 142, middle, svg.TP, 2.5)]
        parts += [text(x, 88 + RANKS * (CELL + 6) + 18, WORDS[name], 13, INK)]
    return svg.picture("all-gather, reduce-scatter and all-reduce", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("words", draw)
