"""Run GPU benchmarks at tiny size, in this process, and read their rows."""

import json
from pathlib import Path
from typing import Any

import pytest

PLUGIN = ("-q", "-p", "benchmarks.gpu.plugin", "-p", "no:cacheprovider")


def rows_of(folder: Path, *arguments: str) -> tuple[int, list[str], dict[str, dict[str, Any]]]:
    """The exit status of pytest, the planned names, and the rows by name."""
    file = folder / f"{len(list(folder.iterdir()))}.rows"
    status = pytest.main([*PLUGIN, f"--out={file}", *arguments])
    refuse = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
    entries = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    rows = [entry["row"] for entry in entries if "row" in entry]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows), "a name twice"
    return status, entries[0]["planned"], by_name
