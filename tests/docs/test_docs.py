"""The documentation is true: every command of every page runs and prints what the page shows,
except for numbers, and every picture can be drawn.

A command that is not run says why on its page. tests/docs/transcripts.py describes how pages are
written.
"""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from docs.pictures import NAMES, pictures
from tests import ROOT
from tests.docs.transcripts import check, commands, copy_tree, matches
from tests.proofs.parity_tiers import thorough_but
from tools.timeline.draw import save

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def nav(section: str) -> list[str]:
    """The pages of a section of the site, from mkdocs.yml, which lists every page once."""

    def names(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry.removesuffix(".md")]
        below = entry.values() if isinstance(entry, dict) else entry
        return [name for each in below for name in names(each)]

    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return names(next(each[section] for each in listed if section in each))


TOUR = [name for name in nav("Tour") if name not in ("tour", "one_step")]
ALL = {page.name: commands(page) for page in PAGES}
# tests/docs/test_recipes.py runs the commands of the recipes, in a copy that has their edits.
RUN = {
    str(c): c
    for name, found in ALL.items()
    for c in found
    if not c.not_run and not name.startswith("recipes_")
}
# The commands of the manual, and those that start ranks or take over ten seconds, are run in the
# second tier.
SECOND = {
    name
    for name, c in RUN.items()
    if c.page.partition(".")[0] not in TOUR or "for cp in" in name or "Ranks(" in c.text
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("name", thorough_but(RUN.keys() - SECOND, RUN))
def test_a_command_prints_what_the_page_shows(name: str, copy: Path) -> None:
    check(RUN[name], copy)


def test_the_front_page_has_two_commands() -> None:
    found = [c.text.split("#")[0].strip() for c in commands(ROOT / "README.md")]
    assert found == ["make train", "make test"]


def test_the_site_and_the_first_page_of_the_tour_lead_to_every_page() -> None:
    first = (DOCS / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"({page.name})" not in first] == ["README.md"]
    sections = ("Tour", "Manual", "Reference", "Recipes")
    listed = sorted(name for section in sections for name in nav(section))
    assert listed == sorted([*(page.stem for page in PAGES if page.name != "README.md"), "tour"])


def test_a_page_of_the_tour_is_whole() -> None:
    """Every page of the tour has a picture, a command with output, and exercises; every picture and
    every exercise is on a page."""
    pages = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
    shown = {name: re.findall(r"\(images/(\w+)\.svg\)", text) for name, text in pages.items()}
    for name in TOUR:
        assert shown[name], name
        assert any(c.output for c in ALL[f"{name}.md"]), name
        assert f"exercises/test_{name}.py" in pages[name]
    assert {picture for found in shown.values() for picture in found} == {
        file.stem for file in (DOCS / "images").glob("*.svg")
    }
    text = "".join(pages.values())
    exercises = [file.name for file in (DOCS / "exercises").glob("test_*.py")]
    assert [name for name in exercises if f"exercises/{name}" not in text] == []


@pytest.mark.parametrize("name", thorough_but(set(NAMES) - {"pipeline"}, NAMES))
def test_a_picture_that_pages_show_has_todays_words(name: str, tmp_path: Path) -> None:
    """Those that are computed (docs/pictures.py); each word and figure is a comment in its file."""
    for file, figure in pictures([name]).items():
        save(figure, tmp_path / "picture.svg")
        assert ElementTree.parse(tmp_path / "picture.svg").getroot().tag.endswith("svg")
        drawn, shown = (
            re.findall("<!-- (.*) -->", path.read_text())
            for path in (tmp_path / "picture.svg", DOCS / "images" / f"{file}.svg")
        )
        assert drawn == shown != [], f"`python -m docs.pictures {name}` draws {file}.svg again"


def test_an_output_that_is_no_longer_true_is_found() -> None:
    """Control: output whose words or lines differ from what a page shows is found."""
    shown = "step 1 of 3\n…\nloss … nats\n"
    assert matches(shown, "step 1 of 3\nloss 4.2 nats\n")
    assert matches(shown, "step  1 of 12,288\nstep 2 of 3\n\nstep 3 of 3\nloss 4.2 nats\n")
    assert not matches(shown, "steps 1 of 3\nloss 4.2 nats\n")
    assert not matches(shown, "step 1 of 3\nloss 4.2 nats\nand more\n")
    assert not matches("equal: True", "equal: False")
