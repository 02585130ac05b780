"""The site that `make site` builds is whole: every module is in it, no link is dead, nothing is
fetched from elsewhere. The data of its stepped timelines are the schedules' own."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.website.hooks import DOCUMENTED, documented, file_of, page_of, source_of
from docs.website.timelines import MICRO_BATCHES, RANKS, timelines
from parallel.pipeline.actions import NAMES
from parallel.pipeline.schedules import SCHEDULES, build_schedule
from tests import ROOT
from tools.timeline.panels import stages_needed


class Links(HTMLParser):
    """What a page leads to (`links`), what it loads (`loads`), and its anchors (`names`)."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attrs}
        if "id" in found:
            self.names.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.add(found["href"])
        elif tag in ("img", "script", "iframe", "link") and found.get("rel") != "canonical":
            self.loads.add(found.get("src") or found.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.thorough
def test_the_site_builds_and_is_whole(site: Path) -> None:
    """A page for every page and module; every link, file and anchor is there, and none is elsewhere
    but a link that the reader follows."""
    pages = {page: Links(page) for page in sorted(site.rglob("*.html"))}
    for file in [*documented(), "README.md", "docs/README.md", "docs/pipeline.md"]:
        assert site / page_of(file).replace(".md", ".html") in pages, file
    dead = []
    for page, found in pages.items():
        assert not [load for load in found.loads if urlsplit(load).scheme], page
        for link in found.links | found.loads - {""}:
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            name = unquote(parts.fragment)
            is_named = not name or target not in pages or name in pages[target].names
            if not (target.exists() and is_named):
                dead.append((page.relative_to(site).as_posix(), link))
    assert dead == []


@pytest.mark.thorough
def test_the_site_is_searched(site: Path) -> None:
    """Pages and docstrings are in the index; source is not, which would drown them."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = "\n".join(entry["text"] for entry in index["docs"])
    assert "ColumnParallelLinear" in text
    assert "Shoeybi" in text
    assert "def zero_bubble_h1" not in text


@pytest.mark.thorough
def test_a_page_has_its_stepped_timeline(site: Path) -> None:
    page = (site / "pipeline.html").read_text(encoding="utf-8")
    assert re.search(r'<div class="timeline" data-timelines="\[\{&quot;name&quot;', page)
    assert "website/timeline.js" in page


def test_everything_public_is_documented() -> None:
    """All but tests, benchmarks and the pages' own code."""
    rooms = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert set(DOCUMENTED) == rooms - {"benchmarks", "docs", "tests"}
    assert {file.name for file in ROOT.glob("*.py")} <= set(documented())


@pytest.mark.parametrize(
    ("link", "source", "file"),
    [
        ("mesh.md", "docs/README.md", "docs/mesh.md"),
        ("../parallel/mesh.py", "docs/mesh.md", "parallel/mesh.py"),
        ("tools/plan/", "README.md", "tools/plan/__init__.py"),
        ("configs", "README.md", "configs"),
        ("nothing.md", "README.md", ""),
    ],
)
def test_a_link_leads_where_it_does_in_the_repository(link: str, source: str, file: str) -> None:
    assert file_of(link, source) == file


@pytest.mark.parametrize(
    "file", ["README.md", "docs/README.md", "docs/mesh.md", "parallel/mesh.py", "CONTRIBUTING.md"]
)
def test_a_page_knows_its_file(file: str) -> None:
    assert source_of(page_of(file)) == file


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stepped_timeline_is_the_schedule(name: str) -> None:
    """Its actions are those of the schedule, in order and without overlap. At the end no activation
    is held. A message goes to another rank."""
    (shown,) = timelines([name])
    v = stages_needed(name, RANKS, MICRO_BATCHES)
    schedule = build_schedule(name, RANKS, v, MICRO_BATCHES)
    for rank, (actions, expected) in enumerate(zip(shown["ranks"], schedule, strict=True)):
        found = [(each["kind"], each["stage"], each["microbatch"]) for each in actions]
        assert found == [(NAMES[kind], stage, microbatch) for kind, stage, microbatch in expected]
        assert all(a["end"] <= b["start"] for a, b in pairwise(actions))
        assert actions[-1]["held"] == 0
        assert max(each["held"] for each in actions) <= MICRO_BATCHES
        assert all(each["sends_to"] != rank for each in actions)
    assert shown["span"] == max(actions[-1]["end"] for actions in shown["ranks"])
