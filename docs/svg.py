"""The elements of the tour's pictures: a few SVG elements as text, the same bytes on every
machine."""

from collections.abc import Callable
from pathlib import Path

PP, DP, TP = "#c2410c", "#15803d", "#1d4ed8"  # the axes' colours, in all pictures
INK, PAPER, MUTED, FAINT = "#1f2937", "#ffffff", "#6b7280", "#e5e7eb"
# colours of four ranks of one axis, which also differ in lightness
RANKS = ("#1d4ed8", "#60a5fa", "#0f766e", "#5eead4")
FONT = 'font-family="Helvetica, Arial, sans-serif"'
IMAGES = Path("docs/images")  # relative to the root of the repository, where all commands are run


def text(
    x: float,
    y: float,
    words: str,
    size: int = 14,
    colour: str = INK,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    look = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{words}</text>'


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str = PAPER,
    stroke: str = INK,
    radius: int = 0,
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}" '
        'stroke-width="1"/>'
    )


def line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    colour: str = INK,
    width: float = 1.5,
    dashes: str = "",
) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" '
        f'stroke-width="{width:g}"{dashed}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = INK, width: float = 1.5) -> str:
    """A horizontal or vertical line with an arrowhead at its end."""
    dx, dy = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    head = 8
    left = (x2 - head * dx - head / 2 * dy, y2 - head * dy - head / 2 * dx)
    right = (x2 - head * dx + head / 2 * dy, y2 - head * dy + head / 2 * dx)
    points = " ".join(f"{x:g},{y:g}" for x, y in ((x2, y2), left, right))
    shaft = line(x1, y1, x2 - head * dx, y2 - head * dy, colour, width)
    return f'{shaft}<polygon points="{points}" fill="{colour}"/>'


def picture(title: str, width: int, height: int, parts: list[str]) -> str:
    """The text of an SVG file with a white background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
            f"<title>{title}</title>",
            rectangle(0, 0, width, height, PAPER, "none", 12),
            *parts,
            "</svg>\n",
        ]
    )


def save(name: str, draw: Callable[[], str]) -> None:
    """Write docs/images/NAME.svg."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    out = IMAGES / f"{name}.svg"
    out.write_text(draw(), encoding="utf-8")
    print(f"wrote {out}")
