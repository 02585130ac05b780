"""Draws docs/images/experts.svg: how the rows of a few tokens travel over two ranks to four
experts. `python -m docs.draw_experts`

Two running ranks find the routes and exchange the rows with the functions of parallel/expert.py.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from docs import svg
from docs.svg import FAINT, INK, MUTED, PAPER, line, rectangle, text
from parallel.axes import MeshSizes
from parallel.expert import Exchange, ExpertParallel, find_routes
from parallel.mesh import build_mesh
from proofs.ranks import Ranks

EP, EXPERTS, K = 2, 4, 2
CHOSEN = (((0, 2), (1, 3), (0, 1)), ((1, 2), (0, 2), (2, 1)))  # by each token of each rank
LETTERS = "abcdef"

WIDTH, HEIGHT = 960, 560
ROW, BOX = 24, 42  # height and width of a row
TOPS = (128, 342)  # of the ranks
TOKENS, SORTED, ARRIVED, GROUPED = 70, 230, 510, 710  # left edges of the columns


@dataclass(frozen=True)
class Seen:
    """One rank's part. A row is a number: its token · K + its choice."""

    sorted: list[int]  # as they are sent
    send: list[int]  # how many of them to each rank
    arrived: list[int]
    grouped: list[int]  # sorted by expert again
    sizes: tuple[int, ...]  # of this rank's experts


def exchange() -> Seen:
    """On each rank."""
    rank = dist.get_rank()
    ep = ExpertParallel.of(build_mesh(MeshSizes(dp_shard=EP, ep=EP), "cpu", has_experts=True))
    chosen = torch.tensor(CHOSEN[rank])
    routes = find_routes(chosen, 1, EXPERTS, ep, whole_sequences=False)
    rows = torch.arange(chosen.numel())[routes.order] + rank * chosen.numel()
    there = Exchange(routes, ep.group)
    there.start_there(rows)
    (grouped,) = there.there()
    assert routes.local_order is not None
    arrived = torch.empty_like(grouped).index_copy_(0, routes.local_order, grouped)
    send = list(routes.send)
    return Seen(rows.tolist(), send, arrived.tolist(), grouped.tolist(), routes.groups.sizes)


def expert_of(row: int) -> int:
    token, choice = divmod(row, K)
    return [each for rank in CHOSEN for each in rank][token][choice]


def box(x: float, y: float, row: int) -> str:
    """A row: its token's letter, in its expert's colour."""
    dark = expert_of(row) % 2 == 0
    letter = text(x + BOX / 2, y + 17, LETTERS[row // K], 14, PAPER if dark else INK, "middle", 700)
    return rectangle(x, y, BOX, ROW, svg.RANKS[expert_of(row)], PAPER) + letter


def rank_of(rank: int, seen: Seen) -> list[str]:
    """The columns of one rank."""
    top = TOPS[rank]
    parts = [text(24, top + 17, f"rank {rank}", 14, INK, weight=700)]
    for i, chosen in enumerate(CHOSEN[rank]):
        y, letter = top + i * 2 * ROW, LETTERS[rank * len(CHOSEN[rank]) + i]
        parts += [rectangle(TOKENS + 20, y, BOX, 2 * ROW, FAINT, PAPER)]
        parts += [text(TOKENS + 20 + BOX / 2, y + 29, letter, 16, INK, "middle", 700)]
        for choice, expert in enumerate(chosen):
            x = TOKENS + 20 + BOX + 6
            parts += [rectangle(x, y + choice * ROW + 5, 14, 14, svg.RANKS[expert], "none")]
            parts += [text(x + 20, y + choice * ROW + 17, f"{expert}", 13, MUTED)]
    parts += [box(SORTED, top + i * ROW, row) for i, row in enumerate(seen.sorted)]
    parts += [box(ARRIVED, top + i * ROW, row) for i, row in enumerate(seen.arrived)]
    parts += [box(GROUPED, top + i * ROW, row) for i, row in enumerate(seen.grouped)]
    for i, row in enumerate(seen.arrived):
        to = top + (seen.grouped.index(row) + 0.5) * ROW
        parts += [line(ARRIVED + BOX + 3, top + (i + 0.5) * ROW, GROUPED - 3, to, MUTED, 1)]
    end = 0
    for local, size in enumerate(seen.sizes):
        middle, expert = top + (end + size / 2) * ROW, rank * len(seen.sizes) + local
        words = f"expert {expert}: {size} row" + ("s" if size != 1 else "")
        parts += [text(GROUPED + BOX + 14, middle + 5, words, 14)]
        end += size
    return parts


def sending(all_seen: list[Seen]) -> list[str]:
    """The lines of the all-to-all, from where a row is sent to where it arrives."""
    parts = []
    for rank, seen in enumerate(all_seen):
        for i, row in enumerate(seen.sorted):
            to = next(r for r, other in enumerate(all_seen) if row in other.arrived)
            end = TOPS[to] + (all_seen[to].arrived.index(row) + 0.5) * ROW
            start = TOPS[rank] + (i + 0.5) * ROW
            colour = svg.RANKS[expert_of(row)]
            parts.append(line(SORTED + BOX + 3, start, ARRIVED - 3, end, colour))
    return parts


def draw() -> str:
    with Ranks(EP) as ranks:
        seen = ranks.run(exchange, EP)
    numbers = "; ".join(
        f"rank {rank} sends {each.send[0]} and {each.send[1]} rows, receives {len(each.arrived)}"
        for rank, each in enumerate(seen)
    )
    heads = ("tokens, their experts", "sorted by expert", "received", "sorted by expert again")
    columns = zip((TOKENS, SORTED, ARRIVED, GROUPED), heads, strict=True)
    parts = [
        text(24, 38, f"{len(LETTERS)} tokens, {EXPERTS} experts, {EP} ranks", 20, weight=700),
        text(24, 60, f"each token goes to {K} experts; results return on the same way", 14, MUTED),
        *(text(x, TOPS[0] - 22, words, 13, MUTED) for x, words in columns),
        text((SORTED + BOX + ARRIVED) / 2, TOPS[0] - 22, "all-to-all", 13, INK, "middle", 700),
        *sending(seen),
        *(part for rank, each in enumerate(seen) for part in rank_of(rank, each)),
        text(24, HEIGHT - 22, numbers, 14),
    ]
    return svg.picture("How rows travel to their experts", WIDTH, HEIGHT, parts)


if __name__ == "__main__":
    svg.save("experts", draw)
