"""The site that `make site` builds is whole: every module is in it, and nothing is fetched from
elsewhere. The strict build refuses a dead link."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.modules import MODULES


@pytest.mark.thorough
def test_the_site_builds_and_is_whole(tmp_path: Path) -> None:
    """A page for every page and module, and none fetches anything from elsewhere. Pages and
    docstrings are in the index of the search; source is not, which would drown them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    found = {page.relative_to(tmp_path).with_suffix("").as_posix() for page in pages}
    documents = {page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "README"}
    assert {"index", "tour", *documents} <= found
    hidden = ("benchmarks", "docs", "tests")  # shown where a page links there
    for name in MODULES:
        file = f"code/{name.replace('.', '/')}"
        assert name.split(".")[0] in hidden or {f"{file}.py", f"{file}/__init__.py"} & found, name
    for page in pages:
        tags = re.findall(r"<(?:img|script|iframe|link)\b[^>]*>", page.read_text(encoding="utf-8"))
        loaded = [tag for tag in tags if 'rel="canonical"' not in tag]
        assert not [tag for tag in loaded if re.search(r"""(?:src|href)=["']?\w+:""", tag)], page
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    text = "\n".join(entry["text"] for entry in index["docs"])
    assert "ColumnParallelLinear" in text
    assert "Shoeybi" in text
    assert "def zero_bubble_h1" not in text
