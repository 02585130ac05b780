"""Draws docs/images/expert_mesh.svg: the two views of one mesh of eight ranks, that of most weights
and that of experts. `python -m docs.draw_expert_mesh`"""

import torch

from docs import svg
from docs.svg import FAINT, INK, MUTED, PAPER, rectangle, text
from parallel.axes import EXPERT_AXES, WEIGHT_AXES, MeshSizes

SIZES = MeshSizes(dp_shard=4, tp=2, ep=4)
EXPERTS = 8
WIDTH, HEIGHT = 960, 500
TOP, LEFTS = 150, (110, 590)
BOX_WIDTH, BOX_HEIGHT = 132, 62
# of tp and of ep ranks
TP_COLOURS = ("#1d4ed8", "#60a5fa")
DARK = ("#1d4ed8", "#0f766e")  # on which text is white


def grid(sizes: dict[str, int], down: str, across: str) -> list[list[int]]:
    """The ranks, as init_device_mesh numbers them: one row for each coordinate on axis `down`."""
    ranks = torch.arange(SIZES.world).view(tuple(sizes.values()))
    others = [i for i, axis in enumerate(sizes) if axis not in (down, across)]
    found: list[list[int]] = ranks.squeeze(others).tolist()
    return found


def cell(x: float, y: float, width: float, rank: int, lines: list[str], colour: str) -> str:
    ink = PAPER if colour in DARK else INK
    words = [text(x + width / 2, y + 22, f"{rank}", 18, ink, "middle", 700)]
    words += [
        text(x + width / 2, y + 39 + 14 * i, w, 11, ink, "middle") for i, w in enumerate(lines)
    ]
    return rectangle(x, y, width, BOX_HEIGHT, colour, PAPER, 6) + "".join(words)


def of_weights() -> list[str]:
    """dp_shard down, tp across."""
    x, ranks = LEFTS[0], grid(SIZES.of_weights(), "dp_shard", "tp")
    parts = [
        text(x - 70, TOP - 46, "The matrices of attention", 16, INK, weight=700),
        text(x - 70, TOP - 26, " × ".join(WEIGHT_AXES), 13, MUTED),
    ]
    for shard, row in enumerate(ranks):
        y = TOP + shard * (BOX_HEIGHT + 8)
        parts += [text(x - 12, y + 36, f"dp_shard {shard}", 12, MUTED, "end")]
        for tp, rank in enumerate(row):
            words = [f"half {tp} of a matrix,", f"shard {shard} of {SIZES.dp_shard}"]
            at = x + tp * (BOX_WIDTH + 8)
            parts += [cell(at, y, BOX_WIDTH, rank, words, TP_COLOURS[tp])]
    for tp in range(SIZES.tp):
        at = x + tp * (BOX_WIDTH + 8) + BOX_WIDTH / 2
        parts += [text(at, TOP - 8, f"tp {tp}", 12, MUTED, "middle")]
    return parts


def of_experts() -> list[str]:
    """efsdp down, ep across; each half of the picture is an ep group."""
    x, ranks = LEFTS[1] - 60, grid(SIZES.of_experts(), "efsdp", "ep")
    width, shards = 92, SIZES.of_experts()["efsdp"]
    local = EXPERTS // SIZES.ep
    parts = [
        text(x - 60, TOP - 46, "Experts", 16, INK, weight=700),
        text(x - 60, TOP - 26, " × ".join(EXPERT_AXES), 13, MUTED),
    ]
    for shard, row in enumerate(ranks):
        y = TOP + shard * 2 * (BOX_HEIGHT + 8) + (BOX_HEIGHT + 8) / 2
        size = 4 * (width + 6) + 10, BOX_HEIGHT + 20
        parts += [rectangle(x - 8, y - 10, *size, FAINT, "none", 10)]
        parts += [text(x - 14, y + 36, f"efsdp {shard}", 12, MUTED, "end")]
        for ep, rank in enumerate(row):
            first = ep * local
            words = [f"experts {first}, {first + local - 1}", f"shard {shard} of {shards}"]
            parts += [cell(x + ep * (width + 6), y, width, rank, words, svg.RANKS[ep])]
    for ep in range(SIZES.ep):
        at = x + ep * (width + 6) + width / 2
        parts += [text(at, TOP - 8, f"ep {ep}", 12, MUTED, "middle")]
    return parts


def draw() -> str:
    parts = [
        text(40, 38, f"The same eight ranks twice: {SIZES}", 20, weight=700),
        text(
            40,
            62,
            "All eight have different tokens. Ranks of one colour hold shards of the same weights.",
            14,
            MUTED,
        ),
        *of_weights(),
        *of_experts(),
        text(LEFTS[1] - 68, HEIGHT - 36, "grey: one ep group; it exchanges tokens", 14),
    ]
    return svg.picture("Two views of one mesh of eight ranks", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("expert_mesh", draw)
