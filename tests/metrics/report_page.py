"""A report page, written and read back."""

import re
from html.parser import HTMLParser
from pathlib import Path

from tools.report import __main__ as report
from tools.report.charts import Chart, charts
from tools.report.run import read_run


class Parsed(HTMLParser):
    """A page's tags with their attributes, and its text outside of styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside != "style":
            self.text += data + "\n"

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def references(self) -> list[str]:
        """All addresses that a browser would fetch or follow; not those of parts of the page."""
        keys = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        found = [attributes.get(key) or "#" for _, attributes in self.tags for key in keys]
        return [value for value in found if value[0] != "#" and value != "data:,"]


def charts_of(run: Path) -> dict[str, Chart]:
    """The page's charts by title."""
    return {chart.title: chart for chart in charts(read_run(run))}


def written(run: Path, out: Path) -> Parsed:
    assert report.main([str(run), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert parsed.references() == []
    assert parsed.count("script") == 0
    assert "Content-Security-Policy\" content=\"default-src 'none'" in text
    assert not re.search(r"url\((?!#)|@import", text)
    return parsed
