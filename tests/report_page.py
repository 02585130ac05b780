"""A report page, written and read back."""

import json
from html.parser import HTMLParser
from pathlib import Path

from tools.report import __main__ as report


class Parsed(HTMLParser):
    """A page's tags with their attributes, and its text outside of scripts and styles."""

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
        if self._inside not in ("script", "style"):
            self.text += data + "\n"

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)

    def references(self) -> list[str]:
        """All addresses that a browser would fetch or follow."""
        keys = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")
        found = [
            value or ""
            for _, attributes in self.tags
            for key, value in attributes.items()
            if key in keys
        ]
        return [value for value in found if value != "data:,"]

    def charts(self) -> dict[str, dict]:
        """Name of its first line → data of each chart."""
        data = [
            json.loads(attributes["data-chart"] or "")
            for _, attributes in self.tags
            if "data-chart" in attributes
        ]
        return {chart["series"][0][0]: chart for chart in data if "series" in chart}


def written(run: Path, out: Path) -> Parsed:
    assert report.main([str(run), "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert parsed.references() == []
    assert parsed.count("script") == 1
    assert "url(" not in text
    assert "@import" not in text
    return parsed
