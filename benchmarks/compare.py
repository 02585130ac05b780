"""What the comparisons on a CPU share.

A small machine does other work too, and its speed changes within minutes. So what is compared is
within one round or step, and medians are kept. CPU seconds are those of the operating system, which
other work hardly affects. Absolute numbers are specific to the machine, which every file of results
names."""

import datetime
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tools.command import CommandParser

ROOT = Path(__file__).parent.parent


def parser(name: str, description: str | None) -> CommandParser:
    """The options of a comparison of several rounds; results are written to results/NAME.json."""
    made = CommandParser(prog=f"python -m benchmarks.{name}", description=description)
    made.option("--rounds", 15, "N", "how often CPU seconds are measured")
    made.add_argument("--json", type=Path, default=ROOT / f"benchmarks/results/{name}.json")
    return made


def about(*packages: str) -> dict[str, Any]:
    """The date, the machine, and the versions of Python, torch and `packages`."""
    return {
        "date": str(datetime.date.today()),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **{package: version_of(package) for package in ("torch", *packages)},
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Prints the results, and writes them with the machine and the versions."""
    text = json.dumps({**about(), **results}, indent=1, ensure_ascii=False)
    print(text)
    path.write_text(text + "\n", encoding="utf-8")
