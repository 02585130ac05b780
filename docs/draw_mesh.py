"""Draws docs/images/mesh.svg: eight ranks as a cube, and what is sent along each of its edges.
`python -m docs.draw_mesh`

Ranks are numbered as in `parallel/axes.py`: rank = (pp · dp_size + dp) · tp_size + tp.
"""

from itertools import product

from docs import svg
from docs.svg import INK, MUTED, PAPER, text

PP, DP, TP = 2, 2, 2
COLOURS = {"pp": svg.PP, "dp": svg.DP, "tp": svg.TP}
WIDTH, HEIGHT = 960, 520
BOX_WIDTH, BOX_HEIGHT = 92, 62

# The position of the first rank, and one step along each axis: tp to the right, dp into the depth,
# pp downwards.
ORIGIN = (92, 230)
STEP = {"tp": (186, 0), "dp": (108, -92), "pp": (0, 206)}

Rank = tuple[int, int, int]  # pp, dp, tp


def place(rank: Rank) -> tuple[float, float]:
    """The centre of a rank's box."""
    steps = tuple(zip(("pp", "dp", "tp"), rank, strict=True))
    x, y = (ORIGIN[i] + sum(STEP[axis][i] * n for axis, n in steps) for i in (0, 1))
    return x, y


def edge(axis: str, start: Rank) -> str:
    """The line from a rank to its neighbour on an axis. Only lines of the pipeline have arrows,
    because only the pipeline has a direction."""
    pp, dp, tp = start
    end = {"pp": (pp + 1, dp, tp), "dp": (pp, dp + 1, tp), "tp": (pp, dp, tp + 1)}[axis]
    (x1, y1), (x2, y2) = place(start), place(end)
    arrows = ""
    if axis == "pp":
        y1, y2 = y1 + BOX_HEIGHT / 2 + 3, y2 - BOX_HEIGHT / 2 - 3
        arrows = ' marker-start="url(#up)" marker-end="url(#down)"'
    line = f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    # interrupts a far line where a near line crosses it
    halo = f'{line} stroke="{PAPER}" stroke-width="10"/>'
    return f'{halo}{line} stroke="{COLOURS[axis]}" stroke-width="4"{arrows}/>'


def box(rank: Rank) -> str:
    """The box of one rank, with its number and its coordinates."""
    x, y = place(rank)
    pp, dp, tp = rank
    corner = (
        f'x="{x - BOX_WIDTH / 2:g}" y="{y - BOX_HEIGHT / 2:g}" width="{BOX_WIDTH}" '
        f'height="{BOX_HEIGHT}" rx="9"'
    )
    coordinates = (("pp", pp, -29), ("dp", dp, 0), ("tp", tp, 29))
    return "\n".join(
        [
            f'<rect {corner} fill="{PAPER}" stroke="{INK}" stroke-width="1.5"/>',
            text(x, y + 3, str((pp * DP + dp) * TP + tp), 24, anchor="middle", weight=700),
            *(
                text(x + dx, y + 22, f"{axis} {n}", 11, COLOURS[axis], "middle", 600)
                for axis, n, dx in coordinates
            ),
        ]
    )


def legend(y: float, axis: str, name: str, lines: list[str]) -> str:
    """The text about one axis: what it splits, and what is sent along it."""
    x = 500
    return "\n".join(
        [
            f'<line x1="{x}" y1="{y - 5}" x2="{x + 28}" y2="{y - 5}" stroke="{COLOURS[axis]}" '
            'stroke-width="5"/>',
            text(x + 40, y, f"{axis}: {name}", 16, COLOURS[axis], weight=700),
            *(text(x + 40, y + 21 * (i + 1), line) for i, line in enumerate(lines)),
        ]
    )


def cube() -> list[str]:
    """The cube, from the back to the front: the far face (dp 1), the edges into the depth, the near
    face (dp 0)."""
    faces = {}
    for dp in range(DP):
        edges = [edge("tp", (pp, dp, tp)) for pp, tp in product(range(PP), range(TP - 1))]
        edges += [edge("pp", (pp, dp, tp)) for pp, tp in product(range(PP - 1), range(TP))]
        faces[dp] = edges, [box((pp, dp, tp)) for pp, tp in product(range(PP), range(TP))]
    depth = [edge("dp", (pp, 0, tp)) for pp, tp in product(range(PP), range(TP))]
    return [*faces[1][0], *depth, *faces[1][1], *faces[0][0], *faces[0][1]]


def draw() -> str:
    head = (
        'orient="auto" markerWidth="3.4" markerHeight="3.4" viewBox="0 0 10 10" refY="5" '
        f'fill="{COLOURS["pp"]}"'
    )
    first, last = place((0, 1, 0)), place((PP - 1, 0, 0))
    half = STEP["tp"][0] / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>Eight ranks in three dimensions: tensor, data and pipeline parallel</title>",
        f'<defs><marker id="down" {head} refX="9"><path d="M0 0L10 5L0 10z"/></marker>',
        f'<marker id="up" {head} refX="1"><path d="M10 0L0 5L10 10z"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}"/>',
        text(40, 42, f"One model on eight ranks: {PP} · {DP} · {TP}", 20, weight=700),
        text(
            40,
            66,
            f"rank = (pp · {DP} + dp) · {TP} + tp, so ranks that communicate most are neighbours",
            14,
            MUTED,
        ),
        text(
            first[0] + half, first[1] - 42, "stage 0: embedding, first layers", 13, MUTED, "middle"
        ),
        text(
            last[0] + half,
            last[1] + 56,
            "stage 1: last layers, norm, head, loss",
            13,
            MUTED,
            "middle",
        ),
        *cube(),
        legend(
            140,
            "tp",
            "tensor parallel",
            [
                "Every matrix is split in two, and the sequence is split",
                "between matrices. Activations are all-gathered or",
                "reduce-scattered ten times per layer and micro-batch.",
            ],
        ),
        legend(
            256,
            "dp",
            "data parallel, sharded",
            [
                "Each half reads different sequences, and keeps half of",
                "the weights and of the optimizer's state. Weights are",
                "gathered and gradients reduce-scattered, once per step.",
            ],
        ),
        legend(
            372,
            "pp",
            "pipeline parallel",
            [
                "Each half holds half of the layers. Activations go",
                "down and their gradients come up, one message each",
                "per micro-batch.",
            ],
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    svg.save("mesh", draw)
