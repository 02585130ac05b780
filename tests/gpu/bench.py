"""Run GPU benchmarks at tiny size, in this process, and read their rows; and train.py, in another
process."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.runs import losses, write_config

PLUGIN = ("-q", "-p", "benchmarks.gpu.plugin", "-p", "no:cacheprovider")


def rows_of(folder: Path, *arguments: str) -> tuple[int, list[str], dict[str, dict[str, Any]]]:
    """The exit status of pytest, the planned names, and the rows by name."""
    file = folder / f"{len(list(folder.iterdir()))}.rows"
    gc.freeze()  # each row collects garbage, and would search all that other tests have left
    status = pytest.main([*PLUGIN, f"--out={file}", *arguments])
    gc.unfreeze()
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [entry["row"] for entry in entries if "row" in entry]
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows), "a name twice"
    return status, entries[0]["planned"], by_name


def train(folder: Path, data: Path, **sections: Any) -> dict[int, float]:
    """Runs train.py in `folder`; returns the loss of each step."""
    folder.mkdir()
    command = [sys.executable, "train.py", write_config(folder, data, **sections)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return losses(folder)
