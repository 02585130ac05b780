"""Reads the recipes of docs/extending.md, and carries them out: what tests/test_recipes.py proves
is what the page says.

A recipe is a section of the page. Its edits are fenced blocks, each below a line that says where it
goes:

    Write `path`:        the block is the file
    Append to `path`:    the block is put at the end of the file, after two empty lines
    In `path`:           a diff without line numbers: lines with a blank and with − must be in the
                         file, in this order and once; in their place come those with a blank and
                         with +
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EDIT = re.compile(
    r"^(Write|Append to|In) `([^`\n]+)`[^\n]*:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Edit:
    """One change of one file."""

    how: str  # Write, Append to, In
    path: str  # from the root of the repository
    block: str

    @property
    def added(self) -> int:
        """Lines that are new."""
        lines = [line for line in self.block.splitlines() if line.strip()]
        return sum(line.startswith("+") for line in lines) if self.how == "In" else len(lines)

    @property
    def removed(self) -> int:
        return (
            sum(line.startswith("-") for line in self.block.splitlines()) if self.how == "In" else 0
        )

    def apply(self, root: Path) -> None:
        """Raises ValueError where the file does not have what the page changes, or has it twice."""
        file = root / self.path
        if self.how == "Write":
            file.write_text(self.block, encoding="utf-8")
            return
        text = file.read_text(encoding="utf-8")
        if self.how == "Append to":
            file.write_text(f"{text}\n\n{self.block}", encoding="utf-8")
            return
        lines = self.block.splitlines()
        assert all(not line or line[0] in " +-" for line in lines), (
            f"{self.path}: a diff's line begins with a blank, + or -"
        )
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        if text.count(old) != 1:
            raise ValueError(f"{self.path} has this {text.count(old)} times, and not once:\n{old}")
        file.write_text(text.replace(old, new), encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    """A section of the page."""

    name: str
    line: int  # where it begins on the page, 1-based
    text: str
    edits: tuple[Edit, ...]


def recipes(page: Path = Path("docs/extending.md")) -> Iterator[Recipe]:
    """The sections that change something."""
    text = page.read_text(encoding="utf-8")
    for section in re.finditer(r"^## (.+)\n((?:(?!^## ).*\n)*)", text, re.MULTILINE):
        edits = tuple(Edit(how, path, block) for how, path, _, block in EDIT.findall(section[2]))
        if edits:
            yield Recipe(section[1], text[: section.start()].count("\n") + 1, section[2], edits)
