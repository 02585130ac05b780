"""Run a GPU benchmark at tiny size and read its rows."""

import json
from pathlib import Path
from typing import Any

import pytest


def tiny_rows(program: Any, folder: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status of a benchmark, and its rows by name: first those that it planned, then what
    it found out from them."""
    file = folder / f"{len(list(folder.iterdir()))}.rows"
    status = program.main(["--tiny", "--out", str(file), *arguments])
    refuse = lambda name: pytest.fail(f"{name} is not JSON")  # noqa: E731
    entries = [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]
    rows = [entry["row"] for entry in entries if "row" in entry]
    by_name = {row["name"]: row for row in rows}
    planned = entries[0]["planned"]
    assert list(by_name)[: len(planned)] == planned
    assert len(by_name) == len(rows)
    return status, by_name
