"""What the comparisons on a CPU share.

A small machine does other work too, and its speed changes within minutes. So what is compared takes
turns, ratios are computed within a round, and their medians are kept. CPU seconds are those of the
operating system, which other work hardly affects. Absolute numbers are specific to the machine,
which every file of results names."""

import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from tools.command import CommandParser

ROOT = Path(__file__).parent.parent
K, T = TypeVar("K"), TypeVar("T")


def cpu_seconds() -> float:
    """Of this process and its threads, and of children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def cpu_seconds_of(work: Callable[[], object]) -> float:
    began = cpu_seconds()
    work()
    return cpu_seconds() - began


def alternate(programs: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Runs each program once in every round, and returns its results by round. Every second round
    goes backwards, so that none always runs just after the same one."""
    found: dict[K, list[T]] = {name: [] for name in programs}
    for number in range(rounds):
        for name in list(programs)[:: -1 if number % 2 else 1]:
            found[name].append(programs[name]())
    return found


def ratio(ones: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """The ratio within a round: its median, and the range of rounds."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return {"median": statistics.median(found), "min": min(found), "max": max(found)}


def run_watched(command: Sequence[str]) -> tuple[str, int]:
    """Runs a program; returns its output, and the peak of the memory of all its processes: the sum
    of their proportional set sizes, in which a shared page counts once. (0 but on Linux.)"""
    import psutil

    # into a file, as a full pipe would stop it
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(command, cwd=ROOT, stdout=out) as running,
    ):
        root, peak = psutil.Process(running.pid), 0
        while running.poll() is None:
            try:
                everyone = [root, *root.children(recursive=True)]
                sizes = [getattr(each.memory_full_info(), "pss", 0) for each in everyone]
                peak = max(peak, sum(sizes))
            except psutil.Error:  # one has just ended
                pass
            time.sleep(0.5)  # to look takes milliseconds of CPU time for each process
        out.seek(0)
        output = out.read()
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return output, peak


def parser(name: str, description: str | None, rounds: int) -> CommandParser:
    """The options of a comparison of several rounds; results are written to results/NAME.json."""
    made = CommandParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--rounds", type=int, default=rounds, help=f"default: {rounds}")
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


def write(path: Path, results: Mapping[str, Any], *packages: str) -> None:
    """Prints the results, and writes them with the machine and the versions of `packages`."""
    text = json.dumps({**about(*packages), **results}, indent=1, ensure_ascii=False)
    print(text)
    path.write_text(text + "\n", encoding="utf-8")
