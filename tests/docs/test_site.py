"""The site that `make site` builds is whole: every module is in it, no link is dead, nothing is
fetched from elsewhere."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import ROOT
from tests.modules import MODULES


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


@pytest.mark.thorough
def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    """A page for every page and module; every link, file and anchor is there, and none is elsewhere
    but a link that the reader follows. Pages and docstrings are in the index of the search; source
    is not, which would drown them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {page: Links(page) for page in sorted(tmp_path.rglob("*.html"))}
    found = {page.relative_to(tmp_path).with_suffix("").as_posix() for page in pages}
    documents = {page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "README"}
    assert {"index", "tour", *documents} <= found
    hidden = ("benchmarks", "docs", "tests")  # shown where a page links there
    for name in MODULES:
        file = f"code/{name.replace('.', '/')}"
        assert name.split(".")[0] in hidden or {f"{file}.py", f"{file}/__init__.py"} & found, name
    dead = []
    for page, parsed in pages.items():
        assert not [load for load in parsed.loads if urlsplit(load).scheme], page
        for link in parsed.links | parsed.loads - {""}:
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            name = unquote(parts.fragment)
            is_named = not name or target not in pages or name in pages[target].names
            if not (target.exists() and is_named):
                dead.append((page.relative_to(tmp_path).as_posix(), link))
    assert dead == []
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = "\n".join(entry["text"] for entry in index["docs"])
    assert "ColumnParallelLinear" in text
    assert "Shoeybi" in text
    assert "def zero_bubble_h1" not in text
