"""Reads the recipes in docs/ and carries them out, so that tests/docs/test_recipes.py tests what
the pages say.

A recipe is a page, and its title is the recipe's name. Its edits are fenced blocks, each below a
line that says where it goes:

    Write `path`:        the block is the file
    Append to `path`:    the block is added at the end of the file, after two empty lines
    In `path`:           a diff without line numbers: the lines that begin with a blank or − must
                         occur in the file, in this order and once; the lines that begin with a
                         blank or + replace them
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGES = (
    "new_layer.md",
    "new_router.md",
    "new_schedule.md",
    "new_source.md",
    "new_optimizer.md",
    "new_axis.md",
    "new_listener.md",
    "new_cluster.md",
)
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
        """The number of lines that the edit adds."""
        lines = [line for line in self.block.splitlines() if line.strip()]
        return sum(line.startswith("+") for line in lines) if self.how == "In" else len(lines)

    @property
    def removed(self) -> int:
        return (
            sum(line.startswith("-") for line in self.block.splitlines()) if self.how == "In" else 0
        )

    def apply(self, root: Path) -> None:
        """Make the edit in `root`. Raises ValueError if the lines to change do not occur exactly
        once."""
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
    """A page that changes something."""

    name: str
    page: Path
    edits: tuple[Edit, ...]


def recipes(docs: Path = Path("docs")) -> Iterator[Recipe]:
    """The recipes in the folder `docs`, in the order of PAGES."""
    for name in PAGES:
        page = docs / name
        text = page.read_text(encoding="utf-8")
        edits = tuple(Edit(how, path, block) for how, path, _, block in EDIT.findall(text))
        yield Recipe(text.splitlines()[0].removeprefix("# "), page, edits)
