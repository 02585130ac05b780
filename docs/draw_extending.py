"""Draws docs/images/extending.svg: the files that each recipe in docs/ changes, and how many lines.
It reads the pages. `python -m docs.draw_extending`"""

from pathlib import Path

from docs import svg
from docs.recipes import Edit, Recipe, recipes
from docs.svg import FAINT, INK, MUTED, line, rectangle, text

WIDTH, LEFT, TOP, ROW, COLUMN = 1304, 290, 150, 28, 124
ROOMS = {  # first folder of a file → colour
    "model": "#1d4ed8",
    "parallel": "#c2410c",
    "data": "#15803d",
    "training": "#7c3aed",
    "runtime": "#be185d",
    "train.py": "#111827",
    "slurm": "#b45309",
    "proofs": "#0f766e",
    "tools": "#4d7c0f",
    "tests": "#6b7280",
}


def room_of(path: str) -> str:
    return path.split("/")[0]


def files(of: list[Recipe]) -> list[str]:
    """Every file that a recipe changes, in the order of ROOMS."""
    order = list(ROOMS)
    paths = {edit.path for recipe in of for edit in recipe.edits}
    return sorted(
        paths,
        key=lambda path: (
            order.index(room_of(path)) if room_of(path) in order else len(order),
            path,
        ),
    )


def lines_of(edits: list[Edit]) -> str:
    added, removed = sum(edit.added for edit in edits), sum(edit.removed for edit in edits)
    if edits[0].how == "Write":
        return f"{'all' if Path(edits[0].path).exists() else 'new'}: {added}"
    return f"+{added}" + (f" −{removed}" if removed else "")


def draw() -> str:
    of = list(recipes())
    paths = files(of)
    height = TOP + ROW * len(paths) + 40
    parts = [
        text(24, 38, "What a change touches: lines added and removed, by file", 20, weight=700),
        text(24, 62, "counted in the recipes, docs/new_*.md; nothing else changes", 14, MUTED),
    ]
    for column, recipe in enumerate(of):
        x = LEFT + COLUMN * column + COLUMN / 2
        words = recipe.name[0].lower() + recipe.name[1:]
        for i, part in enumerate(words.split(": ")):
            parts.append(
                text(
                    x,
                    TOP - 46 + 20 * i,
                    part,
                    14,
                    INK if i == 0 else MUTED,
                    "middle",
                    600 if i == 0 else 400,
                )
            )
    for row, path in enumerate(paths):
        y = TOP + ROW * row
        colour = ROOMS.get(room_of(path), INK)
        parts += [
            text(24, y + 19, path, 14, colour, weight=600),
            line(24, y + ROW, WIDTH - 24, y + ROW, FAINT, 1),
        ]
        for column, recipe in enumerate(of):
            edits = [edit for edit in recipe.edits if edit.path == path]
            if edits:
                x = LEFT + COLUMN * column
                parts.append(rectangle(x + 8, y + 4, COLUMN - 16, ROW - 8, colour, "none", 4))
                parts.append(
                    text(x + COLUMN / 2, y + 19, lines_of(edits), 13, svg.PAPER, "middle", 600)
                )
    return svg.picture("Which files each recipe touches", WIDTH, height, parts)


if __name__ == "__main__":
    for recipe in recipes():
        added, removed = (
            sum(getattr(edit, what) for edit in recipe.edits) for what in ("added", "removed")
        )
        print(
            f"{recipe.name:30} files {len({edit.path for edit in recipe.edits})}, lines +{added} "
            f"−{removed}"
        )
    svg.save("extending", draw)
