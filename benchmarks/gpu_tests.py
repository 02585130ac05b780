"""Runs the tests that need a GPU, one row for each file; without a GPU, in Triton's interpreter.

    python -m benchmarks.gpu_tests                 part of `make bench-gpu PART=right`

With pytest-xdist, several processes compile kernels at once. The exit status is 1 if a test failed.
"""

import os
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_process import ROOT
from benchmarks.gpu_rows import Cannot, Measurement, exit_status, options, parse, run_all
from tools.command import run_command

PROCESSES = 6
# Row → tests, and the expected seconds.
FILES = {
    "tests of kernels": (["tests/test_kernels.py", "tests/test_bit_hash.py"], 60),
    "tests of the optimizer's kernels": (["tests/test_kernel_adamw.py"], 40),
    "tests of the head's weight gradient": (
        ["tests/test_linear_cross_entropy.py::test_the_weight_gradient_is_summed_in_float32"],
        10,
    ),
    "tests of runs": (["tests/test_gpu.py"], 90),
}


def run(tests: list[str], seconds: float) -> dict[str, Any]:
    """Runs pytest: counts, and the names of the tests that failed."""
    if find_spec("pytest") is None:
        raise ModuleNotFoundError("no module named pytest", name="pytest")
    workers = ["-n", str(min(PROCESSES, os.cpu_count() or 1))] if find_spec("xdist") else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={file}"]
        command += [*workers, *tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise Cannot(f"{seconds:.0f} s were not enough") from None
        if not file.exists():
            raise RuntimeError((done.stdout + done.stderr).strip()[-200:] or "pytest said nothing")
        cases = list(ElementTree.parse(file).iter("testcase"))
    failed = [each.get("name") for each in cases if named(each, "failure", "error")]
    skipped = sum(named(each, "skipped") for each in cases)
    print(done.stdout[-3000:] if failed else "", end="")
    return {
        "right": bool(cases) and not failed and done.returncode in (0, 5),
        "tests": len(cases),
        "skipped": skipped,
        "failed": failed,
    }


def named(case: ElementTree.Element, *kinds: str) -> bool:
    return any(case.find(kind) is not None for kind in kinds)


def describe(row: dict[str, Any]) -> str:
    said = f"{row['tests']} tests, {row['skipped']} skipped, {len(row['failed'])} failed"
    return f"{row['name']:46}{said}" + "".join(f"\n    FAILED: {name}" for name in row["failed"])


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(options(__doc__, budget_seconds=300), arguments)
    rows = [
        Measurement(name, seconds, partial(run, tests, parsed.budget_seconds))
        for name, (tests, seconds) in FILES.items()
    ]
    return exit_status(run_all(rows, parsed, describe))


if __name__ == "__main__":
    run_command(main)
