"""A pytest plugin by which benchmarks (`bench_…`) and tests on a GPU write rows, one for each.

    python -m pytest -p benchmarks.gpu.plugin benchmarks/gpu/kernels.py -k rms_norm
    … --out FILE               append the rows to this file
    … --budget-seconds 200     begin no further row after this time

The names of the rows are written before the first is measured, and each row as soon as it is there,
one JSON object a line. So a process that is killed loses nothing, and what it did not reach is
known:

    {"planned": ["copy", …]}       the names, most important first
    {"row": {"name": "copy", "status": "measured", …}}

A row has the numbers that a benchmark gives to the fixture `record`. One that fails is wrong if its
assertion does not hold. Not enough memory, and a package that is not there, are no failures, nor is
an error of another program than ours (marked `theirs`).
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.page import FAILED, MEASURED, NEEDS, NO_TIME, OUT_OF_MEMORY, in_short
from benchmarks.gpu.timing import DEVICE, free_memory
from model.kernels.backend import why_not_triton
from runtime.log.log_lines import finite
from runtime.start.init import init_distributed

TEXT_CHARACTERS = 3000  # of what is said about a failure, from its end


class Found(dict[str, dict[str, Any]]):
    """The rows that this process has measured, by name; a row that needs another is skipped without
    it."""

    def __missing__(self, name: str) -> dict[str, Any]:
        pytest.skip(f"there is no {name}")


@pytest.fixture(scope="session")
def found() -> Found:
    return Found()


@pytest.fixture
def record(request: pytest.FixtureRequest, found: Found) -> Callable[[dict[str, Any]], None]:
    def add(numbers: dict[str, Any]) -> None:
        request.node.user_properties += numbers.items()
        found[name_of(request.node.nodeid)] = numbers

    return add


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of one process, which every mesh needs, where Triton's kernels can run."""
    if (why := why_not_triton(DEVICE)) is not None:
        pytest.skip(why)
    init_distributed()
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def fresh(world: None) -> None:
    """Memory is free, also of what failed before."""
    for name in ("last_exc", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)
    free_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks.gpu")
    group.addoption("--out", type=Path, help="append the rows to this file")
    group.addoption("--budget-seconds", type=float, default=math.inf, help="then begin no row")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_functions", "bench_*")
    config.pluginmanager.register(Guard(config.getoption("budget_seconds")))
    if not hasattr(config, "workerinput"):  # pytest-xdist's other processes do not write
        config.pluginmanager.register(Rows(config.getoption("out")))


class Guard:
    """Skips what would begin too late, or cannot run."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() >= self.end:
            pytest.skip(NO_TIME)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        try:
            return (yield)
        except torch.OutOfMemoryError:
            why = OUT_OF_MEMORY
        except ModuleNotFoundError as error:
            why = f"not installed: {error.name}"
        except Exception as error:
            if item.get_closest_marker("theirs") is None:
                raise
            why = said_by(error)
        # outside the except clauses, where the error would still reference frames and their tensors
        pytest.skip(why)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and not call.excinfo.errisinstance(AssertionError):
            report.user_properties.append(("status", said_by(call.excinfo.value)))
        return report


def said_by(error: BaseException) -> str:
    first, *_ = str(error).strip().splitlines() or [""]
    return f"{FAILED}: {type(error).__name__}: {first[:200]}"


class Rows:
    """Writes a row when a benchmark or test has ended, and prints all at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        self.planned = False

    def append(self, entry: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite(entry), allow_nan=False) + "\n")

    def plan(self, ids: list[str]) -> None:
        if ids and not self.planned:
            self.planned = True
            self.append({"planned": [name_of(node_id) for node_id in ids]})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.plan([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.plan(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        row = {"name": name_of(report.nodeid), "status": MEASURED, **dict(report.user_properties)}
        if report.skipped:
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "expected to fail"
            why = why.removeprefix("Skipped: ")
            known = why.startswith((NO_TIME, OUT_OF_MEMORY, "not installed", FAILED))
            row["status"] = why if known else f"{NEEDS}: {why}"
            row["ours"] = not why.startswith(FAILED)
        elif report.failed:
            row["text"] = report.longreprtext[-TEXT_CHARACTERS:]
            row |= {"right": False} if row["status"] == MEASURED else {}
        elif "::bench_" not in report.nodeid or not report.user_properties:
            row["right"] = True
        self.rows.append(row)
        self.append({"row": row})

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for row in self.rows:
            said = in_short(row) if row["status"] == MEASURED else row["status"]
            terminalreporter.write_line(f"{row['name']:60} {said}")


def name_of(node_id: str) -> str:
    """The name of a row: of a benchmark, its parameters."""
    name = node_id.rpartition("::bench_")[2]
    if name == node_id:
        return node_id.removeprefix("tests/")
    function, bracket, parameters = name.partition("[")
    return parameters.removesuffix("]") if bracket else function.replace("_", " ")
